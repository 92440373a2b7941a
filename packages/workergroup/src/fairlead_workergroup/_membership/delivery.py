# SPDX-License-Identifier: Apache-2.0
"""The requests of a change to workers that keep running, through the queue of their calls."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import ray
from ray import ObjectRef

from .. import _world
from .._model import Member
from .._observe.display import Bar
from .._observe.query import late_workers
from .._remote.facts import apply_facts, do_nothing
from .._world import Deadline
from ..exceptions import FailureKind, LateWorker, WorkerFailure
from .core import Core
from .losses import find_losses

# When a worker has failed, the others may wait for it in a collective, and nothing good comes of that.
OTHERS_S = 10.0
# How often a wait for calls looks whether it is to be given up.
LOOK_EVERY_S = 0.2

Check = Callable[[], None]


@cache
def pickle_function(function: Callable[..., Any]) -> bytes:
    """Return a function of `_remote` as it travels to workers."""
    return bytes(ray.cloudpickle.dumps(function))


def _send(member: Member, function: Callable[..., Any], *args: Any, alone: bool, until: Deadline) -> ObjectRef:
    """Send a function that runs between two calls of a worker; `alone`, it waits for overlapping ones."""
    name, pickled = function.__name__, pickle_function(function)
    if alone:
        how = {"method": name, "function": True, "alone": until.left(at_most=3600.0)}
        ref: ObjectRef = member.handle._fairlead_call.remote(how, pickled, *args)
    else:
        ref = member.handle._fairlead_apply.remote(name, pickled, *args)
    return ref


def send_facts(member: Member, changes: Mapping[str, Any], layout: Any, until: Deadline, *, alone: bool) -> ObjectRef:
    """Send a worker the facts that change; return a future."""
    return _send(member, apply_facts, changes, layout, alone=alone, until=until)


def find_late(members: Sequence[Member], until: Deadline, check: Check, *, concurrent: bool) -> list[int]:
    """Wait until everything that was sent to workers has ended; return the late ranks."""
    refs = {one.rank: _send(one, do_nothing, alone=concurrent, until=until) for one in members}
    errors, late = wait_for(refs, until, "Waiting for calls", check, patient=True)
    # A worker that is lost now is found when the facts are sent to it.
    return late + [rank for rank, error in errors.items() if isinstance(getattr(error, "cause", None), TimeoutError)]


def drain(
    core: Core, members: Sequence[Member], until: Deadline, check: Check, *, concurrent: bool
) -> tuple[LateWorker, ...]:
    """Wait until the calls of workers have ended; return those that are late, with what they do."""
    late = find_late(members, until, check, concurrent=concurrent)
    return late_workers([core.now.members[rank] for rank in late]) if late else ()


def explain_failure(core: Core, member: Member, error: Exception, what: str, kind: FailureKind) -> WorkerFailure:
    """Return why a worker did not take part in a change, after some words about what it did."""
    if loss := find_losses(core, {member: error}).get(member):
        return loss
    cause = getattr(error, "cause", None) or error
    return member.failure(kind, f"{what}it raised {type(cause).__name__}: {cause}")


def wait_for(
    futures: Mapping[Any, Any], until: Deadline, what: str, check: Check, *, patient: bool = False
) -> tuple[dict[Any, Exception], list[Any]]:
    """Wait for one future of each rank, or key that ends with a rank; return the errors, and the late keys.

    After a failure, the others have only a short time, unless the wait is patient.
    """
    key_of = {future: key for key, future in futures.items()}
    pending = list(key_of)
    errors: dict[Any, Exception] = {}
    with Bar(what, len(pending)) as bar:
        while pending:
            left = until.left(at_most=LOOK_EVERY_S)
            ready, pending = _world.current.wait(pending, num_returns=len(pending), timeout=left, fetch_local=True)
            for future in ready:
                try:
                    _world.current.get([future], timeout=None)
                except Exception as error:  # noqa: BLE001  a method of the user may raise anything
                    errors[key_of[future]] = error
            if errors and not patient:
                until, patient = until.sooner(Deadline.after(OTHERS_S)), True
            slow = {key[-1] if isinstance(key := key_of[one], tuple) else key for one in pending}
            bar.show(len(key_of) - len(pending), waiting_for=sorted(slow))
            if pending and until.passed:
                break
            if pending:
                check()
    return errors, sorted(key_of[future] for future in pending)

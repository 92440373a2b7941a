# SPDX-License-Identifier: Apache-2.0
"""The requests of a change to workers that keep running, through the queue of their calls."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import ray
from ray import ObjectRef

from .. import _world
from .._membership.model import Member
from .._observe.display import Bar
from .._observe.evidence import judge_errors
from .._observe.query import late_workers
from .._remote.facts import apply_facts, do_nothing
from .._world import NEVER, Deadline
from ..exceptions import LateWorker, WorkerFailure
from .launcher import Launcher

# When a worker has failed, the others may wait for it in a collective, and nothing good comes of that.
OTHERS_S = 10.0
# How often a wait for calls looks whether it is to be given up.
LOOK_EVERY_S = 0.2


@cache
def pickle_function(function: Callable[..., Any]) -> bytes:
    """Return a function of `_remote` as it travels to workers."""
    return bytes(ray.cloudpickle.dumps(function))


def _send(
    member: Member, function: Callable[..., Any], *args: Any, concurrent: bool = False, deadline: Deadline = NEVER
) -> ObjectRef:
    """Send a function that runs between two calls of a worker; if its calls overlap, it waits until the deadline."""
    name, pickled = function.__name__, pickle_function(function)
    if concurrent:
        how = {"method": name, "function": True, "alone": deadline.left(at_most=3600.0)}
        ref: ObjectRef = member.handle._fairlead_call.remote(how, pickled, *args)
    else:
        ref = member.handle._fairlead_apply.remote(name, pickled, *args)
    return ref


class Delivery:
    """Make these requests for the owner of the membership."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def quiesce(
        self, members: Sequence[Member], deadline: Deadline, check: Callable[[], None]
    ) -> tuple[LateWorker, ...]:
        """Wait until the calls of these workers that have begun have ended; return those that are late."""
        refs = self._drain(members, deadline)
        errors, late = self.wait_for(refs, deadline, "Waiting for calls", check, patient=True)
        # A worker that is lost now is found when the facts are sent to it.
        late += [rank for rank, error in errors.items() if isinstance(getattr(error, "cause", None), TimeoutError)]
        return late_workers([member.process for member in members if member.rank in late]) if late else ()

    def send_facts(self, member: Member, changes: Mapping[str, Any], deadline: Deadline, *, alone: bool) -> ObjectRef:
        """Send a worker the facts that change, through the queue of its calls; return a future."""
        layout = self._launcher.layout() if "world_size" in changes else None
        concurrent = alone and self._launcher.worker_class.concurrent
        return _send(member, apply_facts, changes, layout, concurrent=concurrent, deadline=deadline)

    def drain(self, members: Sequence[Member], deadline: Deadline, check: Callable[[], None]) -> Sequence[int]:
        """Wait until workers that leave have finished their calls; return the late ranks."""
        refs = self._drain(members, deadline)
        return self.wait_for(refs, deadline, "Waiting for workers that leave", check, patient=True)[1]

    def _drain(self, members: Sequence[Member], deadline: Deadline) -> dict[int, ObjectRef]:
        """Return a reference for each worker that is ready when everything sent to it before has ended, by rank."""
        concurrent = self._launcher.worker_class.concurrent
        return {one.rank: _send(one, do_nothing, concurrent=concurrent, deadline=deadline) for one in members}

    def explain(self, member: Member, error: Exception, what: str) -> WorkerFailure:
        """Return why a worker did not take part in a change, after some words about what it did."""
        if lost := judge_errors(self._launcher.resources.roster.judge, {member.process: error}):
            return lost[0].failure()
        cause = getattr(error, "cause", None) or error
        return member.process.failure("resize-failed", f"{what}it raised {type(cause).__name__}: {cause}")

    def wait_for(
        self,
        futures: Mapping[Any, Any],
        deadline: Deadline,
        what: str,
        check: Callable[[], None],
        *,
        patient: bool = False,
    ) -> tuple[dict[Any, Exception], list[Any]]:
        """Wait for one future of each rank, or key that ends with a rank; return the errors, and the late keys.

        After a failure, the others have only a short time, unless the wait is patient.
        """
        key_of = {future: key for key, future in futures.items()}
        pending = list(key_of)
        errors: dict[Any, Exception] = {}
        with Bar(what, len(pending)) as bar:
            while pending:
                left = deadline.left(at_most=LOOK_EVERY_S)
                ready, pending = _world.current.wait(pending, num_returns=len(pending), timeout=left, fetch_local=True)
                for future in ready:
                    try:
                        _world.current.get([future], timeout=None)
                    except Exception as error:  # noqa: BLE001  a method of the user may raise anything
                        errors[key_of[future]] = error
                if errors and not patient:
                    deadline, patient = deadline.sooner(Deadline.after(OTHERS_S)), True
                slow = {key[-1] if isinstance(key := key_of[one], tuple) else key for one in pending}
                bar.show(len(key_of) - len(pending), waiting_for=sorted(slow))
                if pending and deadline.passed:
                    break
                if pending:
                    check()
        return errors, sorted(key_of[future] for future in pending)

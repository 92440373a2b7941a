# SPDX-License-Identifier: Apache-2.0
"""The requests of a change to workers that keep running, through the queue of their calls."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import ray
from ray import ObjectRef

from .. import _world
from .._model import Member
from .._remote.setup import do_nothing
from .._world import Deadline

_Key = TypeVar("_Key", int, tuple[int, str])  # a rank, or that with what it does

# When a worker has failed, the others may wait for it in a collective, and nothing good comes of that.
OTHERS_S = 10.0
# How often a wait for calls looks whether it is to be given up.
LOOK_EVERY_S = 0.2

# Raises, or returns True, if a wait is to be given up.
Check = Callable[[], bool | None]


@cache
def _pickle(function: Callable[..., Any]) -> bytes:
    return bytes(ray.cloudpickle.dumps(function))


def send_function(member: Member, function: Callable[..., Any], *args: Any, alone: bool, until: Deadline) -> ObjectRef:
    """Send a function that runs between two calls of a worker; `alone`, it waits for overlapping ones."""
    name, pickled = function.__name__, _pickle(function)
    if alone:
        how = {"method": name, "function": True, "alone": until.left(at_most=3600.0)}
        ref: ObjectRef = member.handle._fairlead_call.remote(how, pickled, *args)
    else:
        ref = member.handle._fairlead_apply.remote(name, pickled, *args)
    return ref


def find_late(members: Sequence[Member], until: Deadline, check: Check, *, concurrent: bool) -> list[int]:
    """Wait until everything that was sent to workers has ended; return the late ranks."""
    refs = {member.rank: send_function(member, do_nothing, alone=concurrent, until=until) for member in members}
    errors, late = wait_for(refs, until, check, patient=True)
    # A worker that is lost now is found when the facts are sent to it.
    return late + [rank for rank, error in errors.items() if isinstance(getattr(error, "cause", None), TimeoutError)]


def wait_for(
    futures: Mapping[_Key, Any], until: Deadline, check: Check, *, patient: bool = False
) -> tuple[dict[_Key, Exception], list[_Key]]:
    """Wait for the futures of ranks; return the errors, and the late ones, by their keys.

    After a failure, the others have only a short time, unless the wait is patient.
    """
    key_of = {future: key for key, future in futures.items()}
    pending, errors = list(key_of), dict[_Key, Exception]()
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
        if pending and (until.passed or check()):
            break
    return errors, sorted(key_of[future] for future in pending)

# SPDX-License-Identifier: Apache-2.0
"""The delivery of the facts of an epoch to workers that keep running, through the queue of their calls."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import ray
from ray import ObjectRef

from .._deadline import NEVER, Deadline, Operation
from .._display import Bar
from .._futures import get_one, wait
from .._membership.model import Member
from .._membership.roster import direct
from .._observe.failures import as_failure
from .._observe.query import late_workers
from .._remote.facts import apply_facts, do_nothing
from ..exceptions import BrokenEpochError, WorkerFailure, WorkerFailureError
from .launcher import Launcher

# Sends the user's `on_resize` to ranks; returns a future for each, or nothing without such a method.
SendOnResize = Callable[[Sequence[int]], Mapping[int, Any]]

# When a worker has failed, the others may wait for it in a collective, and nothing good comes of that.
OTHERS_S = 10.0


@cache
def pickle_function(function: Callable[..., Any]) -> bytes:
    """Return a function of `_remote` as it travels to workers."""
    return bytes(ray.cloudpickle.dumps(function))


def _send(
    member: Member, function: Callable[..., Any], *args: Any, concurrent: bool = False, deadline: Deadline = NEVER
) -> ObjectRef:
    """Send a function that runs between two calls of a worker; if its calls overlap, it waits until the deadline."""
    name, pickled = function.__name__, pickle_function(function)
    with direct(member):
        if concurrent:
            within_s = deadline.left(at_most=3600.0)
            ref: ObjectRef = member.handle._fairlead_function_alone.remote(within_s, name, pickled, *args)
        else:
            ref = member.handle._fairlead_apply.remote(name, pickled, *args)
        return ref


def send_epoch(members: Iterable[Member], epoch: int) -> None:
    """Send the number of an epoch whose other facts are those of the epoch before; nobody waits for it."""
    for member in members:
        _send(member, apply_facts, {"epoch": epoch})


def send_handover(member: Member, method: str) -> tuple[ObjectRef, ObjectRef]:
    """Send a method to a worker; return references to its value and to None, which has the same error if it fails."""
    with direct(member):
        value, end = member.handle._fairlead_hand_over.options(num_returns=2).remote(method)
    return value, end


def drain(members: Iterable[Member], deadline: Deadline, *, concurrent: bool) -> dict[int, ObjectRef]:
    """Return a reference for each worker that is ready when everything sent to it before has ended, by rank."""
    return {one.rank: _send(one, do_nothing, concurrent=concurrent, deadline=deadline) for one in members}


def wait_until_idle(operation: Operation, members: Sequence[Member], *, concurrent: bool) -> None:
    """Wait until the calls of these workers have ended.

    Raises:
        ResizeTimeoutError: some have not ended by the deadline.
    """
    refs = drain(members, operation.deadline, concurrent=concurrent)
    errors, late = wait_for(refs, operation.deadline, operation.what, patient=True)
    # A worker that is lost now is found when the facts are sent to it.
    late += [rank for rank, error in errors.items() if isinstance(getattr(error, "cause", None), TimeoutError)]
    if late:
        workers = [member.process for member in members if member.rank in late]
        raise operation.late_error(
            "It waited for calls that were made before. Make it again with a longer timeout, or cancel these calls:",
            late_workers(workers),
        )


def deliver(launcher: Launcher, deadline: Deadline, *, skip: Collection[int], send_on_resize: SendOnResize) -> None:
    """Send the facts of the present epoch to all members except `skip`, then run `on_resize` on all of them.

    Raises:
        BrokenEpochError: a worker failed or had not finished by the deadline. The roster says so.
        WorkerGroupError: the group is being shut down.
    """
    roster = launcher.resources.roster
    now = roster.snapshot()
    what = f"Resizing {roster.name_prefix}"
    layout, concurrent = launcher.layout(), launcher.spec.concurrent
    sent = {}
    for member in now.members:
        if member.rank not in skip:
            facts = launcher.facts_of(member.rank, epoch=now.epoch)
            sent[member.rank] = _send(member, apply_facts, facts, layout, concurrent=concurrent, deadline=deadline)
    errors, late = wait_for(sent, deadline, what)
    if not errors and not late:
        try:
            ran = send_on_resize([member.rank for member in now.members])
        except WorkerFailureError as error:  # another thread has met the loss of a worker
            raise BrokenEpochError(roster.mark_broken(error.failures), epoch=now.epoch) from error
        errors, late = wait_for(ran, deadline, what)
    if roster.ending:  # that ends the workers too
        raise roster.ended_error()
    if errors or late:
        failures = [_explain(now[rank], error) for rank, error in errors.items()]
        failures += [
            now[rank].process.failure("resize-failed", "it had not finished when the resize had to end")
            for rank in late
        ]
        lost = roster.mark_broken(sorted(failures, key=lambda failure: failure.rank))
        raise BrokenEpochError(lost, epoch=now.epoch) from next(iter(errors.values()), None)
    roster.mark_repaired()


def _explain(member: Member, error: Exception) -> WorkerFailure:
    lost = as_failure(error, member.process)
    if lost is not None:
        return lost
    cause = getattr(error, "cause", None) or error
    return member.process.failure("resize-failed", f"it raised {type(cause).__name__}: {cause}")


def wait_for(
    refs: Mapping[int, Any], deadline: Deadline, what: str, *, patient: bool = False
) -> tuple[dict[int, Exception], list[int]]:
    """Wait for one future of each rank, with a bar that names the slow ranks.

    After a failure, the others have only a short time, unless the wait is patient.

    Returns:
        The errors by rank, and the ranks that have not finished.
    """
    rank_of = {ref: rank for rank, ref in refs.items()}
    pending = list(rank_of)
    errors: dict[int, Exception] = {}
    with Bar(what, len(pending)) as bar:
        while pending:
            ready, pending = wait(pending, num_returns=len(pending), timeout=deadline.left(at_most=0.2))
            for ref in ready:
                try:
                    get_one(ref)
                except Exception as error:  # noqa: BLE001  a method of the user may raise anything
                    errors[rank_of[ref]] = error
            if errors and not patient:
                deadline, patient = deadline.sooner(Deadline.after(OTHERS_S)), True
            bar.show(len(rank_of) - len(pending), waiting_for=sorted(rank_of[ref] for ref in pending))
            if pending and deadline.passed:
                break
    return errors, sorted(rank_of[ref] for ref in pending)

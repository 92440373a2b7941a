# SPDX-License-Identifier: Apache-2.0
"""The losses of workers that calls meet, and the exception that is raised."""

from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import TaskCancelledError

from .._membership.model import WorkerProcess
from .._membership.roster import Roster
from .._observe.evidence import ENDED_S, judge_errors, tells_of_a_loss
from .._observe.remote_errors import explain_errors
from .._transport import replies
from .._world import NEVER, Deadline
from ..exceptions import EpochError, format_ranks
from .core import Core

# Once a worker is known to be dead, the errors of others that have died with it are waited for until none has come for
# this long. Ray reports three deaths within about 20 ms, and within more than 0.1 s if all CPUs are taken.
TOGETHER_S = 0.15


def diagnose(
    refs: Sequence[ObjectRef[Any]],
    first: BaseException,
    core: Core | None,
    method: str = "",
    deadline: Deadline = NEVER,
) -> BaseException:
    """Return the exception to raise for a fetch that failed: the loss of workers, all that are lost, or a worker's own.

    It sends no request to Ray's head.
    """
    if isinstance(first, ray.exceptions.RayError):
        first.__traceback__ = None  # Ray's frames and ours: the traceback in the worker is in the text
        first.__suppress_context__ = True  # the error of another worker, with a traceback of its own
    if core is None or not refs:
        return first
    roster = core.roster
    failed, pending = _find_errors(refs, roster)
    known, until = 0, NEVER
    while pending and (lost_now := sum(map(tells_of_a_loss, failed.values()))) and not until.passed:
        if lost_now > known:
            known, until = lost_now, Deadline.after(TOGETHER_S)
        replies.wait(replies.wait(refs)[1], until.left(), first=True)
        failed, pending = _find_errors(refs, roster)
    # When a worker dies, the workers that communicate with it fail too, and their errors may arrive before Ray knows.
    # Otherwise it is the transfer of a value that has failed, and says nothing about those that have not finished.
    silent = pending if isinstance(first, ray.exceptions.RayTaskError) else ()
    within_s = deadline.left(at_most=ENDED_S) or 0.0
    if lost := judge_errors(roster.judge, failed, silent=silent, within_s=within_s):
        failure = core.failure_error(sorted(lost, key=lambda verdict: verdict.worker.rank))
        failure.__cause__ = next(iter(failed.values()), first)
        return failure
    return explain_errors(failed, method) if failed else first


def _find_errors(
    refs: Sequence[ObjectRef[Any]], roster: Roster
) -> tuple[dict[WorkerProcess, BaseException], list[WorkerProcess]]:
    """Return the errors of the workers that have failed, by rank, and the workers that have not finished."""
    done, pending = replies.wait(refs)
    failed: dict[WorkerProcess, BaseException] = {}
    for ref in done:
        worker, error = roster.find(replies.actor_of(ref)), replies.error_of(ref)
        if worker is not None and error is not None:
            failed.setdefault(worker, error)
    others = (roster.find(replies.actor_of(ref)) for ref in pending)
    return dict(sorted(failed.items(), key=lambda one: one[0].rank)), [one for one in others if one is not None]


def refused_epochs(error: BaseException | None) -> tuple[int, int] | None:
    """Return the epoch of a call and that of the worker that has refused it with this error; None if it has not."""
    epochs: tuple[int, int] | None = getattr(getattr(error, "cause", None), "fairlead_epochs", None)
    return epochs


def is_cancellation(error: BaseException | None) -> bool:
    """Return whether a worker has dropped a call that was cancelled before it started."""
    return isinstance(error, TaskCancelledError) or isinstance(getattr(error, "cause", None), TaskCancelledError)


def refused_error(method: str, planned: int, ranks: Sequence[int], epoch: int, ran: tuple[int, ...]) -> EpochError:
    """Return the error of a call that was planned for one epoch, and that only `ran` have run, because of another."""
    refused = tuple(rank for rank in ranks if rank not in ran)
    reason = f"{method!r} was planned for epoch {planned}, and the epoch of the group has changed: "
    if ran:
        reason += (
            f"rank(s) {format_ranks(ran)} have run it or begun to, and rank(s) {format_ranks(refused)} have not. The "
            "rest of the call was cancelled. Make the call again if these ranks may run it twice."
        )
    else:
        reason += "none of its workers has run it. Make the call again."
    return EpochError(reason, epoch, ran, refused)

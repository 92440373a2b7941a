# SPDX-License-Identifier: Apache-2.0
"""The errors of calls: the exception that is raised."""

from collections.abc import Sequence

import ray
from ray import ObjectRef
from ray.exceptions import TaskCancelledError

from .. import _world
from .._membership.judge import Verdict
from .._membership.model import WorkerProcess
from .._membership.roster import Roster
from .._observe.evidence import LOOK_S, judge_errors
from .._observe.remote_errors import explain_errors
from .._ray_private import actor_id_of_ref
from .._transport.futures import is_not_ready
from ..exceptions import EpochError, format_ranks
from .sender import Sender

# Ray knows within a moment that a process has ended.
KNOWN_S = 5.0


def explain_failure(refs: Sequence[ObjectRef], first: BaseException, sender: Sender | None) -> BaseException:
    """Return the exception to raise for a fetch that failed, with all ranks of a known group that failed so far."""
    if isinstance(first, ray.exceptions.RayError):
        first.__traceback__ = None  # Ray's frames and ours: the traceback in the worker is in the text
    if sender is None:
        return first
    failed: dict[WorkerProcess, BaseException] = {}
    finished, unnoticed = _find_finished(refs, first, sender.roster)
    for ref in finished:
        worker = sender.roster.find(actor_id_of_ref(ref))
        if worker is None:
            continue
        try:
            _world.current.get([ref], timeout=0)
        except Exception as error:  # noqa: BLE001  any exception of a worker
            if not is_not_ready(error):
                failed.setdefault(worker, error.with_traceback(None))
    if not failed and not unnoticed:
        return first
    errors = dict(sorted(failed.items(), key=lambda one: one[0].rank))
    if lost := [*judge_errors(sender.roster.judge, errors), *unnoticed]:
        failure = sender.failure_error(lost)
        failure.__cause__ = next(iter(errors.values()), first)
        return failure
    return explain_errors(errors)


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


def _find_finished(
    refs: Sequence[ObjectRef], first: BaseException, roster: Roster
) -> tuple[list[ObjectRef], list[Verdict]]:
    """Return the refs whose workers have finished or failed, and the verdicts on those that died without Ray noticing.

    When a worker dies, the workers that communicate with it fail too, and their errors may arrive before Ray knows of
    the death.
    """
    if not refs:
        return [], []
    done: list[ObjectRef]
    unnoticed: list[Verdict] = []
    done, pending = _world.current.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    if pending and isinstance(first, ray.exceptions.RayTaskError):
        waiting = {ref: who for ref in pending if (who := roster.find(actor_id_of_ref(ref))) is not None}
        verdicts = roster.judge.ask(waiting.values(), look="node", within_s=LOOK_S)
        dying = [ref for ref, worker in waiting.items() if verdicts[worker].is_lost]
        if dying:
            more, rest = _world.current.wait(dying, num_returns=len(dying), timeout=KNOWN_S, fetch_local=False)
            done += more
            unnoticed = [verdicts[worker] for worker in dict.fromkeys(waiting[ref] for ref in rest)]
    return done, unnoticed

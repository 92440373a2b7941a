# SPDX-License-Identifier: Apache-2.0
"""Calls of handles that workers have refused, because they are in another epoch of the group."""

from collections.abc import Sequence

from ray.exceptions import TaskCancelledError

from ..exceptions import StaleGroupError, format_ranks


def refused_epochs(error: BaseException | None) -> tuple[int, int] | None:
    """Return the epoch of a call and that of the worker that has refused it with this error; None if it has not."""
    epochs: tuple[int, int] | None = getattr(getattr(error, "cause", None), "fairlead_epochs", None)
    return epochs


def is_cancellation(error: BaseException | None) -> bool:
    """Return whether a worker has dropped a call that was cancelled before it started."""
    return isinstance(error, TaskCancelledError) or isinstance(getattr(error, "cause", None), TaskCancelledError)


def refused_error(method: str, planned: int, ranks: Sequence[int], epoch: int, ran: tuple[int, ...]) -> StaleGroupError:
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
    return StaleGroupError(reason, epoch, ran, refused)

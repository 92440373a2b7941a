# SPDX-License-Identifier: Apache-2.0
"""Attempt after attempt, until one succeeds or a budget is spent. Pure: attempts, clock and sleep are arguments."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .._accelerators.slices import SliceInfo
from ..exceptions import PreemptedTooOftenError, SliceLostError
from .budget import Backoff, Budget, Kind
from .status import JobFailed, JobInfo, JobPreempted, JobStatus, JobSucceeded
from .verdicts import process_died

__all__ = ["Crashes", "retry"]

logger = logging.getLogger(__name__)
_LOOK_S = 1.0


@dataclass(frozen=True)
class Crashes:
    """How to tell a crash of the function from the first sign of a preemption.

    Ray often reports that a process died, or that a connection broke, seconds before the host is gone: a cloud provider
    ends the processes of a virtual machine first.

    Attributes:
        grace_s: seconds after a failure within which the loss of one of its hosts makes it a preemption.
        lost: returns which of some slices have lost a host.
    """

    grace_s: float = 0.0
    lost: Callable[[Sequence[SliceInfo]], Sequence[SliceInfo]] = lambda slices: ()


def retry(
    attempt: Callable[[int], JobStatus],
    budget: Budget,
    backoff: Backoff,
    *,
    crashes: Crashes | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JobSucceeded:
    """Return the first success.

    Args:
        attempt: runs once. It gets the number of the attempt, from 1. An exception that it raises ends the retries.
        budget: how often an attempt may fail or be preempted.
        backoff: how long to wait before the next attempt.
        crashes: how to recognize a preemption that is first seen as a failure; None: not at all.

    Raises:
        PreemptedTooOftenError: slices were lost once more than allowed.
        BaseException: what the function raised the last time, with a note of the attempts.
    """
    crashes = crashes or Crashes()
    number = 0
    recent: list[tuple[float, JobInfo]] = []
    while True:
        number += 1
        began = clock()
        status = attempt(number)
        if isinstance(status, JobSucceeded):
            return status
        seen = clock()
        budget.ran(status.info.seconds)
        recent = _refund(recent, status, began, seen, budget)
        if isinstance(status, JobFailed) and budget.last_failure and process_died(status.error):
            status = _wait_for_loss(status, seen, crashes, sleep, clock)
        error: BaseException = status.error  # type: ignore[attr-defined]
        kind: Kind = "preemption" if isinstance(status, JobPreempted) else "failure"
        if not budget.spend(kind):
            if kind == "preemption":
                raise PreemptedTooOftenError(
                    status.info.name, budget.preemptions, budget.max_preemptions, str(error)
                ) from error
            again = ""
            if budget.healthy_after_s < math.inf:
                again = f", counted from zero after {budget.healthy_after_s:g} s without a failure"
            error.add_note(
                f"{status.info.name} was attempted {number} time(s): {budget.failures} failed "
                f"(max_retries_failure={budget.max_failures}{again}), {budget.preemptions} were preempted."
            )
            raise error
        wait = backoff.after(ran_s=status.info.seconds)
        if kind == "failure" and crashes.grace_s > 0:
            # Nobody looks at the hosts while the back-off lasts.
            recent.append((seen + max(crashes.grace_s, wait), status.info))
        logger.warning("attempt %d of %s: %s: %s; again in %.1f s", number, status.info.name, kind, error, wait)
        sleep(wait)


def _refund(
    recent: Sequence[tuple[float, JobInfo]],
    status: JobStatus,
    began: float,
    seen: float,
    budget: Budget,
) -> list[tuple[float, JobInfo]]:
    """Take back the failures whose slices were lost in time; return those whose time is not over.

    A slice was lost before an attempt began if the attempt ran on others, and while it ran if the attempt says so.
    """
    lost_now = status.error.slices if isinstance(status, JobPreempted) else ()  # type: ignore[attr-defined]
    left = []
    for until, info in recent:
        replaced = bool(set(info.slices) - set(status.info.slices)) and began <= until
        preempted = any(one.slice_name in lost_now for one in info.slices) and seen <= until
        if replaced or preempted:
            budget.refund()
            logger.warning("attempt %d of %s was preempted: its slices were lost after it", info.attempt, info.name)
        elif seen <= until:
            left.append((until, info))
    return left


def _wait_for_loss(
    status: JobFailed, seen: float, crashes: Crashes, sleep: Callable[[float], None], clock: Callable[[], float]
) -> JobStatus:
    """Wait until a host of a failed attempt is lost, which makes it a preemption, or the grace period is over."""
    while clock() - seen < crashes.grace_s:
        if lost := crashes.lost(status.info.slices):
            names = tuple(one.slice_name for one in lost)
            error = SliceLostError(names, f"first seen as {type(status.error).__name__}: {status.error}")
            error.__cause__ = status.error
            return JobPreempted(replace(status.info, state="preempted"), error)
        sleep(min(_LOOK_S, max(0.0, crashes.grace_s - (clock() - seen))))
    return status

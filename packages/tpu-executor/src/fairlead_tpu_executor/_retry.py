# SPDX-License-Identifier: Apache-2.0
"""Attempt after attempt, until one succeeds or a budget is spent. Pure: attempts, clock and sleep are arguments."""

import logging
import time
from collections.abc import Callable

from ._budget import Backoff, Budget, Kind
from ._status import JobPreempted, JobStatus, JobSucceeded
from .exceptions import PreemptedTooOftenError

__all__ = ["retry"]

logger = logging.getLogger(__name__)


def retry(
    attempt: Callable[[int], JobStatus],
    budget: Budget,
    backoff: Backoff,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JobSucceeded:
    """The first success.

    Args:
        attempt: runs once; is told the number of the attempt, from 1. What it raises is not repeated.
        budget: how often what may go wrong.
        backoff: how long to wait before the next.

    Raises:
        PreemptedTooOftenError: slices were lost once more than allowed.
        BaseException: what the function raised the last time, with a note of the attempts.
    """
    number = 0
    while True:
        number += 1
        began = clock()
        status = attempt(number)
        if isinstance(status, JobSucceeded):
            return status
        error: BaseException = status.error  # type: ignore[attr-defined]
        kind: Kind = "preemption" if isinstance(status, JobPreempted) else "failure"
        if not budget.spend(kind):
            if kind == "preemption":
                raise PreemptedTooOftenError(
                    status.info.name, budget.preemptions, budget.max_preemptions, str(error)
                ) from error
            error.add_note(
                f"{status.info.name} was attempted {number} time(s): {budget.failures} failed "
                f"(max_retries_failure={budget.max_failures}), {budget.preemptions} were preempted."
            )
            raise error
        wait = backoff.after(ran_s=clock() - began)
        logger.warning("attempt %d of %s: %s: %s; again in %.1f s", number, status.info.name, kind, error, wait)
        sleep(wait)

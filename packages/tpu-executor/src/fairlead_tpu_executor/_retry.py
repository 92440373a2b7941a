# SPDX-License-Identifier: Apache-2.0
"""Attempts that are repeated until one succeeds or a budget is spent. Pure: attempts and sleep are arguments."""

import logging
import random
import time
from collections.abc import Callable

from ._verdicts import JobError, JobFailed, JobPreempted, JobStatus, JobSucceeded, failed_start
from .exceptions import InsufficientSlicesError, PreemptionLimitError

logger = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 60.0
# After an attempt of this length the waits are short again.
_HEALTHY_S = 300.0


def retry(
    attempt: Callable[[int], JobStatus],
    *,
    max_failures: int,
    max_preemptions: int,
    sleep: Callable[[float], None] = time.sleep,
) -> JobSucceeded:
    """Repeat attempts, numbered from 1, until one succeeds or a budget is spent; a maximum of n allows n + 1.

    An accelerator that did not start uses the budget of failures: it may never start, and a budget of preemptions has
    no end in practice.
    """
    number = failures = preemptions = in_a_row = 0
    stuck: BaseException | None = None
    while True:
        number += 1
        try:
            status = attempt(number)
        except InsufficientSlicesError as lack:
            if stuck is None:
                raise
            stuck.add_note(str(lack))
            raise stuck  # noqa: B904 - its cause is Ray's error
        if isinstance(status, JobSucceeded):
            return status
        assert isinstance(status, JobPreempted | JobFailed | JobError)
        error, name, ran_s = status.error, status.info.name, status.info.seconds
        cause = error.__cause__ if isinstance(status, JobPreempted) else None
        stuck = failed_start(cause) if cause else None
        is_loss = isinstance(status, JobPreempted) and stuck is None
        failures, preemptions = failures + (not is_loss), preemptions + is_loss
        if preemptions > max_preemptions:
            raise PreemptionLimitError(name, preemptions, max_preemptions, str(error)) from error
        if failures > max_failures:
            own = stuck or error
            own.add_note(
                f"{name} was attempted {number} time(s): {failures} failed (max_retries_failure={max_failures}), "
                f"{preemptions} were preempted."
            )
            raise own
        in_a_row = 1 if ran_s >= _HEALTHY_S else in_a_row + 1
        wait = choose_wait(in_a_row)
        kind = "preemption" if is_loss else "failure"
        logger.warning("Attempt %d of %s ended in a %s. It is repeated in %.1f s. %s", number, name, kind, wait, error)
        sleep(wait)


def choose_wait(in_a_row: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Return the seconds to wait after so many short attempts: they double, with jitter, up to `_LONGEST_WAIT_S`.

    With the jitter, jobs that failed together do not start again together.
    """
    # The exponent is bounded, because a preemption budget lets it grow to a million.
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(in_a_row - 1, 60)) * uniform(0.5, 1.0)

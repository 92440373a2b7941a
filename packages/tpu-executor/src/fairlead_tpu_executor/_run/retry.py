# SPDX-License-Identifier: Apache-2.0
"""Attempts that are repeated until one succeeds or a budget is spent. Pure: attempts, clock and sleep are arguments."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..exceptions import InsufficientSlicesError, PreemptionLimitError
from .verdicts import JobError, JobFailed, JobInfo, JobPreempted, JobStatus, JobSucceeded, failed_start

logger = logging.getLogger(__name__)


@dataclass
class RetryBudget:
    """Counts failures and preemptions. A maximum of n allows n + 1 attempts."""

    max_failures: int
    max_preemptions: int
    healthy_after_s: float | None = None  # of running without a failure, after which failures count from zero
    failures: int = 0
    preemptions: int = 0
    healthy_s: float = 0.0  # of running since the last failure

    def add_running(self, seconds: float) -> None:
        """Count the seconds that an attempt ran on its hosts; reset the failures after a healthy period."""
        self.healthy_s += seconds
        if self.healthy_after_s is not None and self.healthy_s >= self.healthy_after_s:
            self.failures = 0

    def spend(self, *, preempted: bool) -> bool:
        """Count a preemption or a failure, and return whether another attempt is allowed."""
        if preempted:
            self.preemptions += 1
            return self.preemptions <= self.max_preemptions
        self.healthy_s = 0.0
        self.failures += 1
        return self.failures <= self.max_failures


@dataclass(kw_only=True)
class Backoff:
    """Waits that double, with jitter, so that jobs that failed together do not start again together."""

    base_s: float = 0.2  # the longest first wait; the shortest is half of it
    cap_s: float = 60.0
    healthy_s: float = 300.0  # an attempt of this length starts the waits again
    rng: random.Random = field(default_factory=random.Random)
    in_a_row: int = 0

    def after(self, *, ran_s: float) -> float:
        """Return the seconds to wait after an attempt that lasted `ran_s` and did not succeed."""
        self.in_a_row = 1 if ran_s >= self.healthy_s else self.in_a_row + 1
        # The exponent is bounded, because a preemption budget lets it grow to a million.
        most = min(self.cap_s, self.base_s * 2.0 ** min(self.in_a_row - 1, 60))
        return most * self.rng.uniform(0.5, 1.0)


def retry(
    attempt: Callable[[int], JobStatus],
    budget: RetryBudget,
    backoff: Backoff,
    *,
    grace_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JobSucceeded:
    """Repeat attempts, numbered from 1, until one succeeds; refund failures whose slices are lost within `grace_s`."""
    number = 0
    stuck: BaseException | None = None
    recent: list[tuple[float, JobInfo]] = []
    while True:
        number += 1
        began = clock()
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
        seen = clock()
        budget.add_running(status.info.seconds)
        recent = _refund(recent, status, began, seen, budget)
        error, name = status.error, status.info.name
        preempted = isinstance(status, JobPreempted)
        stuck = failed_start(error.__cause__) if preempted and error.__cause__ else None
        if not budget.spend(preempted=preempted):
            error = stuck or error
            if preempted and stuck is None:
                raise PreemptionLimitError(name, budget.preemptions, budget.max_preemptions, str(error)) from error
            again = ""
            if budget.healthy_after_s is not None:
                again = f", counted from zero after {budget.healthy_after_s:g} s without a failure"
            error.add_note(
                f"{name} was attempted {number} time(s): {budget.failures} failed "
                f"(max_retries_failure={budget.max_failures}{again}), {budget.preemptions} were preempted."
            )
            raise error
        wait = backoff.after(ran_s=status.info.seconds)
        if not preempted and grace_s > 0:
            # Nothing watches the hosts during the back-off.
            recent.append((seen + max(grace_s, wait), status.info))
        kind = "preemption" if preempted else "failure"
        logger.warning("Attempt %d of %s ended in a %s. It is repeated in %.1f s. %s", number, name, kind, wait, error)
        sleep(wait)


def _refund(
    recent: Sequence[tuple[float, JobInfo]], status: JobStatus, began: float, seen: float, budget: RetryBudget
) -> list[tuple[float, JobInfo]]:
    """Refund the failures whose slices were lost in time, and return those whose grace period is not over."""
    lost_now = status.error.slices if isinstance(status, JobPreempted) else ()  # type: ignore[attr-defined]
    left = []
    for until, info in recent:
        replaced = bool(set(info.slices) - set(status.info.slices)) and began <= until
        preempted = any(one.slice_name in lost_now for one in info.slices) and seen <= until
        if replaced or preempted:
            budget.failures = max(0, budget.failures - 1)
            logger.warning("Attempt %d of %s was preempted: its slices were lost after it.", info.attempt, info.name)
        elif seen <= until:
            left.append((until, info))
    return left

# SPDX-License-Identifier: Apache-2.0
"""How often a run may be repeated, and how long to wait before. Pure."""

import math
import random
from dataclasses import dataclass
from typing import Literal

__all__ = ["Backoff", "Budget", "Kind"]

Kind = Literal["failure", "preemption"]


@dataclass
class Budget:
    """Counts what went wrong, by kind.

    Attributes:
        max_failures: how many failures of the function are repeated: n means n + 1 runs.
        max_preemptions: the same for slices that were lost.
        healthy_after_s: seconds of running without a failure after which the count of failures starts from zero.
        failures: how many there were since it last did.
        preemptions: how many there were.
        healthy_s: seconds of running since the last failure.
    """

    max_failures: int
    max_preemptions: int
    healthy_after_s: float = math.inf
    failures: int = 0
    preemptions: int = 0
    healthy_s: float = 0.0

    @property
    def last_failure(self) -> bool:
        """Whether one more failure is one too many."""
        return self.failures >= self.max_failures

    def ran(self, seconds: float) -> None:
        """Count the seconds that an attempt ran on its hosts; forget the failures after a healthy period."""
        self.healthy_s += seconds
        if self.healthy_s >= self.healthy_after_s:
            self.failures = 0

    def spend(self, kind: Kind) -> bool:
        """Count one; whether there may be another run."""
        if kind == "failure":
            self.healthy_s = 0.0
            self.failures += 1
            return self.failures <= self.max_failures
        self.preemptions += 1
        return self.preemptions <= self.max_preemptions

    def refund(self) -> None:
        """Take back a failure that was the first sign of a preemption."""
        self.failures = max(0, self.failures - 1)


class Backoff:
    """Waits that double, with jitter, so that jobs that failed together do not come back together.

    Args:
        base_s: the most to wait the first time; the least is half of that.
        cap_s: the most to wait at all.
        healthy_s: a run that lasted this long starts over.
        rng: for tests.

    >>> waits = Backoff(base_s=1, cap_s=60)
    >>> 0.5 <= waits.after(ran_s=3) <= 1, 1 <= waits.after(ran_s=3) <= 2, 0.5 <= waits.after(ran_s=900) <= 1
    (True, True, True)
    """

    def __init__(
        self, *, base_s: float = 0.2, cap_s: float = 60.0, healthy_s: float = 300.0, rng: random.Random | None = None
    ) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._healthy_s = healthy_s
        self._random = rng or random.Random()
        self._in_a_row = 0

    def after(self, *, ran_s: float) -> float:
        """Seconds to wait after a run that lasted `ran_s` went wrong."""
        self._in_a_row = 1 if ran_s >= self._healthy_s else self._in_a_row + 1
        # The exponent is bounded: a preemption budget lets it grow to a million.
        most = min(self._cap_s, self._base_s * 2.0 ** min(self._in_a_row - 1, 60))
        return most * self._random.uniform(0.5, 1.0)

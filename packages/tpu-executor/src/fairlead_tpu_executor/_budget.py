# SPDX-License-Identifier: Apache-2.0
"""How often a run may be repeated, and how long to wait before. Pure."""

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
        failures: how many there were.
        preemptions: how many there were.
    """

    max_failures: int
    max_preemptions: int
    failures: int = 0
    preemptions: int = 0

    def spend(self, kind: Kind) -> bool:
        """Count one; whether there may be another run."""
        if kind == "failure":
            self.failures += 1
            return self.failures <= self.max_failures
        self.preemptions += 1
        return self.preemptions <= self.max_preemptions


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

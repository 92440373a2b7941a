# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: interleaved medians, and a table."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Row", "Timing", "interleaved", "table"]


class Row(NamedTuple):
    """One line of the results."""

    what: str
    measured: str
    must_reach: str
    ok: bool


class Timing(NamedTuple):
    """Seconds of one call: the median, and the quartiles as its spread."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        unit, factor = ("s", 1) if self.median >= 1 else ("ms", 1e3) if self.median >= 1e-3 else ("us", 1e6)
        low, mid, high = (f"{seconds * factor:.3g}" for seconds in (self.low, self.median, self.high))
        return f"{mid} {unit} ({low} to {high})"


def interleaved(*functions: Callable[[], object], repeats: int, calls: int = 1) -> list[Timing]:
    """One call of each function, taken in turns so that a busy moment hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            taken.append((time.perf_counter() - start) / calls)
    timings = []
    for taken in times:
        low, median, high = statistics.quantiles(taken, n=4)
        timings.append(Timing(median, low, high))
    return timings


def table(rows: Sequence[Row]) -> str:
    """Markdown, readable as it is."""
    lines = [("what", "measured", "must reach", "")]
    lines += [(row.what, row.measured, row.must_reach, "ok" if row.ok else "MISSED") for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    )

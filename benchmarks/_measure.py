# SPDX-License-Identifier: Apache-2.0
"""Helpers of the benchmarks: measure functions in turns, and format a table of the results."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["NOMINAL_S", "Row", "Timing", "interleaved", "table", "take_turns", "under"]

# Limits in seconds are for a machine on which `_sort_and_look_up` takes so long. A slower one gets more, by its factor.
NOMINAL_S = 0.05


class Row(NamedTuple):
    """One line of the results."""

    what: str
    measured: str
    must_reach: str
    ok: bool


class Timing(NamedTuple):
    """The time of one call in seconds, as the median and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """Return the median and the quartiles of measured times."""
        low, median, high = statistics.quantiles(seconds, n=4)
        return cls(median, low, high)

    def __str__(self) -> str:
        unit, factor = _unit(self.median)
        low, mid, high = (f"{seconds * factor:.3g}" for seconds in (self.low, self.median, self.high))
        return f"{mid} {unit} ({low} to {high})"


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is read best, and how many of it a second has."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)


def under(what: str, measured: str, seconds: float, limit_s: float) -> Row:
    """Return the row of a time that plain Python takes, with its limit on this machine as it is now."""
    slowness = statistics.median(_sort_and_look_up() for _ in range(7)) / NOMINAL_S
    unit, factor = _unit(limit_s)
    return Row(what, measured, f"under {limit_s * factor:g} {unit} x {slowness:.1f}", seconds < limit_s * slowness)


def _sort_and_look_up() -> float:
    """Return the seconds that a fixed piece of work takes, of the kind that plans of many things consist of."""
    began = time.perf_counter()
    rows = sorted((number * 7919 % 100_003, str(number)) for number in range(50_000))
    places = {name: key for key, name in rows}
    assert sum(places[str(number)] for number in range(0, 50_000, 2))
    return time.perf_counter() - began


def interleaved(*functions: Callable[[], object], repeats: int, calls: int = 1, pause_s: float = 0.0) -> list[Timing]:
    """Return the time of one call of each function; see `take_turns`."""
    return [Timing.of(seconds) for seconds in take_turns(*functions, repeats=repeats, calls=calls, pause_s=pause_s)]


def take_turns(
    *functions: Callable[[], object], repeats: int, calls: int = 1, pause_s: float = 0.0, settles: bool = False
) -> list[list[float]]:
    """Return the seconds of one call of each function, for each of its turns.

    The functions are called in turns, so that a busy moment of the machine affects all of them equally.

    Args:
        functions: the functions.
        repeats: the number of turns of each of them.
        calls: the number of calls in a turn.
        pause_s: the seconds between two turns, in which Ray ends what it still does after the calls of a turn.
        settles: whether each turn begins with a call that is not measured, and turns have a random order. For calls
            that depend on what was called before.
    """
    times: list[list[float]] = [[] for _ in functions]
    turns = list(zip(functions, times, strict=True))
    for _ in range(repeats):
        if settles:
            random.shuffle(turns)
        for function, seconds in turns:
            time.sleep(pause_s)
            if settles:
                function()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            seconds.append((time.perf_counter() - start) / calls)
    return times


def table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned Markdown table."""
    lines = [("what", "measured", "must reach", "")]
    lines += [(row.what, row.measured, row.must_reach, "ok" if row.ok else "MISSED") for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    )

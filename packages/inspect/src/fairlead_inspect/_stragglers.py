# SPDX-License-Identifier: Apache-2.0
"""Workers that are slower than their peers, along each axis."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fairlead_sharding import NamedSharding
from fairlead_workergroup import GroupHandle, RayWorkerGroup

from ._timeline import Span, Timeline, read_own_timeline

# With fewer calls a median says little.
LEAST_CALLS = 5
# By how much a worker must be slower than its peers.
SLOWER = 1.1
# By how many standard errors of its own median.
CERTAIN = 3.0
# How a late begin of a call changes its duration: 0 if workers do not wait for each other, -1 if they end together.
SYNCHRONOUS = -0.5
# Deviations that are so many times as large as usual are left out: the machine did something else.
OUTLIER = 4.0


@dataclass(frozen=True)
class WorkerTiming:
    """How long one worker takes for a method.

    Attributes:
        rank: its number in the group.
        coords: its coordinates, by axis.
        method: the method.
        calls: how many calls were measured.
        median_s: the median duration, without the time in `current_worker().waiting()`.
        ratios: along each axis, the median against the median of its peers.
        slow: the axes along which it is a straggler.
    """

    rank: int
    coords: Mapping[str, int] = field(hash=False)
    method: str
    calls: int
    median_s: float
    ratios: Mapping[str, float] = field(hash=False)
    slow: tuple[str, ...] = ()


@dataclass(frozen=True)
class StragglerReport:
    """How long the workers of a group take for their methods.

    Attributes:
        timings: of each method and worker, as far as at least 5 calls are known.
        ambiguous: methods in which workers wait for each other without `current_worker().waiting()`: all of them
            take equally long, whoever is slow.
    """

    timings: tuple[WorkerTiming, ...]
    ambiguous: tuple[str, ...] = ()

    @property
    def stragglers(self) -> tuple[WorkerTiming, ...]:
        """The timings of workers that are slower than their peers, the slowest first."""
        slow = [one for one in self.timings if one.slow]
        return tuple(sorted(slow, key=lambda one: -max(one.ratios[axis] for axis in one.slow)))


def stragglers(group: RayWorkerGroup | GroupHandle, method: str | None = None) -> StragglerReport:
    """Return how long each worker takes for its methods, and who is slower than its peers along an axis.

    A worker is slower if the median of its latest calls is at least a tenth above that of its peers, and the
    difference is certain. Workers that wait for each other take equally long, so time in `current_worker().waiting()`
    is not counted; a method that waits without it is ambiguous.

    Args:
        group: the group, or a handle of it.
        method: the name of a method; None for all.

    Raises:
        WorkerGroupError: the group, or its Ray, has been shut down.
        HeadTimeoutError: Ray's head did not answer in time.
    """
    return find_stragglers(read_own_timeline(group), method)


def find_stragglers(timeline: Timeline, method: str | None = None) -> StragglerReport:
    """Return how long each worker takes for a method, or for all methods, and who is slower than its peers."""
    sharding = timeline.group.sharding
    by_method: dict[str, dict[int, list[Span]]] = {}
    for one in timeline.workers:
        for span in one.spans:
            if span.end is not None and not span.failed and method in (None, span.method):
                by_method.setdefault(span.method, {}).setdefault(one.worker.rank, []).append(span)
    timings: list[WorkerTiming] = []
    ambiguous = []
    for name, spans in sorted(by_method.items()):
        known = {rank: there for rank, there in sorted(spans.items()) if len(there) >= LEAST_CALLS}
        if len(known) < 2 or name == "__init__":
            continue
        found = _time(name, known, sharding)
        if not any(span.waited_s for there in known.values() for span in there):
            found = _keep_late(found, known)
            if not any(one.slow for one in found) and _is_synchronous(known):
                ambiguous.append(name)
        timings += found
    return StragglerReport(tuple(timings), tuple(ambiguous))


def _work(span: Span) -> float:
    assert span.end is not None
    return max(0.0, span.end - span.start - span.waited_s)


def _time(method: str, spans: Mapping[int, Sequence[Span]], sharding: NamedSharding) -> list[WorkerTiming]:
    work = {rank: [_work(span) for span in there] for rank, there in spans.items()}
    medians = {rank: statistics.median(there) for rank, there in work.items()}
    timings = []
    for rank, there in work.items():
        ratios, slow = {}, []
        for axis in sharding.names:
            peers = [medians[peer] for peer in sharding.peers(rank, axis) if peer != rank and peer in medians]
            if not peers:
                continue
            usual = statistics.median(peers)
            ratios[axis] = medians[rank] / usual if usual else 1.0
            if ratios[axis] >= SLOWER and medians[rank] - usual > CERTAIN * _error(there):
                slow.append(axis)
        coords = sharding.get_worker_coords(rank)
        timings.append(WorkerTiming(rank, coords, method, len(there), medians[rank], ratios, tuple(slow)))
    return timings


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a median, from the median deviation of normally distributed values."""
    middle = statistics.median(values)
    spread = statistics.median([abs(value - middle) for value in values])
    return 1.25 * 1.48 * spread / math.sqrt(len(values))


def _keep_late(timings: Sequence[WorkerTiming], spans: Mapping[int, Sequence[Span]]) -> list[WorkerTiming]:
    """Leave out the stragglers that only began early, and waited for the others: they do not end later than these."""
    ends = _align(spans, lambda span: span.end or 0.0)
    usual = [statistics.median(column) for column in zip(*ends.values(), strict=True)]
    middle = statistics.median(one.median_s for one in timings)
    kept = []
    for one in timings:
        later = [end - at for end, at in zip(ends[one.rank], usual, strict=True)]
        # A slow worker that began early ends a little later than the others; one that waited ends with them.
        least = max((one.median_s - middle) / 4, CERTAIN * _error(later))
        kept.append(one if statistics.median(later) > least else replace(one, slow=()))
    return kept


def _is_synchronous(spans: Mapping[int, Sequence[Span]]) -> bool:
    """Return whether workers wait for each other: those that begin late take as much less time, from call to call."""
    late = _without_medians(_align(spans, lambda span: span.start))
    took = _without_medians(_align(spans, _work))
    limits = [OUTLIER * statistics.median(map(abs, values)) for values in (late, took)]
    pairs = [(x, y) for x, y in zip(late, took, strict=True) if abs(x) <= limits[0] and abs(y) <= limits[1]]
    variance = sum(x * x for x, _ in pairs)
    return variance > 0 and sum(x * y for x, y in pairs) / variance < SYNCHRONOUS


def _align(spans: Mapping[int, Sequence[Span]], value: Callable[[Span], float]) -> dict[int, list[float]]:
    """Return a value of the latest calls of each worker, as many of each as all of them have."""
    count = min(map(len, spans.values()))
    return {rank: [value(span) for span in there[-count:]] for rank, there in spans.items()}


def _without_medians(rows: Mapping[int, Sequence[float]]) -> list[float]:
    """Return values less the median of their call and of their worker: what is particular to one call of one worker."""
    of_call = [statistics.median(column) for column in zip(*rows.values(), strict=True)]
    centred = [[value - usual for value, usual in zip(row, of_call, strict=True)] for row in rows.values()]
    return [value - statistics.median(row) for row in centred for value in row]

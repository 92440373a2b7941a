# SPDX-License-Identifier: Apache-2.0
"""Workers that are slower than their peers, along each axis. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fairlead_sharding import NamedSharding

from .timeline import Span, Timeline

# With fewer calls a median says little.
LEAST_CALLS = 5
# By how much a worker must be slower than its peers.
SLOWER = 1.1
# By how many standard errors of its own median.
CERTAIN = 3.0
# From this correlation on, the end of a call does not depend on when a worker began it.
SYNCHRONOUS = -0.8


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
        undecidable: methods in which workers wait for each other without `current_worker().waiting()`: all of them
            take equally long, whoever is slow.
    """

    timings: tuple[WorkerTiming, ...]
    undecidable: tuple[str, ...] = ()

    @property
    def stragglers(self) -> tuple[WorkerTiming, ...]:
        """The timings of workers that are slower than their peers, the slowest first."""
        slow = [one for one in self.timings if one.slow]
        return tuple(sorted(slow, key=lambda one: -max(one.ratios[axis] for axis in one.slow)))


def find_stragglers(timeline: Timeline, method: str | None = None) -> StragglerReport:
    """Return how long each worker takes, and who is slower than its peers.

    Args:
        timeline: of the group.
        method: a method; None for all of them.
    """
    sharding = timeline.group.sharding
    by_method: dict[str, dict[int, list[Span]]] = {}
    for one in timeline.workers:
        for span in one.spans:
            if (
                span.end is not None
                and not span.failed
                and span.method in (method, span.method if method is None else method)
            ):
                by_method.setdefault(span.method, {}).setdefault(one.worker.rank, []).append(span)
    timings: list[WorkerTiming] = []
    undecidable = []
    for name, spans in sorted(by_method.items()):
        known = {rank: there for rank, there in sorted(spans.items()) if len(there) >= LEAST_CALLS}
        if len(known) > 1 and name != "__init__":
            if _is_synchronous(known):
                undecidable.append(name)
            timings += _time(name, known, sharding, certain=name not in undecidable)
    return StragglerReport(tuple(timings), tuple(undecidable))


def _work(span: Span) -> float:
    assert span.end is not None
    return max(0.0, span.end - span.start - span.waited_s)


def _time(
    method: str, spans: Mapping[int, Sequence[Span]], sharding: NamedSharding, *, certain: bool
) -> list[WorkerTiming]:
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
            spread = statistics.median(abs(one - medians[rank]) for one in there)
            # The standard error of a median, from the median deviation of normally distributed values.
            error = 1.25 * 1.48 * spread / len(there) ** 0.5
            if certain and ratios[axis] >= SLOWER and medians[rank] - usual > CERTAIN * error:
                slow.append(axis)
        coords = sharding.get_worker_coords(rank)
        timings.append(WorkerTiming(rank, coords, method, len(there), medians[rank], ratios, tuple(slow)))
    return timings


def _is_synchronous(spans: Mapping[int, Sequence[Span]]) -> bool:
    """Return whether the workers end a method together, whenever each of them began: they wait for each other in it.

    Then a worker that begins a call late takes as much less time for it. The offsets between the clocks of nodes do not
    matter, as only the changes from call to call are compared.
    """
    count = min(map(len, spans.values()))
    late = [[span.start for span in there[-count:]] for there in spans.values()]
    took = [[_work(span) for span in there[-count:]] for there in spans.values()]
    late, took = _without_means(late), _without_means(took)
    covariance = sum(a * b for left, right in zip(late, took, strict=True) for a, b in zip(left, right, strict=True))
    variance = sum(a * a for row in late for a in row) * sum(b * b for row in took for b in row)
    return variance > 0 and covariance / variance**0.5 < SYNCHRONOUS


def _without_means(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return values less the mean of their row and of their column: what is particular to one call of one worker."""
    of_call = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    centred = [[value - mean for value, mean in zip(row, of_call, strict=True)] for row in rows]
    return [[value - statistics.fmean(row) for value in row] for row in centred]

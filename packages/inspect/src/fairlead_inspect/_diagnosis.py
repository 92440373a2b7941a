# SPDX-License-Identifier: Apache-2.0
"""The faults of a group. Pure.

Workers of one group make the same calls, so those that are elsewhere than most are the ones that the others wait for.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairlead_placement.spi import group_pairs
from fairlead_sharding import NamedSharding
from fairlead_workergroup.exceptions import format_coords
from fairlead_workergroup.spi import STUCK_AFTER_S, find_innermost, find_method_frames

from ._groups import SeenGroup, SeenWorker
from ._show import write_ranks
from ._stacks import write_frames

# Stopped by SIGSTOP; late: others wait for it; stuck: no progress, and all are at one place; unknown: its node did not
# answer; starting: its constructor has not finished; driver: stopped or gone.
Kind = Literal["dead", "stopped", "late", "stuck", "unknown", "starting", "driver"]
# Parts of the names of files in which workers wait for each other.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_WAITS = ("torch/distributed/", "jax/_src/distributed", "mpi4py/")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that explains it, for people and as JSON."""

    kind: Kind
    ranks: tuple[int, ...]
    text: str
    axes: tuple[str, ...] = ()  # along which others wait for it
    coords: Mapping[str, int] = field(default_factory=dict)  # those that all of `ranks` have in common
    method: str | None = None
    since_s: float = 0.0  # for how long
    where: str = ""  # the innermost frame of the method, `file:line in function`; empty if it is not known
    stacks: str = ""  # the frames of the first rank, from the innermost one to its method
    waiting: tuple[int, ...] = ()  # the ranks that wait for them
    waiting_where: str = ""
    wrong: bool = True  # otherwise it only explains


def diagnose(seen: SeenGroup, *, stuck_after_s: float) -> list[Finding]:
    """Return what is wrong with a group that was looked at with stacks, the most certain first."""
    findings = [
        _about("dead", [one], f"{describe(one)} is dead. {one.note}".rstrip())
        for one in seen.workers
        if one.state == "dead"
    ]
    findings += [_report_stopped(one) for one in seen.workers if one.stopped]
    blamed = {rank for finding in findings for rank in finding.ranks}
    findings += _find_late(seen, stuck_after_s, blamed)
    findings += _find_driver(seen)
    findings += [
        _about("unknown", [one], f"{describe(one)} did not answer: {one.note}")
        for one in seen.workers
        if one.state == "unknown"
    ]
    return findings


def describe(worker: SeenWorker) -> str:
    """Return who a worker is, as a phrase.

    >>> describe(SeenWorker(5, {"dp": 2}, "abcdef0123", "10.0.0.1", 77))
    'Rank 5 (dp=2) on node abcdef01 (10.0.0.1), pid 77'
    """
    place = f" on node {worker.node_id[:8]} ({worker.address})" if worker.node_id else ""
    return f"Rank {worker.rank}{format_coords(worker.coords)}{place}" + (f", pid {worker.pid}" if worker.pid else "")


def write_coords(coords: Mapping[str, int]) -> str:
    """Return coordinates as `dp=1, tp=0`."""
    return ", ".join(f"{axis}={at}" for axis, at in coords.items())


def _about(kind: Kind, workers: Sequence[SeenWorker], text: str, **more: object) -> Finding:
    first = workers[0]
    values = {
        "coords": common_coords(workers),
        "method": first.method,
        "since_s": first.since_progress_s,
        "where": find_innermost(first.stacks),
        "stacks": write_frames(first) if first.stacks else "",
        **more,
    }
    return Finding(kind, tuple(worker.rank for worker in workers), text, **values)  # type: ignore[arg-type]


def common_coords(workers: Sequence[SeenWorker]) -> dict[str, int]:
    """Return the coordinates that all of these workers have."""
    first = workers[0].coords
    return {axis: at for axis, at in first.items() if all(worker.coords[axis] == at for worker in workers)}


def write_place(worker: SeenWorker) -> str:
    """Return where a worker is, for people: its method, and the line there that does not return."""
    frames = find_method_frames(worker.stacks)
    if not frames:
        return f"{worker.method!r}"
    # The innermost line that is not of a library, and what it calls.
    own = next((frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)), frames[0])
    file, line, function = own
    within = f" ({frames[0][2]})" if own is not frames[0] else ""
    return f"{worker.method!r} at {os.path.basename(file)}:{line} in {function}{within}"


def _report_stopped(worker: SeenWorker) -> Finding:
    doing = f" in {worker.method!r} for {worker.running_s:.0f} s" if worker.method else ""
    text = f"{describe(worker)} is stopped (SIGSTOP){doing}. `kill -CONT {worker.pid}` there continues it."
    return _about("stopped", [worker], text)


def _find_driver(seen: SeenGroup) -> list[Finding]:
    driver = seen.group.driver
    who = f"The driver (pid {driver['pid']} on {driver['host']})"
    if seen.driver == "stopped":
        return [
            Finding("driver", (), f"{who} is stopped (SIGSTOP): it makes no calls. `kill -CONT` there continues it.")
        ]
    if seen.driver == "gone":
        return [Finding("driver", (), f"{who} has ended. Ray ends its workers within seconds.")]
    return []


def _find_late(seen: SeenGroup, stuck_after_s: float, blamed: Collection[int]) -> list[Finding]:
    """Find the workers that others wait for."""
    living = [
        one for one in seen.workers if one.state in ("busy", "stuck", "starting", "idle") and one.rank not in blamed
    ]
    still = [one for one in living if one.method and one.since_progress_s >= stuck_after_s]
    if not still:
        return []
    waiting, late = _split(still, living)
    if not waiting:
        return _find_stuck(still)
    late = [one for one in late if one.state != "idle"] or late
    if not late:
        # All wait at one place: for one that is dead or stopped, or for somebody outside of the group.
        whom = f"for rank(s) {write_ranks(sorted(blamed))}" if blamed else "and no worker is elsewhere"
        since = f"{waiting[0].since_progress_s:.0f} s"
        text = f"{_who_waits(waiting)} in {write_place(waiting[0])} for {since}, {whom}."
        return [_about("stuck", waiting, text, wrong=not blamed)]
    axes = find_axes(seen.group.sharding, late, waiting)
    return [_late(group, waiting, axes) for group in _by_place(late)]


def _split(still: Sequence[SeenWorker], living: Sequence[SeenWorker]) -> tuple[list[SeenWorker], list[SeenWorker]]:
    """Return the workers that wait for others, and those that are elsewhere."""
    if any(map(_waits, still)):
        waiting = [one for one in living if _waits(one)]
    else:
        ((place, count),) = Counter(map(_position, still)).most_common(1)
        waiting = [one for one in still if _position(one) == place]
        if count < 2 or 2 * count <= len(living):
            return [], []
    ranks = {one.rank for one in waiting}
    return waiting, [one for one in living if one.rank not in ranks]


def _waits(worker: SeenWorker) -> bool:
    files = [file for file, _, _ in find_method_frames(worker.stacks)]
    return worker.waiting or any(part in file for file in files for part in _WAITS)


def _position(worker: SeenWorker) -> tuple[object, ...]:
    return worker.method, find_method_frames(worker.stacks)


def _by_place(workers: Sequence[SeenWorker]) -> list[list[SeenWorker]]:
    return list(group_pairs(((*_position(worker), worker.state == "idle"), worker) for worker in workers).values())


def _late(late: Sequence[SeenWorker], waiting: Sequence[SeenWorker], axes: tuple[str, ...]) -> Finding:
    along = f" along {', '.join(axes)}" if axes else ""
    it = "it" if len(late) == 1 else "them"
    return _about(
        "late",
        late,
        f"{_who_is(late)}. {_who_waits(waiting)} for {it}{along} in {write_place(waiting[0])}.",
        axes=axes,
        waiting=tuple(one.rank for one in waiting),
        waiting_where=find_innermost(waiting[0].stacks),
    )


def _who_is(workers: Sequence[SeenWorker]) -> str:
    """Return which workers are at one place, where that is, and for how long, as the beginning of a sentence."""
    first, ranks = workers[0], write_ranks([one.rank for one in workers])
    who = f"{describe(first)} is" if len(workers) == 1 else f"Ranks {ranks}{format_coords(common_coords(workers))} are"
    if not first.method:
        return f"{who} idle: not called, or done"
    progress = f"without progress for {first.since_progress_s:.0f} s"
    return f"{who} in {write_place(first)} for {first.running_s:.0f} s, {progress}"


def _who_waits(workers: Sequence[SeenWorker]) -> str:
    ranks = write_ranks([one.rank for one in workers])
    return f"Rank {ranks} waits" if len(workers) == 1 else f"{len(workers)} workers (ranks {ranks}) wait"


def find_axes(sharding: NamedSharding, late: Sequence[SeenWorker], waiting: Sequence[SeenWorker]) -> tuple[str, ...]:
    """Return the axes along which a peer of a late worker waits."""
    waits = {one.rank for one in waiting}
    return tuple(axis for axis in sharding.names if any(waits & set(sharding.peers(one.rank, axis)) for one in late))


def _find_stuck(still: Sequence[SeenWorker]) -> list[Finding]:
    """Report workers without progress where no wait for another worker is known."""
    stuck = [one for one in still if one.since_progress_s >= STUCK_AFTER_S]
    return [
        _about("starting" if group[0].method == "__init__" else "stuck", group, f"{_who_is(group)}.")
        for group in _by_place(stuck)
    ]

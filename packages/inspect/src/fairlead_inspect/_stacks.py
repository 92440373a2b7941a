# SPDX-License-Identifier: Apache-2.0
"""Equal stacks of several workers, shown once with their ranks. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fairlead_placement.spi import group_pairs
from fairlead_workergroup.spi import find_method_frames

from ._groups import SeenWorker

# The id of a thread and the time since it started differ between workers that are at the same place.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? ")


@dataclass(frozen=True)
class FoldedStack:
    """The stacks of several workers, or why there are none."""

    ranks: tuple[int, ...]
    stacks: str


def fold_stacks(workers: Iterable[SeenWorker], *, threads: bool = False) -> list[FoldedStack]:
    """Return the distinct stacks, those of most workers first: of all threads, or of the method only."""
    found = group_pairs((_comparable(worker, threads), worker.rank) for worker in workers)
    folded = [FoldedStack(tuple(sorted(ranks)), stacks) for stacks, ranks in found.items()]
    return sorted(folded, key=lambda one: (-len(one.ranks), one.ranks))


def write_frames(worker: SeenWorker) -> str:
    """Return the frames from the innermost one to the worker's method, with the method itself in the first line."""
    frames = "".join(
        f'\n  File "{file}", line {line} in {name}' for file, line, name in find_method_frames(worker.stacks)
    )
    return f"{worker.method} (most recent call first):{frames}"


def _comparable(worker: SeenWorker, threads: bool) -> str:
    if worker.stacks and not threads:
        return write_frames(worker)
    if worker.stacks:
        return "\n".join(_THREAD.sub("Thread ", line.rstrip()) for line in worker.stacks.strip().splitlines())
    if worker.state == "idle":
        return "(idle: it runs no method)"
    return f"({worker.state}: {worker.note or 'no stacks'})"

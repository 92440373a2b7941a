# SPDX-License-Identifier: Apache-2.0
"""The memory limit of workers: its text, its enforcement by the node agents, and the losses that it caused."""

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import ray

from fairlead_placement import PlacementError
from fairlead_placement.spi import choose_alive

from .._membership.judge import Evidence
from .._membership.model import WorkerProcess
from .._membership.roster import Roster
from .._remote.process import mark_of, read_verdicts, start_guard
from .._world import Deadline
from ..exceptions import WorkerGroupError
from .query import ask_nodes

UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}}
UNITS |= {unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}

# Between two requests to an agent that does not answer.
PAUSE_S = 0.2


def parse_memory(size: int | str) -> int:
    """Return a number of bytes, given as a number, or as text such as "8GB" (powers of 1000) or "512MiB" (of 1024).

    Raises:
        ValueError: the size is neither, or it is not positive.

    >>> parse_memory("1.5GB"), parse_memory("2KiB"), parse_memory(100)
    (1500000000, 2048, 100)
    """
    wrong = f"a memory limit is a positive number of bytes, or text such as '8GB' or '512MiB', got {size!r}"
    if isinstance(size, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if parts is None or parts[2].upper() not in UNITS:
            raise ValueError(wrong)
        size = int(float(parts[1]) * UNITS[parts[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(wrong)
    return size


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes on a worker and the processes it has started together, which the nodes' agents enforce."""

    token: str
    limit: int
    # The workers that agents have been asked to guard. Any thread changes it, by single operations.
    guarded: dict[WorkerProcess, None] = field(default_factory=dict, compare=False, repr=False)

    def guard(self, workers: Sequence[WorkerProcess], deadline: Deadline, roster: Roster) -> None:
        """Make the nodes' agents end workers that pass the limit, with one request for each node.

        An agent that does not answer is asked again until the deadline, because it may be about to start.
        """
        self.guarded.update(dict.fromkeys(workers))
        unguarded = list(workers)
        while unguarded:
            guarded = self._start(unguarded)
            unguarded = [worker for worker, answer in zip(unguarded, guarded, strict=True) if answer is None]
            if unguarded and roster.ending:
                raise roster.ended_error()
            if unguarded and (deadline.passed or _is_gone(unguarded[0].node_id)):
                raise WorkerGroupError(
                    f"memory_limit cannot be enforced on {unguarded[0]}: the node's agent did not answer. Look at the "
                    "node, or use another one."
                )
            if unguarded:
                time.sleep(PAUSE_S)

    def guard_again(self, node_ids: Collection[str]) -> None:
        """Make the agents of nodes guard the workers there, because the agents before them may have died.

        Raises:
            PlacementError: an agent does not answer.
        """
        workers = [worker for worker in list(self.guarded) if worker.node_id in node_ids]
        for worker, is_alive in zip(workers, self._start(workers), strict=True):
            if is_alive is None:
                raise PlacementError(f"memory_limit is not enforced on {worker}: the node's agent did not answer")
            if not is_alive:
                self.guarded.pop(worker, None)

    def _start(self, workers: Sequence[WorkerProcess]) -> list[bool | None]:
        """Ask agents to guard workers; return whether each worker is alive, None if its agent did not answer."""

        def with_mark(worker: WorkerProcess) -> tuple[int, int, str]:
            return (*worker.key, mark_of(self.token, worker.rank))

        return ask_nodes(workers, start_guard, self.token, self.limit, what=with_mark)

    def find_killed(self, workers: Sequence[WorkerProcess], within_s: float) -> dict[WorkerProcess, list[Evidence]]:
        """Return the evidence, with both numbers, about the workers that a guard has ended."""
        sizes = ask_nodes(workers, read_verdicts, self.token, within_s=within_s, asks_head=False)
        cause = f"over its memory_limit of {self.limit:,} bytes"
        causes = {
            worker: f"its process and those that it had started held {size:,} bytes of memory, {cause}"
            for worker, size in zip(workers, sizes, strict=True)
            if size is not None
        }
        return {one: [Evidence("memory-guard", "gone", "out-of-memory", cause)] for one, cause in causes.items()}


def _is_gone(node_id: str) -> bool:
    """Return whether a node, or Ray itself, has ended, so that its agent will not answer any more."""
    return not ray.is_initialized() or not choose_alive([node_id])

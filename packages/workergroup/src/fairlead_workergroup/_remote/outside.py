# SPDX-License-Identifier: Apache-2.0
"""The look at the workers of a node, from another process of that node. Shipped by value."""

from collections.abc import Sequence
from typing import Any

from .process import Process, read_marks, read_processes
from .progress import look

# A process, and what the identity of the worker begins with, which finds the process while it is not known.
Registered = tuple[int, int, str]


def look_from_outside(workers: Sequence[Registered], stuck_after_s: float, dump: bool) -> list[dict[str, Any]]:
    """Return what `look` says of workers, and the `pid` of each, which is 0 if it is starting without a process."""
    processes = _find_starting(workers)
    rows = look(processes, stuck_after_s, dump)
    return [{**row, "pid": pid} for row, (pid, _) in zip(rows, processes, strict=True)]


def _find_starting(workers: Sequence[Registered]) -> list[Process]:
    """Return the process of each worker; (0, -1) for one that has none yet."""
    wanted = {mark.encode(): index for index, (pid, _, mark) in enumerate(workers) if pid == 0}
    processes = [(pid, started) for pid, started, _ in workers]
    if wanted:
        for pid, (_, _, started) in read_processes().items():
            for mark, itself in read_marks((pid, started)):
                # An identity is the mark with the number of the incarnation.
                index = wanted.get(mark.rpartition(b"-")[0] + b"-")
                if itself and index is not None and started > processes[index][1]:
                    processes[index] = (pid, started)
    return processes

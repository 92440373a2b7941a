# SPDX-License-Identifier: Apache-2.0
"""What is done with the records of a node's workers, there. Shipped by value to the node agents.

A worker is named by its pid and the tick it started at: a pid alone may be somebody else's by now.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ._host import start_tick
from ._record import open_record, read_record, write_cancelled

__all__ = ["cancel_tasks", "read_records"]

Process = tuple[int, int]


@contextlib.contextmanager
def _record(process: Process) -> Iterator[int | None]:
    pid, started = process
    file = open_record(pid) if start_tick(pid) == started else None
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


def read_records(processes: Sequence[Process]) -> list[dict[str, Any] | None]:
    """What each worker is doing; None for one that has ended, or whose record cannot be read."""
    found: list[dict[str, Any] | None] = []
    for process in processes:
        with _record(process) as file:
            found.append(None if file is None else read_record(file))
    return found


def cancel_tasks(tasks: Sequence[tuple[Process, bytes]]) -> list[bool]:
    """Keep workers from starting a task each; which of them had started it already, and are still running it."""
    running = []
    for process, task in tasks:
        with _record(process) as file:
            if file is not None:
                write_cancelled(file, [task])
            running.append(file is not None and read_record(file)["task"] == task)
    return running

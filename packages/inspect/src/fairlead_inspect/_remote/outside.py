# SPDX-License-Identifier: Apache-2.0
"""The timelines of processes of a node, read by its agent. Shipped by value."""

import socket
import time
from collections.abc import Sequence
from typing import Any

from fairlead_workergroup.spi import read_records, start_tick

from .ring import CALL, CALLS_FILE, REQUEST, REQUESTS_FILE, STEP, STEPS_FILE, TASK_BYTES, TASKS, read_ring


def read_timelines(processes: Sequence[tuple[int, int]]) -> list[dict[str, Any] | None]:
    """Return the calls, steps and running call of workers, by this machine's monotonic clock; None if one has ended."""
    records = read_records(processes, methods=True)
    return [_read_timeline(pid, record) for (pid, _), record in zip(processes, records, strict=True)]


def _read_timeline(pid: int, record: dict[str, Any] | None) -> dict[str, Any] | None:
    if record is None:
        return None
    names, method, now = record["methods"], record["method"], time.monotonic()
    return {
        "calls": [
            (number, names[at], began, ended, waited, bool(failed), task, None if weights < 0 else weights)
            for number, at, began, ended, waited, failed, task, weights in read_ring(pid, CALLS_FILE, CALL)
        ],
        "steps": read_ring(pid, STEPS_FILE, STEP),
        "running": None
        if method is None
        else (record["calls"], method, now - record["running_s"], record["task"][:TASK_BYTES], record.get("weights")),
    }


def read_requests(pid: int, started: int, host: str, group: str) -> list[tuple[Any, ...]]:
    """Return the latest calls of a driver on this machine: start, end or 0, failed, workers, method, tasks."""
    if host != socket.gethostname() or start_tick(pid) != started:
        return []
    return [
        (began, ended, bool(failed), count, method.rstrip(b"\0").decode(errors="ignore"), _split_tasks(tasks, count))
        for began, ended, failed, count, method, tasks in read_ring(pid, REQUESTS_FILE + group, REQUEST)
    ]


def _split_tasks(tasks: bytes, count: int) -> list[bytes]:
    return [tasks[at * TASK_BYTES : (at + 1) * TASK_BYTES] for at in range(min(count, TASKS))]


def read_clock() -> float:
    """Return the monotonic clock of this machine."""
    return time.monotonic()

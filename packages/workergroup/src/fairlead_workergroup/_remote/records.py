# SPDX-License-Identifier: Apache-2.0
"""What is done with the records of a node's workers, there. Shipped by value to the node agents.

A worker is named by its pid and the tick it started at: a pid alone may be somebody else's by now.
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from .host import start_tick
from .progress import open_record, read_record, write_cancelled
from .stacks import dump_stacks, process_state

__all__ = ["cancel_tasks", "look", "read_records", "send_signal"]

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
    """Return what each worker is doing; None for one that has ended, or whose record could not be read."""
    found: list[dict[str, Any] | None] = []
    for process in processes:
        with _record(process) as file:
            found.append(None if file is None else _read(file))
    return found


def look(processes: Sequence[Process], stuck_after_s: float, dump: bool) -> list[dict[str, Any]]:
    """What each worker is doing, and whether it is stuck; of those that are, the stacks if they are asked for.

    A worker is stuck when it is busy, or its process is stopped, and it has made no progress for so long.

    Returns:
        For each worker its record, or an empty one, with `gone`: whether its process is; `stuck`; `stacks`, and
        `note`: why there are none.
    """
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as open_files:
        asked: dict[int, tuple[int, int]] = {}
        at: dict[int, int] = {}
        for number, (process, record) in enumerate(zip(processes, read_records(processes), strict=True)):
            told = {"gone": start_tick(process[0]) != process[1], "stuck": False, "stacks": "", "note": ""}
            found.append({**(record or {}), **told})
            if record is None:
                continue
            stopped = process_state(process[0]) == "T"
            if stopped:
                found[-1]["note"] = "the process has been stopped (SIGSTOP)"
            if not (record["method"] or stopped) or record["since_progress_s"] < stuck_after_s:
                continue
            found[-1]["stuck"] = True
            if dump and (file := _pidfd(process)) is not None:
                open_files.callback(os.close, file)
                asked[file], at[file] = (process[0], record["dump_signal"]), number
        for file, (stacks, note) in dump_stacks(asked).items():
            found[at[file]].update(stacks=stacks, note=note)
    return found


def send_signal(processes: Sequence[Process], number: int) -> list[bool]:
    """Send a signal to each; whether it was there."""
    sent = []
    for process in processes:
        file = _pidfd(process)
        if file is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                signal.pidfd_send_signal(file, number)
            os.close(file)
        sent.append(file is not None)
    return sent


def cancel_tasks(tasks: Sequence[tuple[Process, bytes]]) -> list[bool]:
    """Keep workers from starting a task each.

    Returns:
        For each whether it had started the task already, and may still be running it.
    """
    running: list[bool] = []
    for process, task in tasks:
        with _record(process) as file:
            if file is None:
                running.append(False)
                continue
            write_cancelled(file, [task])
            record = _read(file)
            running.append(record is None or record["task"] == task)
    return running


def _read(file: int) -> dict[str, Any] | None:
    """Return what a record says; None if it stays busy: what the node's other workers do is reported all the same."""
    try:
        return read_record(file)
    except TimeoutError:
        return None


def _pidfd(process: Process) -> int | None:
    """A process as an open file, that means no other one when its pid is used again; None if it is gone."""
    pid, started = process
    try:
        file = os.pidfd_open(pid)
    except OSError:
        return None
    if start_tick(pid) == started:
        return file
    os.close(file)
    return None

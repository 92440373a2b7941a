# SPDX-License-Identifier: Apache-2.0
"""The workers of a node, as other processes of that node see and handle them: records, stacks, usage and signals."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._ray_private import session_folder
from .process import ZOMBIE, Process, process_state, read_marks, read_processes, read_stat, send_signal, start_tick
from .record import open_record, read_record, write_cancelled
from .stacks import dump_stacks

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# A process, and the identity of the worker, which finds the process while it is not known.
Registered = tuple[int, int, str]


@contextlib.contextmanager
def record_file(process: Process) -> Iterator[int | None]:
    """Open the record of a worker; None if the worker has ended."""
    pid, started = process
    file = open_record(pid) if start_tick(pid) == started else None
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


def read_records(processes: Sequence[Process]) -> list[dict[str, Any] | None]:
    """Return the record of each worker; None if the worker has ended, or its record could not be read."""
    records: list[dict[str, Any] | None] = []
    for process in processes:
        with record_file(process) as file:
            records.append(None if file is None else read_record(file))
    return records


def look(processes: Sequence[Process], stuck_after_s: float, dump: bool) -> list[dict[str, Any]]:
    """Return each worker's record, `gone`, `stuck` (busy or stopped without progress), and `stacks` or a `note`."""
    rows: list[dict[str, Any]] = []
    stuck: dict[Process, dict[str, Any]] = {}
    for process, record in zip(processes, read_records(processes), strict=True):
        pid, started = process
        row = {**(record or {}), "gone": start_tick(pid) != started, "stuck": False, "stacks": "", "note": ""}
        rows.append(row)
        if record is not None:
            del row["task"]  # only processes of the node need it, and the answers of all nodes meet in one process
            stopped = process_state(pid) == "T"
            if stopped:
                row["note"] = "the process has been stopped (SIGSTOP)"
            row["stuck"] = bool(record["method"] or stopped) and record["since_progress_s"] >= stuck_after_s
            if row["stuck"]:
                stuck[process] = row
    for process, (stacks, note) in dump_stacks([*stuck]).items() if dump else ():
        stuck[process].update(stacks=stacks, note=note)
    return rows


def cancel_tasks(tasks: Sequence[tuple[Process, bytes]]) -> list[bool]:
    """Prevent each worker from starting a task; return for each whether it has been started and may still run."""
    running: list[bool] = []
    for process, task in tasks:
        with record_file(process) as file:
            if file is None:
                running.append(False)
                continue
            write_cancelled(file, task)
            record = read_record(file)
            running.append(record is None or record["task"] == task)
    return running


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
                index = wanted.get(mark)
                if itself and index is not None and started > processes[index][1]:
                    processes[index] = (pid, started)
    return processes


def measure(processes: Sequence[Process]) -> list[dict[str, Any] | None]:
    """Return what each process uses, with when that was measured and when it started; None if it has ended.

    The times are in seconds since the machine started.
    """
    on_gpus = _read_gpus()
    rows: list[dict[str, Any] | None] = []
    for pid, started in processes:
        stat = read_stat(pid)
        if not stat or stat[0] in ZOMBIE or int(stat[19]) != started:
            rows.append(None)
            continue
        rows.append(
            {
                "cpu_s": (int(stat[11]) + int(stat[12])) * TICK_S,
                "measured_s": time.clock_gettime(time.CLOCK_BOOTTIME),
                "started_s": started * TICK_S,
                "num_threads": int(stat[17]),
                "rss_bytes": int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
                "gpu_memory_bytes": None if on_gpus is None else on_gpus.get(pid, 0),
            }
        )
    return rows


def _read_gpus() -> dict[int, int] | None:
    """Return the bytes that each process holds on all GPUs together; None without nvidia-ml-py or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    held: dict[int, int] = {}
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        for gpu in gpus:
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                # None if the driver does not report it.
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except pynvml.NVMLError:  # there is no driver, or a GPU has failed
        return None
    return held if gpus else None


def send_and_wait(processes: Sequence[Process], number: int, within_s: float) -> list[bool]:
    """Send SIGKILL or SIGSTOP to processes, and wait until they have ended or stopped; return which ones have."""
    send_signal(processes, number)
    deadline = time.monotonic() + within_s
    while True:
        done = [
            start_tick(pid) != started if number == signal.SIGKILL else process_state(pid) == "T"
            for pid, started in processes
        ]
        if all(done) or time.monotonic() >= deadline:
            return done
        time.sleep(0.005)


def read_verdicts(actor_ids: Sequence[str]) -> list[list[int] | None]:
    """Return the bytes that each worker of this node held and its limit, if its reaper has ended it for that."""
    paths = [Path(verdict_of(actor_id)) for actor_id in actor_ids]
    return [[*map(int, path.read_text().split())] if path.exists() else None for path in paths]


def verdict_of(actor_id: str) -> str:
    """Return the path of the verdict on a worker of this node."""
    return f"{session_folder()}/fairlead-memory-{actor_id}"

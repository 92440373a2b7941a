# SPDX-License-Identifier: Apache-2.0
"""The record of what a worker is doing, in a page of memory that other processes of its node can read at any moment.

The worker writes a few numbers at the start and the end of each method; nobody has to answer for them to be read, so
they can be read while it hangs. There are two places for them, written in turn: if a worker was stopped while it wrote,
the other place is read. The page is an anonymous file (`memfd_create`) found among the worker's open files, so that
nothing is left behind however the worker ends.

A worker is identified by its pid and the tick it started at: a pid alone may belong to another process by now."""

import contextlib
import fcntl
import json
import mmap
import operator
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from .process import Process, open_memory_file, open_process, process_state, start_tick
from .stacks import dump_stacks

__all__ = [
    "OverlappingRecord",
    "Record",
    "cancel_tasks",
    "look",
    "open_record",
    "read_record",
    "read_records",
    "write_cancelled",
]

NAME = "fairlead-worker"
# Formats are text: a struct.Struct in a module shipped by value does not pickle.
# Version, calls, method (an index, -1 when idle), started, last progress, step, task, which message, version again.
STATE = "<QQqddq24sBQ"
STATES_AT = 0, 128
# Length, then UTF-8; of the two, the one that the state does not name is free to be written.
MESSAGES_AT, MESSAGE_BYTES = (256, 528), 256
# How many tasks have been cancelled so far, then the last of them in a ring.
CANCELLED_AT, CANCELLED_KEPT, TASK_BYTES = 800, 512, 24
# Length, then JSON: the methods' names, and the signal that makes the worker write its stacks (0: none).
ABOUT_AT = CANCELLED_AT + 8 + CANCELLED_KEPT * TASK_BYTES
TRIES = 10_000
# Others hold the lock for microseconds, unless their process is stopped.
LOCK_S = 2.0
NO_STEP = -(2**63)
IDLE = -1


class Record:
    """The worker's own side: it writes, and looks whether what it starts has been cancelled.

    Args:
        methods: names, by the number that `begin` is given.
        dump_signal: what makes this process write its stacks; 0: nothing does.
    """

    def __init__(self, methods: Sequence[str], dump_signal: int = 0) -> None:
        about = json.dumps({"methods": list(methods), "dump_signal": dump_signal}).encode()
        size = ABOUT_AT + 8 + len(about)
        self._file = os.memfd_create(NAME)
        os.ftruncate(self._file, size)
        self._page = mmap.mmap(self._file, size)
        struct.pack_into("<Q", self._page, ABOUT_AT, len(about))
        self._page[ABOUT_AT + 8 : size] = about
        self._seen = self._page[CANCELLED_AT : CANCELLED_AT + 8]
        self._task = _task_reader()
        self._calls = 0
        self._step = NO_STEP
        self._message = 0
        # Threads of the worker may tell of progress. Reentrant: so may a handler of signals.
        self._messaging = threading.RLock()
        self._version = 0
        self._now: tuple[int, float, bytes] = (IDLE, 0.0, b"")
        self._write(time.monotonic())

    def begin(self, method: int) -> int:
        """A method starts; returns what `end` is to be given.

        Raises:
            TaskCancelledError: this call was cancelled before it started.
        """
        started = time.monotonic()
        self._calls += 1
        self._now = (method, started, self._task())
        self._write(started)
        # Written before it is looked at, as the canceller writes before it reads: one of the two sees the other.
        if self._page[CANCELLED_AT : CANCELLED_AT + 8] != self._seen and self._is_cancelled(self._now[2]):
            self.end(0)
            raise ray.exceptions.TaskCancelledError
        return 0

    def end(self, key: int) -> None:
        """It has ended."""
        self._now = (IDLE, 0.0, b"")
        self._write(time.monotonic())

    def progress(self, step: int | None = None, message: str | None = None) -> None:
        """It goes on: a step, and a line of text for people.

        Raises:
            TypeError, ValueError: the step is no whole number, or does not fit in 64 bits.
        """
        if step is not None:
            # Before it is kept: the start and end of every further method write it.
            step = operator.index(step)
            if not NO_STEP < step < -NO_STEP:
                raise ValueError(f"a step must fit in 64 bits, got {step}")
            self._step = step
        if message is None:
            self._write(time.monotonic())
            return
        text = message.encode()[:MESSAGE_BYTES]
        with self._messaging:
            free = 1 - self._message
            self._page[MESSAGES_AT[free] : MESSAGES_AT[free] + 8 + len(text)] = struct.pack("<Q", len(text)) + text
            self._message = free
            self._write(time.monotonic())

    def _write(self, progressed: float) -> None:
        # Needs no lock: Python changes threads, and raises what a signal's handler does, after calls. Here is one only.
        method, started, task = self._now
        step, message = self._step, self._message
        self._version = version = self._version + 1
        at = STATES_AT[version & 1]
        struct.pack_into(
            STATE, self._page, at, version, self._calls, method, started, progressed, step, task, message, version
        )

    def _is_cancelled(self, task: bytes) -> bool:
        # Not noted as seen: calls queued behind this one may be in it too.
        ring = CANCELLED_AT + 8
        at = self._page.find(task, ring, ABOUT_AT) if task else -1
        while at >= 0 and (at - ring) % TASK_BYTES:  # across two of them
            at = self._page.find(task, at + 1, ABOUT_AT)
        return at >= 0


class OverlappingRecord(Record):
    """Of a worker whose async methods overlap: shows the one that has run longest."""

    def __init__(self, methods: Sequence[str], dump_signal: int = 0) -> None:
        self._running: dict[int, tuple[int, float, bytes]] = {}
        super().__init__(methods, dump_signal)

    def begin(self, method: int) -> int:
        """As of `Record`."""
        super().begin(method)
        key = self._calls
        self._running[key] = self._now
        self._show_longest()
        return key

    def end(self, key: int) -> None:
        """As of `Record`."""
        self._running.pop(key, None)
        self._show_longest()

    def _show_longest(self) -> None:
        # Dicts keep the order of insertion: the first has run longest.
        self._now = next(iter(self._running.values()), (IDLE, 0.0, b""))
        self._write(time.monotonic())


def _task_reader() -> Callable[[], bytes]:
    """What tells the id of the task that runs: the public way costs twice as much, and every call pays for it."""
    try:
        worker: Any = ray._private.worker.global_worker
        worker.current_task_id.binary()
    except AttributeError:
        # Not asked for here: where Ray does not run, it would be started.
        return lambda: bytes.fromhex(ray.get_runtime_context().get_task_id() or "")
    return lambda: worker.current_task_id.binary()


def open_record(pid: int) -> int | None:
    """The record of a process of this machine, as an open file; None if it has none, or is gone."""
    return open_memory_file(pid, NAME)


def read_record(file: int) -> dict[str, Any]:
    """What a record says, as plain data: method, running_s, since_progress_s, step, message, calls, task, dump_signal.

    Times are seconds before now: the clock is this machine's.

    Raises:
        TimeoutError: at each of many tries the worker wrote meanwhile.
    """
    seen = b""
    whole: list[tuple[Any, ...]] = []
    for _ in range(TRIES):
        # Written without a lock. A state that was read twice, with the same version at both ends, is whole.
        before, seen = seen, os.pread(file, CANCELLED_AT, 0)
        if seen == before:
            states = [struct.unpack_from(STATE, seen, at) for at in STATES_AT]
            whole = [state for state in states if state[0] == state[-1]]
        if whole:
            break
    else:
        raise TimeoutError(f"the worker wrote its record at each of {TRIES} tries to read it")
    _, calls, method, started, progressed, step, task, said, _ = max(whole)
    now = time.monotonic()
    about = json.loads(os.pread(file, _number(file, ABOUT_AT), ABOUT_AT + 8))
    (length,) = struct.unpack_from("<Q", seen, MESSAGES_AT[said])
    message = seen[MESSAGES_AT[said] + 8 :][:length].decode(errors="ignore")
    return {
        "method": None if method == IDLE else about["methods"][method],
        "running_s": 0.0 if method == IDLE else now - started,
        "since_progress_s": now - progressed,
        "step": None if step == NO_STEP else step,
        "message": message,
        "calls": calls,
        "task": task,
        "dump_signal": about["dump_signal"],
    }


def write_cancelled(file: int, tasks: Sequence[bytes]) -> None:
    """Tell a worker that tasks which it may not have started yet are not to be run.

    Several threads or processes may do so at once, each with the record opened by itself.
    """
    _lock(file)
    try:
        count = _number(file, CANCELLED_AT)
        for task in tasks:
            os.pwrite(file, task, CANCELLED_AT + 8 + count % CANCELLED_KEPT * TASK_BYTES)
            count += 1
        os.pwrite(file, struct.pack("<Q", count), CANCELLED_AT)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: int) -> None:
    """Lock a record against others that write cancelled tasks, or go on without the lock after `LOCK_S`.

    The kernel keeps the lock, by open file: functions shipped by value share no memory, and a writer that is killed
    leaves no lock behind. Without it a cancelled task may be lost; without the write it would be for certain.
    """
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.001)


def _number(file: int, at: int) -> int:
    number: int = struct.unpack("<Q", os.pread(file, 8, at))[0]
    return number


@contextlib.contextmanager
def _opened(process: Process) -> Iterator[int | None]:
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
        with _opened(process) as file:
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
            if dump and (file := open_process(process)) is not None:
                open_files.callback(os.close, file)
                asked[file], at[file] = (process[0], record["dump_signal"]), number
        for file, (stacks, note) in dump_stacks(asked).items():
            found[at[file]].update(stacks=stacks, note=note)
    return found


def cancel_tasks(tasks: Sequence[tuple[Process, bytes]]) -> list[bool]:
    """Keep workers from starting a task each.

    Returns:
        For each whether it had started the task already, and may still be running it.
    """
    running: list[bool] = []
    for process, task in tasks:
        with _opened(process) as file:
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

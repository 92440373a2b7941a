# SPDX-License-Identifier: Apache-2.0
"""The record of what a worker is doing, in a page of memory that processes of its node can read while it hangs.

The page is an anonymous file, which ends with the worker. It has two copies of the state, written in turn: if a worker
was stopped in the middle of a write, the reader takes the other copy. A pid and a start tick identify a worker, because
the system reuses pids.
"""

import json
import operator
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from .process import make_memory_file, open_memory_file

NAME = "fairlead-worker"
# Formats are text: a struct.Struct does not pickle, and this module is shipped by value.
# Version, calls, method (an index, -1 if idle), start, last progress, step, task, number of the message,
# whether it waits for others, version again.
STATE = "<QQqddq24sBBQ"
STATES_AT = 0, 128
# Each message is a length, then UTF-8. The message that the state does not name may be overwritten.
MESSAGES_AT, MESSAGE_BYTES = (256, 528), 256
# Whether ids of cancelled tasks have been added at the end of the file since the worker has read them.
CANCELLED_AT, ID_BYTES = 800, 24
# A length, then JSON: the names of the methods.
NAMES_AT = CANCELLED_AT + 8
TRIES = 10_000
NO_STEP = -(2**63)
IDLE = -1
# What runs: the method, its start, and its task.
Running = tuple[int, float, bytes]
NOTHING: Running = (IDLE, 0.0, b"")


class Record:
    """Write the record of this process, and check whether a task that starts has been cancelled."""

    def __init__(self, methods: Sequence[str]) -> None:
        names = json.dumps(list(methods)).encode()
        self._read_to = size = NAMES_AT + 8 + len(names)
        self._file, self._page = make_memory_file(NAME, size)
        struct.pack_into("<Q", self._page, NAMES_AT, len(names))
        self._page[NAMES_AT + 8 : size] = names
        # The cancelled tasks that have not had their turn.
        self._cancelled: set[bytes] = set()
        # Ray's account of what runs here. To ask for it starts a Ray where none runs, so the first task does.
        self._context: Any = None
        self._calls = 0
        self._step = NO_STEP
        self._message = 0
        # Several threads may report progress, and Ray runs plain generators beside the event loop of other methods.
        # Reentrant, because a signal handler may report progress too.
        self._lock = threading.RLock()
        self._version = 0
        # Bound methods: a lookup by the format's text would cost every call half as much again.
        self._pack = struct.Struct(STATE).pack_into
        # How many threads wait for other workers.
        self._waiting = 0
        # The methods that run, by key. One of them is shown: that which has run longest.
        self._running: dict[int, Running] = {}
        self._now: Running = NOTHING
        self._write(time.monotonic())

    def begin(self, method: int) -> int:
        """Record that a method starts, by its index, and return a key for `end`; raise if its task was cancelled."""
        task = self._task()
        with self._lock:
            self._calls += 1
            key = self._calls
            self._running[key] = method, time.monotonic(), task
            self._show_longest()
        # Write before reading, as `cancel_tasks` does: at least one of the two sees what the other wrote.
        if (self._cancelled or self._page[CANCELLED_AT]) and self._is_cancelled(task):
            self.end(key)
            raise ray.exceptions.TaskCancelledError
        return key

    def _task(self) -> bytes:
        """Return the id of the task that Ray runs here."""
        if self._context is None:
            self._context = ray.get_runtime_context()
        return bytes.fromhex(self._context.get_task_id() or "")

    def end(self, key: int) -> None:
        """Record that a method has ended."""
        with self._lock:
            _, _, task = self._running.pop(key)
            self._show_longest()
        if self._cancelled or self._page[CANCELLED_AT]:
            self._is_cancelled(task)  # which forgets a task that was cancelled while it ran

    @property
    def running(self) -> int:
        """The number of methods that run."""
        return len(self._running)

    def _show_longest(self) -> None:
        # Dicts keep the order of insertion, so the first method has run longest.
        self._now = next(iter(self._running.values()), NOTHING)
        self._write(time.monotonic())

    def count_waiting(self, change: int) -> None:
        """Record that a thread begins to wait for other workers, or with -1 that it does not wait any more."""
        with self._lock:
            self._waiting += change
            self._write(time.monotonic())

    def progress(self, step: int | None = None, message: str | None = None) -> None:
        """Record progress, with a step and a line of text for people."""
        if step is not None:
            # Check first: every later write packs the step again.
            step = operator.index(step)
            if not NO_STEP < step < -NO_STEP:
                raise ValueError(f"a step must fit in 64 bits, got {step}")
            self._step = step
        if message is None:
            self._write(time.monotonic())
            return
        text = message.encode()[:MESSAGE_BYTES]
        with self._lock:
            free = 1 - self._message
            self._page[MESSAGES_AT[free] : MESSAGES_AT[free] + 8 + len(text)] = struct.pack("<Q", len(text)) + text
            self._message = free
            self._write(time.monotonic())

    def _write(self, progressed: float) -> None:
        # No lock: Python switches threads and runs signal handlers only between calls, and the write is a single call.
        method, started, task = self._now
        self._version = version = self._version + 1
        self._pack(
            self._page,
            STATES_AT[version & 1],
            version,
            self._calls,
            method,
            started,
            progressed,
            self._step,
            task,
            self._message,
            self._waiting > 0,
            version,
        )

    def _is_cancelled(self, task: bytes) -> bool:
        """Return whether a task whose turn it is was cancelled, and forget it."""
        if self._page[CANCELLED_AT]:
            self._page[CANCELLED_AT] = 0  # before the ids are read: others add an id first, and set this afterwards
            ids = os.pread(self._file, os.fstat(self._file).st_size - self._read_to, self._read_to)
            complete = len(ids) - len(ids) % ID_BYTES
            self._cancelled.update(ids[start : start + ID_BYTES] for start in range(0, complete, ID_BYTES))
            self._read_to += complete
        was_cancelled = task in self._cancelled
        self._cancelled.discard(task)
        return was_cancelled


def open_record(pid: int) -> int | None:
    """Open the record of a process of this machine; None if it has no record or has ended."""
    return open_memory_file(pid, NAME)


def read_record(file: int) -> dict[str, Any] | None:
    """Return a record as plain data, with times in seconds before now; None if each attempt met a write."""
    seen = b""
    complete: list[tuple[Any, ...]] = []
    for _ in range(TRIES):
        # The worker takes no lock. A state is complete if two reads agree and both its versions are equal.
        before, seen = seen, os.pread(file, CANCELLED_AT, 0)
        if seen == before:
            states = [struct.unpack_from(STATE, seen, offset) for offset in STATES_AT]
            complete = [state for state in states if state[0] == state[-1]]
        if complete:
            break
    else:
        return None
    _, calls, method, started, progressed, step, task, shown, waiting, _ = max(complete)
    now = time.monotonic()
    (length,) = struct.unpack("<Q", os.pread(file, 8, NAMES_AT))
    methods = json.loads(os.pread(file, length, NAMES_AT + 8))
    (length,) = struct.unpack_from("<Q", seen, MESSAGES_AT[shown])
    message = seen[MESSAGES_AT[shown] + 8 :][:length].decode(errors="ignore")
    return {
        "method": None if method == IDLE else methods[method],
        "running_s": 0.0 if method == IDLE else now - started,
        "since_progress_s": now - progressed,
        "step": None if step == NO_STEP else step,
        "message": message,
        "calls": calls,
        "task": b"" if method == IDLE else task,
        "waiting": bool(waiting),
    }


def write_cancelled(file: int, task: bytes) -> None:
    """Prevent a worker from starting a task. It may be stopped: it reads the id when a task starts."""
    with open(f"/proc/self/fd/{file}", "ab", buffering=0) as end:
        end.write(task)
    os.pwrite(file, b"\1", CANCELLED_AT)

# SPDX-License-Identifier: Apache-2.0
"""Faults of workers, and how a node's agent starts and ends them. Shipped by value to both."""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from .process import Process, open_memory_file, process_state, send_signal, start_tick

NAME = "fairlead-hang-"


def hang(host: Any, how: str, token: str) -> None:
    """Wait for a byte in a pipe that an agent writes; it finds the pipe's number in a file, by the token."""
    read, write = os.pipe()
    file = os.memfd_create(NAME + token)
    os.write(file, str(write).encode())
    try:
        if how == "sleep":
            while not select.select([read], [], [], 0)[0]:
                time.sleep(0.05)
        else:
            library: Any = ctypes.PyDLL(None) if how == "native-gil" else ctypes.CDLL(None)
            library.read(read, ctypes.create_string_buffer(1), 1)
    finally:
        for one in (read, write, file):
            os.close(one)


def slow(host: Any, seconds: float) -> None:
    """Make every method of the worker begin with a sleep; 0 seconds ends that."""
    # The user's own instance, also if the worker is slow already.
    plain = vars(host).setdefault("_fairlead_plain", host._fairlead_instance)
    host._fairlead_instance = _Slowed(plain, seconds) if seconds else plain

    def subject() -> Any:
        time.sleep(seconds)
        return plain

    # Functions that are called in place of a method get this instance.
    host._fairlead_subject = subject


class _Slowed:
    def __init__(self, instance: Any, seconds: float) -> None:
        self._instance = instance
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        time.sleep(self._seconds)
        return getattr(self._instance, name)


def fill_memory(host: Any, size: int) -> None:
    """Hold this many bytes, with every page written, in place of the bytes held before."""
    host._fairlead_filled = None
    host._fairlead_filled = b"\x01" * size


def find_hanging(processes: Sequence[Process], token: str) -> list[bool]:
    """Return which workers are in the `hang` with this token."""
    return [_find_pipe(process, token) is not None for process in processes]


def end_hang(processes: Sequence[Process], token: str) -> list[bool]:
    """End the `hang` with this token; return which workers were in it."""
    pipes = [_find_pipe(process, token) for process in processes]
    for pipe in filter(None, pipes):
        with contextlib.suppress(OSError), open(pipe, "wb", buffering=0) as file:  # the worker may have ended
            file.write(b"x")
    return [pipe is not None for pipe in pipes]


def _find_pipe(process: Process, token: str) -> str | None:
    """Return the path of the pipe that ends a hang; None if the process is not in it."""
    pid, started = process
    file = open_memory_file(pid, NAME + token) if start_tick(pid) == started else None
    if file is None:
        return None
    with open(file) as text:
        return f"/proc/{pid}/fd/{text.read()}"


def kill(processes: Sequence[Process], timeout_s: float) -> list[bool]:
    """Kill processes and wait until they have ended; return which ones have."""
    send_signal(processes, signal.SIGKILL)
    return _wait(processes, timeout_s, lambda process: start_tick(process[0]) != process[1])


def stop(processes: Sequence[Process], timeout_s: float) -> list[bool]:
    """Stop processes until they are continued; return which ones have stopped."""
    send_signal(processes, signal.SIGSTOP)
    return _wait(processes, timeout_s, lambda process: process_state(process[0]) == "T")


def continue_(processes: Sequence[Process]) -> list[bool]:
    """Continue stopped processes; return which ones were alive."""
    return send_signal(processes, signal.SIGCONT)


def _wait(processes: Sequence[Process], timeout_s: float, holds: Callable[[Process], bool]) -> list[bool]:
    """Wait until a condition holds for all processes; return for which it does."""
    deadline = time.monotonic() + timeout_s
    while not all(map(holds, processes)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return [holds(process) for process in processes]

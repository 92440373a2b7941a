# SPDX-License-Identifier: Apache-2.0
"""Faults, as workers commit them, and how a node's agent starts and ends them.

Shipped by value, to both: the standard library only, and what is shipped with it.
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .process import Process, process_state, send_signal, start_tick

__all__ = ["continue_", "end_hang", "fill_memory", "hang", "hangs", "kill", "slow", "stop"]

NAME = "fairlead-hang-"


def hang(host: Any, how: str, token: str) -> None:
    """Return only when an agent ends it: it waits for a byte in a pipe, whose end for writing it tells in a file.

    Args:
        host: of the worker.
        how: as of `testing.hang`.
        token: by which the agent finds the file.
    """
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
    """Have every method of the worker begin with a sleep, of so many seconds; 0: no longer."""
    # The instance itself, also when it has been slowed before.
    plain = vars(host).setdefault("_fairlead_plain", host._fairlead_instance)
    host._fairlead_instance = _Slowed(plain, seconds) if seconds else plain

    def subject() -> Any:
        time.sleep(seconds)
        return plain

    # What a function gets that is called in place of a method.
    host._fairlead_subject = subject


class _Slowed:
    def __init__(self, instance: Any, seconds: float) -> None:
        self._instance = instance
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        time.sleep(self._seconds)
        return getattr(self._instance, name)


def fill_memory(host: Any, size: int) -> None:
    """Hold so many bytes, every page of them written, instead of those held before."""
    host._fairlead_filled = None
    host._fairlead_filled = b"\x01" * size


def hangs(processes: Sequence[Process], token: str) -> list[bool]:
    """Which workers are in this `hang`."""
    return [any(True for _ in _pipes(process, token)) for process in processes]


def end_hang(processes: Sequence[Process], token: str) -> list[bool]:
    """Let workers out of this `hang`; which were in it."""
    ended = []
    for process in processes:
        pipes = list(_pipes(process, token))
        for pipe in pipes:
            with contextlib.suppress(OSError), open(pipe, "wb", buffering=0) as file:  # it may have ended meanwhile
                file.write(b"x")
        ended.append(bool(pipes))
    return ended


def _pipes(process: Process, token: str) -> Iterator[str]:
    pid, started = process
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it ended while it was looked at
        for name in os.listdir(folder) if start_tick(pid) == started else []:
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{NAME}{token} "):
                with open(f"{folder}/{name}") as file:
                    yield f"{folder}/{file.read()}"


def kill(processes: Sequence[Process], timeout_s: float) -> list[bool]:
    """Kill processes and wait until they are gone; whether they are."""
    send_signal(processes, signal.SIGKILL)
    return _waited(processes, timeout_s, lambda process: start_tick(process[0]) != process[1])


def stop(processes: Sequence[Process], timeout_s: float) -> list[bool]:
    """Stop processes, until they are continued; whether they have been."""
    send_signal(processes, signal.SIGSTOP)
    return _waited(processes, timeout_s, lambda process: process_state(process[0]) == "T")


def continue_(processes: Sequence[Process]) -> list[bool]:
    """Let stopped processes go on; whether they were there."""
    return send_signal(processes, signal.SIGCONT)


def _waited(processes: Sequence[Process], timeout_s: float, holds: Any) -> list[bool]:
    deadline = time.monotonic() + timeout_s
    while not all(map(holds, processes)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return [holds(process) for process in processes]

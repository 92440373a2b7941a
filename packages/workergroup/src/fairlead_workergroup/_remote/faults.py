# SPDX-License-Identifier: Apache-2.0
"""Faults of workers, which functions on their nodes cause. Shipped by value."""

import signal
import time
from collections.abc import Callable, Sequence

from .process import Process, process_state, send_signal, start_tick


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

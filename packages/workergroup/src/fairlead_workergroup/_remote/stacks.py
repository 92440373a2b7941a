# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of a process that may never answer again, written into an anonymous file. Shipped by value.

faulthandler writes them without the interpreter, even while a native call holds the GIL.
"""

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Mapping

from .process import open_memory_file, process_state

NAME = "fairlead-stacks"
# How long all processes of one request together may take to write their stacks.
WRITE_S = 5.0


def write_stacks_on_signal() -> int:
    """Write all stacks on a signal, and return it. Signal only stuck processes, as it ends sleeps and polls early."""
    chosen = signal.SIGRTMIN + 5
    file = os.memfd_create(NAME)
    # A reader empties the file before it sends the signal; with O_APPEND the stacks then begin at the start.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(chosen, file=file, all_threads=True, chain=False)
    return int(chosen)


def dump_stacks(asked: Mapping[int, tuple[int, int]]) -> dict[int, tuple[str, str]]:
    """Make processes write their stacks; return the stacks, or why there are none. All are keyed by pidfd."""
    found: dict[int, tuple[str, str]] = {}
    waiting: dict[int, tuple[int, int, int, int]] = {}
    for process, (pid, number) in asked.items():
        state = process_state(pid)
        file = open_memory_file(pid, NAME)
        if state == "T":
            found[process] = "", "the process has been stopped (SIGSTOP): it writes nothing until it is continued"
        elif not number or file is None or not _signals(pid, "SigCgt") & _bit(number):
            # Without a handler the signal would end the process.
            found[process] = "", "no handler writes the stacks of this process"
        else:
            fcntl.flock(file, fcntl.LOCK_EX)  # against other readers, which hold it for at most WRITE_S
            os.ftruncate(file, 0)
            handling = _count_handlers(pid, number)
            # These signals queue up, and one that is pending is enough.
            if not _signals(pid, "ShdPnd") & _bit(number):
                signal.pidfd_send_signal(process, number)
            waiting[process] = pid, number, file, handling
            continue
        if file is not None:
            os.close(file)
    deadline = time.monotonic() + WRITE_S
    for process, (pid, number, file, handling) in waiting.items():
        try:
            found[process] = _wait_for_stacks(pid, number, file, handling, deadline)
        finally:
            os.close(file)
    return found


def _wait_for_stacks(pid: int, number: int, file: int, handling: int, deadline: float) -> tuple[str, str]:
    """Return what a process has written, once it has received the signal and left its handler."""
    while True:
        late = time.monotonic() >= deadline
        done = not _signals(pid, "ShdPnd") & _bit(number) and _count_handlers(pid, number) == handling
        if (done or late) and (size := os.fstat(file).st_size):
            text = os.pread(file, size, 0).decode(errors="replace")
            os.ftruncate(file, 0)
            return text, ""
        if late:
            state = process_state(pid) or "gone"
            return "", f"the process (state {state}) did not write its stacks within {WRITE_S:g} s"
        time.sleep(0.005)


def _count_handlers(pid: int, number: int) -> int:
    """Return how many threads block the signal, as a thread does while it runs the signal's handler."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(bool(_signals(pid, "SigBlk", thread) & _bit(number)) for thread in threads)


def _signals(pid: int, which: str, thread: str | None = None) -> int:
    """Return a set of signals of a process or of one of its threads; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status") as file:
            return next((int(line.split()[1], 16) for line in file if line.startswith(which)), 0)
    except OSError:
        return 0


def _bit(number: int) -> int:
    return 1 << (number - 1)

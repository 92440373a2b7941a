# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of a process that may never answer again, written by its own signal handler.

faulthandler writes them without the interpreter: while the main thread sits in a native call, also one that holds
the GIL. They go to an anonymous file (`memfd_create`) found among the process's open files, so that nothing is left
behind. Shipped by value, to the workers and to the node agents.
"""

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Mapping

from .process import open_memory_file, process_state

__all__ = ["dump_stacks", "write_stacks_on_signal"]

NAME = "fairlead-stacks"
# How long processes may take to write their stacks, all those of one request together.
WRITE_S = 5.0


def write_stacks_on_signal() -> int:
    """Have this process write the stacks of all its threads when it gets a signal; which one.

    A system call that the signal meets starts again, but a sleep or a poll returns early: it is for processes that
    have been judged stuck only.
    """
    chosen = signal.SIGRTMIN + 5
    file = os.memfd_create(NAME)
    # Whoever asks empties the file first: what is written then begins at its start.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(chosen, file=file, all_threads=True, chain=False)
    return int(chosen)


def dump_stacks(asked: Mapping[int, tuple[int, int]]) -> dict[int, tuple[str, str]]:
    """Have processes of this machine write their stacks, all at once.

    Args:
        asked: by pidfd, which goes on meaning the same process: its pid, and the signal its record names.

    Returns:
        By pidfd, the stacks, and why there are none.
    """
    found: dict[int, tuple[str, str]] = {}
    waiting: dict[int, tuple[int, int, int, int]] = {}
    for process, (pid, number) in asked.items():
        state = process_state(pid)
        file = open_memory_file(pid, NAME)
        if state == "T":
            found[process] = "", "the process has been stopped (SIGSTOP): it writes nothing until it is continued"
        elif not number or file is None or not _signals(pid, "SigCgt") & _bit(number):
            # Without the handler the signal would end it.
            found[process] = "", "no handler writes the stacks of this process"
        else:
            fcntl.flock(file, fcntl.LOCK_EX)  # others that ask at the same time; bounded by their WRITE_S
            os.ftruncate(file, 0)
            handling = _handling(pid, number)
            # Such signals queue: one that has not been taken yet is enough.
            if not _signals(pid, "ShdPnd") & _bit(number):
                signal.pidfd_send_signal(process, number)
            waiting[process] = pid, number, file, handling
            continue
        if file is not None:
            os.close(file)
    deadline = time.monotonic() + WRITE_S
    for process, (pid, number, file, handling) in waiting.items():
        try:
            found[process] = _written(pid, number, file, handling, deadline)
        finally:
            os.close(file)
    return found


def _written(pid: int, number: int, file: int, handling: int, deadline: float) -> tuple[str, str]:
    """What a process has written, once it has taken the signal and left its handler."""
    while True:
        late = time.monotonic() >= deadline
        done = not _signals(pid, "ShdPnd") & _bit(number) and _handling(pid, number) == handling
        if (done or late) and (size := os.fstat(file).st_size):
            text = os.pread(file, size, 0).decode(errors="replace")
            os.ftruncate(file, 0)
            return text, ""
        if late:
            state = process_state(pid) or "gone"
            return "", f"the process (state {state}) did not write its stacks within {WRITE_S:g} s"
        time.sleep(0.005)


def _handling(pid: int, number: int) -> int:
    """How many threads hold the signal back, as one does while it runs the signal's handler."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(bool(_signals(pid, "SigBlk", thread) & _bit(number)) for thread in threads)


def _signals(pid: int, which: str, thread: str | None = None) -> int:
    """A set of signals of a process or of a thread of it; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status") as file:
            return next((int(line.split()[1], 16) for line in file if line.startswith(which)), 0)
    except OSError:
        return 0


def _bit(number: int) -> int:
    return 1 << (number - 1)

# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of a process that may never answer again, written into an anonymous file. Shipped by value.

faulthandler writes them without the interpreter, even while a native call holds the GIL.
"""

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence

from .process import Process, open_memory_file, process_state, send_signal

NAME = "fairlead-stacks"
# Only stuck processes get it, because it ends sleeps and polls early.
SIGNAL = int(signal.SIGRTMIN + 5)
# How long all processes of one request together may take to write their stacks.
WRITE_S = 5.0
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
# The functions of the host that call a method or function of the user.
CALLERS = ("delegate", "iterate", "stream", "_fairlead_apply", "_fairlead_start")
Frame = tuple[str, str, str]


def write_stacks_on_signal() -> None:
    """Have this process write all its stacks on `SIGNAL`."""
    file = os.memfd_create(NAME)
    # A reader empties the file before it sends the signal; with O_APPEND the stacks then begin at the start.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def dump_stacks(processes: Sequence[Process]) -> dict[Process, tuple[str, str]]:
    """Make processes write their stacks; return the stacks of each, or why there are none."""
    answers: dict[Process, tuple[str, str]] = {}
    waiting: dict[Process, tuple[int, int]] = {}
    with contextlib.ExitStack() as files:
        for process in processes:
            pid, _ = process
            file = open_memory_file(pid, NAME)
            if file is not None:
                files.callback(os.close, file)
            if process_state(pid) == "T":
                answers[process] = "", "the process has been stopped (SIGSTOP): it writes nothing until it is continued"
            elif file is None or not _has(pid, "SigCgt"):
                # Without a handler the signal would end the process.
                answers[process] = "", "no handler writes the stacks of this process"
            else:
                fcntl.flock(file, fcntl.LOCK_EX)  # against other readers, which hold it for little more than WRITE_S
                os.ftruncate(file, 0)
                waiting[process] = file, _count_handlers(pid)
                # These signals queue up, and one that is pending is enough.
                if not _has(pid, "ShdPnd"):
                    send_signal([process], SIGNAL)
        deadline = time.monotonic() + WRITE_S
        for process, (file, handling) in waiting.items():
            answers[process] = _wait_for_stacks(process[0], file, handling, deadline)
    return answers


def _wait_for_stacks(pid: int, file: int, handling: int, deadline: float) -> tuple[str, str]:
    """Return what a process has written, once it has received the signal and left its handler."""
    while True:
        late = time.monotonic() >= deadline
        done = not _has(pid, "ShdPnd") and _count_handlers(pid) == handling
        if (done or late) and (size := os.fstat(file).st_size):
            text = os.pread(file, size, 0).decode(errors="replace")
            os.ftruncate(file, 0)
            return text, ""
        if late:
            state = process_state(pid) or "gone"
            return "", f"the process (state {state}) did not write its stacks within {WRITE_S:g} s"
        time.sleep(0.005)


def _count_handlers(pid: int) -> int:
    """Return how many threads block the signal, as a thread does while it runs the signal's handler."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(_has(pid, "SigBlk", f"/task/{thread}") for thread in threads)


def _has(pid: int, which: str, thread: str = "") -> bool:
    """Return whether a set of signals of a process or of one of its threads has the signal; False if it has ended."""
    try:
        with open(f"/proc/{pid}{thread}/status") as file:
            signals = next((int(line.split()[1], 16) for line in file if line.startswith(which)), 0)
    except OSError:
        return False
    return bool(signals & 1 << SIGNAL - 1)


def find_method_frames(stacks: str) -> tuple[Frame, ...]:
    """Return the frames of the thread that runs the user's method, innermost first, or of the first thread.

    >>> find_method_frames('''Thread 0x1 (most recent call first):
    ...   File "/lib/threading.py", line 320 in wait
    ...
    ... Current thread 0x2 (most recent call first):
    ...   File "/home/model.py", line 7 in step
    ...   File "/lib/fairlead_workergroup/_remote/host.py", line 200 in delegate
    ... ''')
    (('/home/model.py', '7', 'step'),)
    """
    threads: list[list[Frame]] = []
    for line in stacks.splitlines():
        if (frame := FRAME.fullmatch(line)) is not None:
            if threads:
                threads[-1].append((frame["file"], frame["line"], frame["function"]))
        elif line.rstrip().endswith("(most recent call first):"):
            threads.append([])
    for frames in threads:
        for index, (file, _, function) in enumerate(frames):
            if "fairlead_workergroup/_remote/" in file and function in CALLERS:
                return tuple(frames[:index])
    # faulthandler writes the newest thread first.
    return tuple(threads[-1]) if threads else ()


def find_innermost(stacks: str) -> str:
    """Return the innermost frame of the method as `file:line in function`; empty if it is unknown."""
    frames = find_method_frames(stacks)
    return f"{frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else ""

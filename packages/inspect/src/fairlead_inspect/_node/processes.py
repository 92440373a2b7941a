# SPDX-License-Identifier: Apache-2.0
"""Processes and threads, as the kernel describes them. Shipped by value."""

import os
import re
import threading

# At most so many processes are children of one worker for this purpose.
MOST_CHILDREN = 64


def read_stat(path: str) -> tuple[str, int, int, int]:
    """Return the state, parent, CPU ticks and start tick of a process or thread; raise OSError if it has ended."""
    with open(f"{path}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19])


def read_state(pid: int) -> tuple[str, int]:
    """Return the state of a process, empty if it has ended, and its CPU ticks."""
    try:
        state, _, ticks, _ = read_stat(f"/proc/{pid}")
    except OSError:
        return "", 0
    return state, ticks


def _read(path: str) -> bytes:
    """Return the contents of a file of the kernel; none if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read(65_536)
    except OSError:
        return b""


def read_title(pid: int) -> str:
    """Return the first argument of a process, which workers of Ray replace by what they run; empty if it has ended."""
    return _read(f"/proc/{pid}/cmdline").partition(b"\0")[0].decode(errors="replace")


def list_processes() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = read_stat(f"/proc/{name}")[1]
            except OSError:
                continue  # it has ended
    return parents


def find_children(pid: int, parents: dict[int, int]) -> list[int]:
    """Return the processes below one, the nearest first."""
    below = [pid]
    for parent in below:
        below += [child for child, its in parents.items() if its == parent and child not in below]
        if len(below) > MOST_CHILDREN:
            break
    return below[1 : MOST_CHILDREN + 1]


def read_counters(pid: int, tid: int) -> tuple[str, int | None, int | None]:
    """Return the state, the CPU ticks and the context switches of a thread; None for what is not known."""
    path = f"/proc/{pid}/task/{tid}"
    try:
        state, _, ticks, _ = read_stat(path)
    except OSError:
        return "", None, None
    counts = re.findall(rb"ctxt_switches:\s*(\d+)", _read(f"{path}/status"))
    return state, ticks, sum(map(int, counts)) if counts else None


def read_last_run(pid: int | str, tid: int) -> tuple[float, int] | None:
    """Return when a thread ran last, in seconds by the clock of its processor, and which that is; None if not known.

    The kernel (6.18) forgets it of a thread that it moves to another processor while that falls asleep.
    """
    fields = _read(f"/proc/{pid}/task/{tid}/stat").rpartition(b")")[2].split()
    ran = re.search(rb"^se\.exec_start\s*:\s*([\d.]+)", _read(f"/proc/{pid}/task/{tid}/sched"), re.MULTILINE)
    return (float(ran[1]) / 1e3, int(fields[36])) if fields and ran and float(ran[1]) else None


def read_clock(processor: int) -> float | None:
    """Return the scheduler's clock of a processor: when this thread, which moves there for it, ran last.

    The clocks of processors differ, because each leaves out the time that interrupts and the host have taken from it.
    None if this process may not run there.
    """
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {processor})
        ran = read_last_run("self", threading.get_native_id())
    except OSError:
        return None
    finally:
        os.sched_setaffinity(0, allowed)
    return ran[0] if ran is not None and ran[1] == processor else None


def read_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def read_wait(pid: int) -> str:
    """Return the function of the kernel that a process waits in, such as "rpc_wait_bit_killable"."""
    return _read(f"/proc/{pid}/wchan").decode(errors="replace")


def list_threads(pid: int) -> list[int]:
    """Return the threads of a process; none if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def map_threads(pid: int) -> dict[int, int]:
    """Return the threads of a process by their numbers in its own pid namespace, which py-spy reports."""
    pattern = re.compile(rb"^NSpid:.*?(\d+)$", re.MULTILINE)
    matches = {tid: pattern.search(_read(f"/proc/{pid}/task/{tid}/status")) for tid in list_threads(pid)}
    return {int(inside[1]): tid for tid, inside in matches.items() if inside}

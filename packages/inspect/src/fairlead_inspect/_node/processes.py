# SPDX-License-Identifier: Apache-2.0
"""Processes and threads, as the kernel describes them. Shipped by value."""

import os
import re
import threading
from typing import Any

# At most so many processes are children of one worker for this purpose.
MOST_CHILDREN = 64


def read_stat(path: str) -> tuple[str, int, int, int]:
    """Return the state, the parent, the CPU ticks and the start tick of a process or thread.

    Raises:
        OSError: it has ended.
    """
    with open(f"{path}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19])


def read_title(pid: int) -> str:
    """Return the first argument of a process, which workers of Ray replace by what they run; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


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
    found = [pid]
    for at in found:
        found += [child for child, parent in parents.items() if parent == at and child not in found]
        if len(found) > MOST_CHILDREN:
            break
    return found[1 : MOST_CHILDREN + 1]


def read_counters(pid: int, tid: int) -> tuple[str, int | None, int | None]:
    """Return the state, the CPU ticks and the context switches of a thread; None for what is not known."""
    path = f"/proc/{pid}/task/{tid}"
    try:
        state, _, ticks, _ = read_stat(path)
        with open(f"{path}/status", "rb") as file:
            counts = re.findall(rb"ctxt_switches:\s*(\d+)", file.read())
    except OSError:
        return "", None, None
    return state, ticks, sum(map(int, counts)) if counts else None


def read_last_run(pid: int | str, tid: int) -> tuple[float, int] | None:
    """Return when a thread ran last, in seconds by the clock of its processor, and that processor.

    None if the kernel does not say, as of a thread that it has moved to another processor and not run there yet.
    """
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
            processor = int(file.read().rpartition(b")")[2].split()[36])
        with open(f"/proc/{pid}/task/{tid}/sched", "rb") as file:
            found = re.search(rb"^se\.exec_start\s*:\s*([\d.]+)", file.read(), re.MULTILINE)
    except OSError:
        return None
    return (ran, processor) if found and (ran := float(found[1]) / 1e3) else None


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
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def read_wait(pid: int) -> str:
    """Return the function of the kernel that a process waits in, such as "rpc_wait_bit_killable"."""
    try:
        with open(f"/proc/{pid}/wchan", "rb") as file:
            return file.read(128).decode(errors="replace")
    except OSError:
        return ""


def list_threads(pid: int) -> list[int]:
    """Return the threads of a process; none if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def map_threads(pid: int) -> dict[int, int]:
    """Return the threads of a process by their number in its own pid namespace, which py-spy reports."""
    found = {}
    for tid in list_threads(pid):
        try:
            with open(f"/proc/{pid}/task/{tid}/status", "rb") as file:
                inside: Any = re.search(rb"^NSpid:.*?(\d+)$", file.read(), re.MULTILINE)
        except OSError:
            continue
        found[int(inside[1]) if inside else tid] = tid
    return found

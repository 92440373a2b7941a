# SPDX-License-Identifier: Apache-2.0
"""Processes of a machine: a worker with everything that it has started, how they end, and their memory.

A child whose parent has died is no longer its child, so a worker marks what it starts: programs inherit a variable of
its environment, and forks inherit a page of its memory."""

import contextlib
import functools
import mmap
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "Process",
    "Trees",
    "end_trees",
    "find_children",
    "find_ended",
    "kill_trees",
    "mark_of",
    "mark_tree",
    "open_memory_file",
    "open_process",
    "process_state",
    "read_marks",
    "read_processes",
    "send_signal",
    "start_guard",
    "start_tick",
    "verdicts",
]

# A pid and the tick that it started at: a pid alone may be another process's by now.
Process = tuple[int, int]
# The parent and the start tick of each process of a machine, by pid.
Table = Mapping[int, tuple[int, int]]
# An identity, and whether the process is the worker itself.
Mark = tuple[bytes, bool]

VARIABLE = b"FAIRLEAD_WORKER_ID"
PAGE = b"fairlead-tree-"
# Ray takes about 5 s at worst to end a worker. One that is still there after this gets SIGKILL from the agent.
WORKER_GRACE_S = 8.0
# How long children may take to end after SIGTERM, before they get SIGKILL.
CHILD_GRACE_S = 2.0
# How long a process may take to end after SIGKILL.
KILLED_S = 4.0
# How often children are looked for again while some are ending: they may start others.
LOOK_EVERY_S = 0.2


def mark_of(group: str, rank: int) -> str:
    """Return what the identity of every incarnation of a rank begins with."""
    return f"{group}-{rank}-"


def mark_tree(identity: str) -> mmap.mmap:
    """Mark everything that this process starts from now on, and return the page that its forks share; keep it."""
    os.environ[VARIABLE.decode()] = identity
    # With the pid, because forks have the same page and are not the worker.
    file = os.memfd_create(f"{PAGE.decode()}{identity}:{os.getpid()}")
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        return mmap.mmap(file, mmap.PAGESIZE)
    finally:
        os.close(file)


class Trees:
    """Workers of one machine and what they have started.

    Args:
        workers: their processes, as far as they are known.
        marks: what the identities given to `mark_tree` begin with, one for each worker. They find the workers that are
            not known, and what is left of those that have died.
        children: what was below the workers before.
    """

    def __init__(self, workers: Iterable[Process], marks: Sequence[str], children: Iterable[Process] = ()) -> None:
        self._workers = {(pid, started) for pid, started in workers}
        self._children = {(pid, started) for pid, started in children}
        self._marks = tuple(mark.encode() for mark in marks)
        # What a worker has started is not older than the worker.
        known = len(self._workers) == len(self._marks)
        self._since = min((started for _, started in self._workers), default=0) if known else 0

    def look(
        self, processes: Table | None = None, read: Callable[[Process], Sequence[Mark]] | None = None
    ) -> tuple[list[Process], list[Process]]:
        """Return the workers and the children that run now.

        Args:
            processes: all processes of this machine, if they have just been read.
            read: what gives the marks of a process, if not the process itself.
        """
        processes = read_processes() if processes is None else processes
        running = {(pid, started) for pid, (_, started) in processes.items()}
        for one in running - self._workers - self._children:
            if one[1] >= self._since:
                made_by = [itself for mark, itself in (read or read_marks)(one) if mark.startswith(self._marks)]
                if made_by:
                    (self._workers if any(made_by) else self._children).add(one)
        self._children |= _below(self._workers | self._children, processes)
        self._children -= self._workers
        return sorted(self._workers & running), sorted(self._children & running)


def find_children(workers: Sequence[Process]) -> list[list[Process]]:
    """Return everything that is below each of these processes now, by parent links."""
    processes = read_processes()
    return [sorted(_below([(pid, started)], processes) - {(pid, started)}) for pid, started in workers]


def end_trees(
    workers: Sequence[Process], children: Sequence[Process], marks: Sequence[str], within_s: float
) -> list[Process]:
    """Wait until workers have ended, then end what they have started; return what is still there.

    Children get SIGTERM, and after `CHILD_GRACE_S` SIGKILL.

    Args:
        workers: processes that Ray is about to end.
        children: what was below them before that.
        marks: as of `Trees`.
        within_s: how long all of this may take.
    """
    deadline = time.monotonic() + within_s
    trees = Trees(workers, marks, children)
    until = _sooner(deadline, WORKER_GRACE_S)
    _wait([(pid, started) for pid, started in workers], until)
    alive, left = trees.look()
    if alive:  # also one whose process was not known
        _wait(alive, until)
        send_signal(alive, signal.SIGKILL)
        _wait(alive, _sooner(deadline, KILLED_S))
        alive, left = trees.look()
    until = _sooner(deadline, CHILD_GRACE_S)
    sent: set[Process] = set()
    while left and time.monotonic() < until:
        send_signal([one for one in left if one not in sent], signal.SIGTERM)
        sent.update(left)
        _wait(left, _sooner(until, LOOK_EVERY_S))
        alive, left = trees.look()
    return kill_trees(trees, deadline - time.monotonic()) if alive or left else []


def kill_trees(trees: Trees, within_s: float) -> list[Process]:
    """End workers and what they have started with SIGKILL; return what is still there."""
    deadline = _sooner(time.monotonic() + within_s, KILLED_S)
    while True:
        alive, left = trees.look()
        there = [*alive, *left]
        send_signal(there, signal.SIGKILL)
        if not there or time.monotonic() >= deadline:
            return there
        _wait(there, _sooner(deadline, LOOK_EVERY_S))


def open_process(process: Process) -> int | None:
    """Return a process as an open file, which never means another process; None if it is gone."""
    pid, started = process
    try:
        file = os.pidfd_open(pid)
    except OSError:
        return None
    if start_tick(pid) == started:
        return file
    os.close(file)
    return None


def send_signal(processes: Sequence[Process], number: int) -> list[bool]:
    """Send a signal to those processes that are still there; return whether each was there."""
    sent = []
    for process in processes:
        file = open_process(process)
        if file is not None:
            # It has ended, or belongs to another user: who waits for it sees that it is still there.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(file, number)
            os.close(file)
        sent.append(file is not None)
    return sent


def _sooner(deadline: float, within_s: float) -> float:
    return min(deadline, time.monotonic() + within_s)


def _wait(processes: Sequence[Process], until: float) -> None:
    """Wait until processes have ended, or until a time."""
    pause = 0.005
    while any(start_tick(pid) == started for pid, started in processes) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _below(roots: Collection[Process], processes: Table) -> set[Process]:
    """Return the roots that run, and everything below them."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: set[Process] = set()
    left = [pid for pid, started in roots if pid in processes and processes[pid][1] == started]
    while left:
        pid = left.pop()
        one = pid, processes[pid][1]
        if one not in found:
            found.add(one)
            left.extend(children.get(pid, ()))
    return found


def read_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the start tick of every process, by pid."""
    found = ((int(name), _read_stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid, stat in found if stat is not None}


def _read_stat(pid: int) -> tuple[int, int] | None:
    """Return the parent and the start tick of a process; None if it is gone, or a zombie, which holds nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[19]))


def start_tick(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine did; -1 if it is gone or a zombie."""
    stat = _read_stat(pid)
    return -1 if stat is None else stat[1]


def process_state(pid: int) -> str:
    """The letter that /proc shows: "R" running, "S" sleeping, "D" uninterruptible, "T" stopped; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def open_memory_file(pid: int, name: str) -> int | None:
    """The anonymous file of this name that a process of this machine has open, opened here too; None if it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return None  # it has ended
    for number in numbers:
        try:
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                return os.open(f"{folder}/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # that file has been closed meanwhile
    return None


def find_ended(processes: Sequence[Process]) -> list[bool]:
    """Return whether each of these runs no more on this machine."""
    return [start_tick(pid) != started for pid, started in processes]


def read_marks(process: Process) -> list[Mark]:
    """Return the marks that a process has, each with whether it is the worker that made it."""
    pid, _ = process
    marks: list[Mark] = []
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
        marks += [(value, False) for name, _, value in (one.partition(b"=") for one in variables) if name == VARIABLE]
        with open(f"/proc/{pid}/maps", "rb") as file:
            mapped = file.read()
        for line in mapped.splitlines() if PAGE in mapped else ():
            mark, _, maker = line.partition(PAGE)[2].partition(b" ")[0].rpartition(b":")
            if mark:
                marks.append((mark, maker == str(pid).encode()))
    return marks


EVERY_S = 0.2
# How often new children are looked for, which takes a look at every process of the machine.
GUARD_LOOK_EVERY_S = 1.0
# How long one worker's processes may take to end; others are not watched meanwhile.
END_S = 5.0


def start_guard(workers: Sequence[tuple[int, int, str]], name: str, limit: int) -> list[bool]:
    """Watch workers, by pid, start tick and mark, until they have ended; which of them there are.

    Args:
        workers: whom.
        name: for whom, which `verdicts` is asked by.
        limit: bytes of memory of a worker and what it has started, without what is shared with others, such as values
            in the object store.
    """
    threading.Thread(target=_guard, args=(name, list(workers), limit), daemon=True, name="fairlead-guard").start()
    return [start_tick(pid) == started for pid, started, _ in workers]


def verdicts(processes: Sequence[Process], name: str) -> list[int | None]:
    """How many bytes each worker had when it was ended for it; None for one that was not."""
    ended = _ended(name)
    return [ended.get((pid, started)) for pid, started in processes]


def _ended(name: str) -> dict[Process, int]:
    kept: Any = sys.modules.setdefault("_fairlead_guards", types.ModuleType("_fairlead_guards"))
    ended: dict[Process, int] = kept.__dict__.setdefault(name, {})
    return ended


def _guard(name: str, workers: list[tuple[int, int, str]], limit: int) -> None:
    trees = {(pid, started): Trees([(pid, started)], [mark]) for pid, started, mark in workers}
    members: dict[Process, list[Process]] = {}
    marks: dict[Process, Sequence[Mark]] = {}
    measured = dict.fromkeys(trees, 0.0)
    looked = -GUARD_LOOK_EVERY_S
    while trees := {worker: tree for worker, tree in trees.items() if start_tick(worker[0]) == worker[1]}:
        if (now := time.monotonic()) - looked >= GUARD_LOOK_EVERY_S:
            looked = now
            processes = read_processes()
            seen = {(pid, started) for pid, (_, started) in processes.items()}
            marks = {one: found for one, found in marks.items() if one in seen}
            for worker, tree in trees.items():
                alive, children = tree.look(processes, functools.partial(_kept_marks, marks))
                members[worker] = [*alive, *children]
        for worker, tree in trees.items():
            # Forks share pages with their parent, which count once. That is dear to measure, so it comes second, and
            # not at every round.
            if sum(map(_private, members[worker])) <= limit or now - measured[worker] < GUARD_LOOK_EVERY_S:
                continue
            measured[worker] = now
            used = sum(map(_proportional, members[worker]))
            if used > limit and start_tick(worker[0]) == worker[1]:
                # Before the kill: whoever sees the death must find the reason.
                _ended(name)[worker] = used
                kill_trees(tree, END_S)
        time.sleep(EVERY_S)


def _kept_marks(marks: dict[Process, Sequence[Mark]], process: Process) -> Sequence[Mark]:
    if process not in marks:
        marks[process] = read_marks(process)
    return marks[process]


def _private(process: Process) -> int:
    """Return the bytes of a process that are no file and nothing that is mapped as shared memory, in swap too."""
    return _sum_of_lines(process, "status", ("RssAnon:", "VmSwap:"))


def _proportional(process: Process) -> int:
    """Return the same, where a page that several processes share counts for each in part."""
    return _sum_of_lines(process, "smaps_rollup", ("Pss_Anon:", "SwapPss:")) or _private(process)


def _sum_of_lines(process: Process, file_name: str, names: tuple[str, ...]) -> int:
    pid, started = process
    size = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file_name}") as file:  # it may just have ended
        size = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    return size if start_tick(pid) == started else 0

# SPDX-License-Identifier: Apache-2.0
"""Processes of a machine: a worker with everything that it has started, how they end, and their memory.

The reaper of a worker runs the text of this module, so it imports the standard library only.
When a parent dies, its children get another parent. So a worker marks the processes that it starts: programs inherit a
variable of its environment, and forks inherit a page of its memory."""

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

# A pid and a start tick, because the system reuses pids.
Process = tuple[int, int]
# The parent and the start tick of each process of a machine, by pid.
Table = Mapping[int, tuple[int, int]]
# An identity, and whether the process is the worker itself.
Mark = tuple[bytes, bool]

# States of a process that has ended and holds nothing, but whose parent has not read its exit code.
ZOMBIE = ("Z", "X")
VARIABLE = b"FAIRLEAD_WORKER_ID"
PAGE = b"fairlead-tree-"
# Ray takes about 5 s at worst to end a worker. A function on its node kills it if it is alive after this time.
WORKER_GRACE_S = 8.0
# How long children may take to end after SIGTERM before they get SIGKILL.
CHILD_GRACE_S = 2.0
# How long a process may take to end after SIGKILL.
KILLED_S = 4.0
# The pause between two searches for children while some are ending, because they may start others.
LOOK_EVERY_S = 0.2
# The pause between two measurements of memory.
GUARD_EVERY_S = 0.2
# The pause between two searches for new children, which read every process of the machine.
GUARD_LOOK_EVERY_S = 1.0
# How long the processes of one worker may take to end; other workers are not watched during that.
END_S = 5.0


def mark_of(group: str, rank: int) -> str:
    """Return the prefix of the identities of all incarnations of a rank."""
    return f"{group}-{rank}-"


def mark_tree(identity: str) -> mmap.mmap:
    """Mark everything that this process starts from now on; keep the returned page, which forks share."""
    os.environ[VARIABLE.decode()] = identity
    # The name has the pid, which tells the worker from its forks, because they have the same page.
    file, page = make_memory_file(f"{PAGE.decode()}{identity}:{os.getpid()}", mmap.PAGESIZE)
    os.close(file)
    return page


class Trees:
    """Find workers of a machine and what they started: by process, by mark after a death, and by earlier children."""

    def __init__(self, workers: Iterable[Process], marks: Sequence[str], children: Iterable[Process] = ()) -> None:
        self._workers = set(workers)
        self._children = set(children)
        self._marks = tuple(mark.encode() for mark in marks)
        # A process that a worker has started is not older than the worker.
        known = len(self._workers) == len(self._marks)
        self._since = min((started for _, started in self._workers), default=0) if known else 0

    def look(
        self, processes: Table | None = None, read: Callable[[Process], Sequence[Mark]] | None = None
    ) -> tuple[list[Process], list[Process]]:
        """Return the workers and the children that run now. Callers may give the processes, and what reads their
        marks."""
        processes = read_processes() if processes is None else processes
        running = {(pid, started) for pid, (_, started) in processes.items()}
        for one in running - self._workers - self._children:
            if one[1] >= self._since:
                marks = (read or read_marks)(one)
                is_worker = [itself for mark, itself in marks if (mark + b"-").startswith(self._marks)]
                if is_worker:
                    (self._workers if any(is_worker) else self._children).add(one)
        self._children |= _below(self._workers | self._children, processes)
        self._children -= self._workers
        return sorted(self._workers & running), sorted(self._children & running)


def find_children(workers: Sequence[Process]) -> list[list[Process]]:
    """Return the processes below each worker now, found by parent links."""
    processes = read_processes()
    return [sorted(_below([worker], processes) - {worker}) for worker in workers]


def end_trees(
    workers: Sequence[Process],
    children: Sequence[Process],
    marks: Sequence[str],
    within_s: float,
    grace_s: float = WORKER_GRACE_S,
) -> list[Process]:
    """Wait for workers, then end their children with SIGTERM; kill what lasts longer, and return what is alive."""
    deadline = time.monotonic() + within_s
    trees = Trees(workers, marks, children)
    until = _sooner(deadline, grace_s)
    _wait(workers, until)
    alive, left = trees.look()
    if alive:  # including workers whose process was not known
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
    """Kill workers and the processes that they have started; return those that are still alive."""
    deadline = _sooner(time.monotonic() + within_s, KILLED_S)
    while True:
        alive, left = trees.look()
        there = [*alive, *left]
        send_signal(there, signal.SIGKILL)
        if not there or time.monotonic() >= deadline:
            return there
        _wait(there, _sooner(deadline, LOOK_EVERY_S))


def end_orphans(worker: Process, identity: str, grace_s: float) -> None:
    """End the processes of a worker that has ended, unless something else ends them in `grace_s`."""
    mark = f"{identity}-"  # not the beginning of the identity of another incarnation
    trees, until = Trees([worker], [mark]), time.monotonic() + grace_s
    time.sleep(LOOK_EVERY_S)  # a process that starts its program has no mark for a moment
    while any(trees.look()):
        if time.monotonic() >= until:
            end_trees([worker], [], [mark], WORKER_GRACE_S)
            return
        time.sleep(LOOK_EVERY_S)


def open_process(process: Process) -> int | None:
    """Open a process as a pidfd, which never refers to another process; return None if it has ended."""
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
    """Send a signal to the processes that are still alive; return whether each was alive."""
    sent = []
    for process in processes:
        file = open_process(process)
        if file is not None:
            # It has ended, or belongs to another user. Callers that wait for it see whether it is still alive.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(file, number)
            os.close(file)
        sent.append(file is not None)
    return sent


def _sooner(deadline: float, within_s: float) -> float:
    return min(deadline, time.monotonic() + within_s)


def _wait(processes: Sequence[Process], until: float) -> None:
    """Wait until all processes have ended, or until a moment of `time.monotonic()`."""
    pause = 0.005
    while any(start_tick(pid) == started for pid, started in processes) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _below(roots: Collection[Process], processes: Table) -> set[Process]:
    """Return the roots that run, and all processes below them."""
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
    """Return the parent and the start tick of every process except zombies, by pid."""
    stats = {int(name): _read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: (int(stat[1]), int(stat[19])) for pid, stat in stats.items() if stat and stat[0] not in ZOMBIE}


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty list if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_tick(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine did; -1 if it has ended or is a zombie."""
    stat = _read_stat(pid)
    return int(stat[19]) if stat and stat[0] not in ZOMBIE else -1


def process_state(pid: int) -> str:
    """Return the state in /proc: "R" running, "S" sleeping, "D" uninterruptible, "T" stopped; "" if it has ended."""
    return next(iter(_read_stat(pid)), "")


def make_memory_file(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Create an anonymous file; return it, and its memory. Other processes find it by its name while it is open."""
    file = os.memfd_create(name)
    os.ftruncate(file, size)
    return file, mmap.mmap(file, size)


def open_memory_file(pid: int, name: str) -> int | None:
    """Open an anonymous file of this name that a process of this machine has open; return None if it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return None  # the process has ended
    for number in numbers:
        try:
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                return os.open(f"{folder}/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # the process has closed this file
    return None


def find_ended(processes: Sequence[Process]) -> list[bool]:
    """Return whether each of these processes of this machine has ended."""
    return [start_tick(pid) != started for pid, started in processes]


def read_marks(process: Process) -> list[Mark]:
    """Return the marks of a process, each with whether the process is the worker that made it."""
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


def start_guard(workers: Sequence[tuple[int, int, str]], name: str, limit: int) -> list[bool]:
    """Start a thread that ends workers whose trees hold more unshared bytes than a limit; return who is alive.

    It can be repeated: a process in which a thread guards a worker starts no other thread for that worker.
    """
    guarded = _shared("guarded", name)
    if new := [one for one in workers if one[:2] not in guarded]:
        guarded.update((one[:2], 0) for one in new)
        threading.Thread(target=_guard, args=(name, new, limit), daemon=True, name="fairlead-guard").start()
    return [start_tick(pid) == started for pid, started, _ in workers]


def read_verdicts(processes: Sequence[Process], name: str) -> list[int | None]:
    """Return how many bytes each worker held when the guard ended it; None if the guard did not end it."""
    verdicts = _shared("verdicts", name)
    return [verdicts.get((pid, started)) for pid, started in processes]


def _shared(kind: str, name: str) -> dict[Process, int]:
    """Return a table of the guards of a group, which all requests to this process share."""
    shared: Any = sys.modules.setdefault("_fairlead_guards", types.ModuleType("_fairlead_guards"))
    table: dict[Process, int] = shared.__dict__.setdefault(f"{kind} {name}", {})
    return table


def _guard(name: str, workers: list[tuple[int, int, str]], limit: int) -> None:
    trees = {(pid, started): Trees([(pid, started)], [mark]) for pid, started, mark in workers}
    members: dict[Process, list[Process]] = {}
    # A process keeps its marks, and reading them is slow.
    read = functools.lru_cache(maxsize=16_384)(read_marks)
    measured = dict.fromkeys(trees, 0.0)
    looked = -GUARD_LOOK_EVERY_S
    while trees := {worker: tree for worker, tree in trees.items() if start_tick(worker[0]) == worker[1]}:
        if (now := time.monotonic()) - looked >= GUARD_LOOK_EVERY_S:
            looked = now
            processes = read_processes()
            for worker, tree in trees.items():
                members[worker] = [process for found in tree.look(processes, read) for process in found]
        for worker, tree in trees.items():
            # Forks share pages with their parent, and a shared page must count once. Measuring that is slow, so it is
            # done only if the cheap measurement passes the limit, and not in every round.
            if sum(map(_private, members[worker])) <= limit or now - measured[worker] < GUARD_LOOK_EVERY_S:
                continue
            measured[worker] = now
            used = sum(map(_proportional, members[worker]))
            if used > limit and start_tick(worker[0]) == worker[1]:
                # Write the verdict before the kill, so that it is there for whoever sees the death.
                _shared("verdicts", name)[worker] = used
                kill_trees(tree, END_S)
        time.sleep(GUARD_EVERY_S)


def _private(process: Process) -> int:
    """Return the bytes of memory of a process, swap included, without files and shared memory."""
    return _sum_lines(process, "status", ("RssAnon:", "VmSwap:"))


def _proportional(process: Process) -> int:
    """Return the same, where a page that several processes share counts for each in part."""
    return _sum_lines(process, "smaps_rollup", ("Pss_Anon:", "SwapPss:")) or _private(process)


def _sum_lines(process: Process, file_name: str, names: tuple[str, ...]) -> int:
    pid, started = process
    size = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file_name}") as file:  # it may just have ended
        size = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    return size if start_tick(pid) == started else 0

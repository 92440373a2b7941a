# SPDX-License-Identifier: Apache-2.0
"""Processes of a machine: a worker with everything that it has started, how they end, and their memory.

The reaper of a worker runs the text of this module, so it imports the standard library only.
A worker leads a process group. What leaves the group has the mark of the worker: programs inherit a variable of its
environment, and forks inherit a page of its memory."""

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence

# A pid and a start tick, because the system reuses pids.
Process = tuple[int, int]
# An identity, and whether the process is the worker itself.
Mark = tuple[bytes, bool]

# States of a process that has ended and holds nothing, but whose parent has not read its exit code.
ZOMBIE = ("Z", "X")
VARIABLE = b"FAIRLEAD_WORKER_ID"
PAGE = b"fairlead-tree-"
# Ray takes about 5 s at worst to end a worker. A function on its node kills it if it is alive after this time.
WORKER_GRACE_S = 8.0
# How long children may take to end after SIGTERM before they get SIGKILL.
CHILD_GRACE_S = 1.0
# How long a process may take to end after SIGKILL.
KILLED_S = 4.0
# The pause between two searches for processes that are ending, because they may start others.
LOOK_EVERY_S = 0.2
# The pause between two measurements of memory.
GUARD_EVERY_S = 1.0


def mark_tree(identity: str) -> mmap.mmap:
    """Lead a process group and mark what this process starts from now on; keep the returned page, which forks share."""
    if os.getpgrp() != os.getpid():  # Ray 2.60 makes its workers leaders, and earlier versions do not
        os.setpgid(0, 0)
    os.environ[VARIABLE.decode()] = identity
    # The name has the pid, which tells the worker from its forks, because they have the same page.
    file, page = make_memory_file(f"{PAGE.decode()}{identity}:{os.getpid()}", mmap.PAGESIZE)
    os.close(file)
    return page


def find_trees(workers: set[Process], marks: Sequence[bytes], since: int) -> tuple[list[Process], list[Process]]:
    """Return the workers and what they have started that run now, found by process group and by mark.

    Workers that are found by a mark are added to the given ones. What started before `since` has no mark.
    """
    processes = read_processes()
    members: set[Process] = set()
    for pid, (_, _, started) in processes.items():
        own = read_marks((pid, started)) if started >= since else []
        if ours := [itself for mark, itself in own if mark in marks]:
            (workers if any(ours) else members).add((pid, started))
    # A worker may have ended. While its process group has members, no other process gets its pid. Later, a daemon or a
    # reaper may run in a group of this number. Its leader, which has ended too, led a session, as no worker.
    leaders = {pid for pid, started in workers if pid not in processes or processes[pid][2] == started}
    members.update(
        (pid, started)
        for pid, (group, session, started) in processes.items()
        if group in leaders and (group in processes or session != group)
    )
    running = {(pid, started) for pid, (_, _, started) in processes.items()}
    return sorted(workers & running), sorted(members - workers)


def end_trees(
    workers: Sequence[Process], marks: Sequence[str], within_s: float, grace_s: float = WORKER_GRACE_S
) -> list[Process]:
    """Wait for workers, then end what they have started with SIGTERM; kill what lasts longer, and return what is alive.

    `marks` are the identities of the workers: they find workers whose processes are not known.
    """
    deadline = time.monotonic() + within_s
    known = set(workers)
    # A process that a worker has started is not older than the worker.
    since = min((started for _, started in known), default=0) if len(known) == len(marks) else 0
    ours = [mark.encode() for mark in marks]
    running = find_trees(known, ours, since)
    for which, number, limit_s in (  # 0 for the workers, 1 for what they have started
        (0, 0, grace_s),
        (0, signal.SIGKILL, KILLED_S),
        (1, signal.SIGTERM, CHILD_GRACE_S),
        (1, signal.SIGKILL, KILLED_S),
    ):
        until, sent = _sooner(deadline, limit_s), set[Process]()
        while running[which] and time.monotonic() < until:
            send_signal([process for process in running[which] if process not in sent], number)
            sent.update(running[which])
            _wait(running[which], _sooner(until, LOOK_EVERY_S))
            running = find_trees(known, ours, since)
    return [*running[0], *running[1]]


def reap(worker: Process, identity: str, is_over: Callable[[float], bool], limit: int, verdict: str) -> None:
    """Wait for the end of a worker or its raylet, or end it for its memory; then end it and what it has started.

    `is_over` waits so many seconds at most for the first two, and returns whether one has come. `limit` and `verdict`
    are as `start_reaper` in `setup` says.
    """
    while limit and not is_over(GUARD_EVERY_S):
        tree = find_descendants(worker)
        # Forks share pages with their parent, and a shared page must count once. Measuring that is slow.
        if sum(map(_private, tree)) > limit and (used := sum(map(_proportional, tree))) > limit:
            with contextlib.suppress(OSError):  # the limit holds on a node without room for the file too
                with open(f"{verdict}.part", "w") as file:
                    file.write(f"{used} {limit}")
                os.rename(f"{verdict}.part", verdict)
            send_signal(tree, signal.SIGKILL)
            break
    time.sleep(LOOK_EVERY_S)  # a process that starts its program has no mark for a moment
    # A worker whose raylet has ended may be alive.
    end_trees([worker], [identity], WORKER_GRACE_S, CHILD_GRACE_S)


def find_descendants(worker: Process) -> list[Process]:
    """Return a worker and the processes below it now, found by parent links."""
    tree, left = [worker], [worker[0]]
    while left:
        folder = f"/proc/{left.pop()}/task"
        threads: list[str] = []
        with contextlib.suppress(OSError):  # it has just ended
            threads = os.listdir(folder)
        for thread in threads:
            with contextlib.suppress(OSError), open(f"{folder}/{thread}/children") as file:  # so has this thread
                children = [int(pid) for pid in file.read().split()]
                tree += [(pid, start_tick(pid)) for pid in children]
                left += children
    return tree


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


def read_processes() -> dict[int, tuple[int, int, int]]:
    """Return the process group, the session and the start tick of every process except zombies, by pid."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    running = {pid: stat for pid, stat in stats.items() if stat and stat[0] not in ZOMBIE}
    return {pid: (int(stat[2]), int(stat[3]), int(stat[19])) for pid, stat in running.items()}


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty list if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_tick(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine did; -1 if it has ended or is a zombie."""
    stat = read_stat(pid)
    return int(stat[19]) if stat and stat[0] not in ZOMBIE else -1


def process_state(pid: int) -> str:
    """Return the state in /proc: "R" running, "S" sleeping, "D" uninterruptible, "T" stopped; "" if it has ended."""
    return next(iter(read_stat(pid)), "")


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
            variables = [variable.partition(b"=") for variable in file.read().split(b"\0")]
        marks += [(value, False) for name, _, value in variables if name == VARIABLE]
        with open(f"/proc/{pid}/maps", "rb") as file:
            mapped = file.read()
        for line in mapped.splitlines() if PAGE in mapped else ():
            mark, _, maker = line.partition(PAGE)[2].partition(b" ")[0].rpartition(b":")
            if mark:
                marks.append((mark, maker == str(pid).encode()))
    return marks


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

# SPDX-License-Identifier: Apache-2.0
"""Processes of one machine without Ray: trees below a process that is marked as a worker, and stacks of stuck ones."""

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator

import pytest

from fairlead_workergroup._remote import process, setup, stacks

from ..faults import find_running
from ..processes import KINDS, find_reapers, read_pids, start_children

# Other runs of these tests on this machine have groups of other names.
GROUP = f"group-{os.getpid()}"

MB = 1_000_000


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child runs nothing that waits for them
        return os.fork()


@pytest.fixture(autouse=True)
def short_grace(monkeypatch) -> None:
    """One child of each worker ignores SIGTERM."""
    monkeypatch.setattr(process, "CHILD_GRACE_S", 0.5)


@pytest.fixture
def parent(tmp_path, eventually) -> Iterator[tuple[int, int]]:
    """A process that has marked its tree and started a child of each kind: its pid and start tick."""
    child = fork()
    if not child:
        page = process.mark_tree(f"{GROUP}-0")
        start_children(str(tmp_path))
        while page:
            signal.pause()
    assert eventually(lambda: list(read_pids(tmp_path)) == KINDS)
    yield child, process.start_tick(child)
    for pid in find_running([child, *read_pids(tmp_path).values()]):
        os.kill(pid, signal.SIGKILL)


def end_parent(parent) -> None:
    os.kill(parent[0], signal.SIGKILL)
    os.waitpid(parent[0], 0)


def test_reused_pid(parent, tmp_path):
    """A process that has the pid of an ended worker is not touched, nor is its process group."""
    pid, started = parent
    assert process.end_trees([(pid, started - 1)], ["none"], 20) == []
    process.send_signal([(pid, started - 1)], signal.SIGKILL)
    assert find_running(pids := [pid, *read_pids(tmp_path).values()]) == pids


def open_files(pid):
    return sorted(os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))


def start_worker(act, *more):
    """Fork a process that has a reaper, as a worker has, and acts then; return its pid and identity."""
    identity = f"{os.urandom(8).hex()}-3-1"
    worker = fork()
    if not worker:
        page = process.mark_tree(identity)
        setup.start_reaper(identity, *more)
        held = act()
        while page or held:
            signal.pause()
    return worker, identity


def test_reaper_of_a_lost_raylet(monkeypatch, eventually):
    """A worker whose raylet was killed ends soon, also while the parent of the raylet has not waited for it."""
    raylet = subprocess.Popen(["sleep", "281"])
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    worker, _ = start_worker(lambda: None)
    assert eventually(lambda: len(find_reapers(worker)) == 1)
    os.kill(raylet.pid, signal.SIGKILL)
    try:
        assert eventually(lambda: not find_running([worker]))
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        raylet.wait()


def test_reaper(tmp_path, eventually):
    """When a worker ends, all that it has started ends without any request, and nothing of another worker does."""
    worker, identity = start_worker(lambda: start_children(str(tmp_path)))
    other = subprocess.Popen(["sleep", "281"], env={process.VARIABLE.decode(): f"{identity}0"})
    assert eventually(lambda: list(read_pids(tmp_path)) == KINDS)
    pids = read_pids(tmp_path)
    assert eventually(lambda: len(find_reapers(worker)) == 1)
    (pid,) = find_reapers(worker)
    assert os.getsid(pid) != os.getsid(worker)
    assert pid not in [child for child, _ in process.find_descendants((worker, process.start_tick(worker)))]

    def find_files():
        return [name for name in open_files(pid) if "pidfd" not in name]

    # An interpreter that is starting has files of its own open.
    assert eventually(lambda: find_files() == ["/dev/null"] * 3 + ["/memfd:fairlead-reaper (deleted)"]), find_files()
    try:
        end_parent((worker, 0))
        assert eventually(lambda: not find_reapers(worker))
        assert find_running([*pids.values(), other.pid]) == [other.pid]
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("limit", [0, 150 * MB])
def test_reaper_that_does_not_start(monkeypatch, limit):
    """A worker with a limit does not start without its reaper, others warn; no file stays open (seam: the shell)."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2))
    with pytest.raises(OSError, match="memory_limit") if limit else pytest.warns(UserWarning, match="No reaper"):
        setup.start_reaper("group-0-1", limit)
    assert len(os.listdir("/proc/self/fd")) == before


def test_shared_pages():
    """Pages that a worker shares with its forks count once."""
    block = bytearray(b"x") * (100 * MB)
    processes = [(os.getpid(), process.start_tick(os.getpid()))]
    before = sum(map(process._proportional, processes))
    for _ in range(3):
        child = fork()
        if not child:
            signal.pause()
        processes.append((child, process.start_tick(child)))
    try:
        assert sum(map(process._private, processes)) > 400 * MB
        assert before - 10 * MB < sum(map(process._proportional, processes)) < before + 100 * MB
        assert len(block) == 100 * MB
    finally:
        for child, _ in processes[1:]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.fixture
def start():
    programs = []

    def started(source):
        command = [sys.executable, "-c", textwrap.dedent(source)]
        programs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert programs[-1].stdout.readline() == b"ready\n"
        return programs[-1]

    yield started
    for program in programs:
        program.kill()
        program.communicate()


def dumped(program):
    (found,) = stacks.dump_stacks([(program.pid, process.start_tick(program.pid))]).values()
    return found


def test_no_handler(start):
    """A process without a handler, which the signal would end, does not get the signal."""
    program = start("print('ready', flush=True); input()")
    assert dumped(program) == ("", "no handler writes the stacks of this process")
    unregistered = start("""
        import faulthandler
        from fairlead_workergroup._remote.stacks import SIGNAL, write_stacks_on_signal
        write_stacks_on_signal()
        faulthandler.unregister(SIGNAL)
        print('ready', flush=True)
        input()
    """)
    assert dumped(unregistered) == ("", "no handler writes the stacks of this process")
    assert (program.poll(), unregistered.poll()) == (None, None)


def test_blocked_signal(start, monkeypatch, eventually):
    """The wait for a process has a deadline, and a pending signal is not sent again."""
    program = start("""
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 5])  # threads that imports start hold it back too
        from fairlead_workergroup._remote.stacks import write_stacks_on_signal
        write_stacks_on_signal()
        print('ready', flush=True)
        input()
        taken = 0
        while signal.sigtimedwait([signal.SIGRTMIN + 5], 0):
            taken += 1
        print(taken)
    """)
    assert eventually(lambda: process.process_state(program.pid) == "S")
    monkeypatch.setattr(stacks, "WRITE_S", 0.3)
    for _ in range(2):
        assert dumped(program) == ("", "the process (state S) did not write its stacks within 0.3 s")
    assert program.communicate(b"\n")[0] == b"1\n"

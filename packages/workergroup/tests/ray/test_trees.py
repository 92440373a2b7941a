# SPDX-License-Identifier: Apache-2.0
"""Processes that a worker has started end with it, also in their own sessions or after the death of their parent."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError, WorkerStartError
from fairlead_workergroup._remote import process, reaper
from fairlead_workergroup.testing import kill

from ..restarting import find_running

MB = 1_000_000


def run_daemon(code: str) -> None:
    """Start a program in a session of its own, whose parent dies at once."""
    subprocess.run(["sh", "-c", 'setsid "$0" -c "$1" & ', sys.executable, code], check=True)


def fork_daemon(path: str) -> None:
    """Fork a process that runs no other program, whose parent dies at once."""
    child = os.fork()
    if not child:
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            write_pid(path)
            signal.pause()
        os._exit(0)
    os.waitpid(child, 0)


def write_pid(path: str) -> None:
    with open(f"{path}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}.new", path)


CODE = """
import os, signal, sys
{more}
with open({path!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({path!r} + ".new", {path!r})
signal.pause()
"""


def start_children(folder: str) -> None:
    """Start one child of each kind; each writes its pid in a file named after the kind."""
    code = {
        "session": "",
        "daemon": "",
        "stubborn": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "cleared": "",
    }
    programs = {kind: CODE.format(more=more, path=f"{folder}/{kind}") for kind, more in code.items()}
    subprocess.Popen([sys.executable, "-c", programs["session"]], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", programs["cleared"]], start_new_session=True, env={})
    run_daemon(programs["daemon"])
    run_daemon(programs["stubborn"])
    fork_daemon(f"{folder}/fork")


KINDS = ["cleared", "daemon", "fork", "session", "stubborn"]


def read_pids(folder) -> dict[str, int]:
    return {name: int((folder / name).read_text()) for name in sorted(os.listdir(folder)) if name in KINDS}


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
        page = process.mark_tree("group-3-0")
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


def test_find_children(parent, tmp_path):
    """Children of a living parent are found, also without the mark."""
    found, none = process.find_children([parent, (parent[0], parent[1] - 1)])
    pids = read_pids(tmp_path)
    assert {pids["session"], pids["cleared"]} <= {pid for pid, _ in found}
    assert none == []
    end_parent(parent)
    assert process.end_trees([parent], found, ["group-3-"], 20) == []
    assert find_running(pids.values()) == []


def test_find_by_marks(parent, tmp_path):
    """Processes of a dead worker are found by its mark, also if the process of the worker was never known."""
    end_parent(parent)
    pids = read_pids(tmp_path)
    assert process.end_trees([], [], ["group-30-"], 20) == []
    assert find_running(pids.values()) == list(pids.values())
    assert process.end_trees([], [], ["group-2-", "group-3-"], 20) == []
    assert find_running(pids.values()) == [pids["cleared"]]


def test_worker_that_does_not_end(parent, tmp_path):
    """A worker that does not end gets SIGKILL, whether it is known or not; then its children end."""
    pids = read_pids(tmp_path)
    assert process.end_trees([], *process.find_children([parent]), ["group-3-"], 20, grace_s=0.1) == []
    assert find_running(pids.values()) == []


def test_reused_pid(parent):
    """A process that has the pid of an ended process is not touched."""
    pid, started = parent
    assert process.end_trees([(pid, started - 1)], [(pid, started - 1)], ["none-"], 20) == []
    process.send_signal([(pid, started - 1)], signal.SIGKILL)
    assert find_running([pid]) == [pid]


def test_survivors(parent, tmp_path, monkeypatch):
    """Processes that do not end are returned."""
    end_parent(parent)
    monkeypatch.setattr(process, "send_signal", lambda processes, number: None)
    left = {pid for pid, _ in process.end_trees([], [], ["group-3-"], 0.3)}
    pids = read_pids(tmp_path)
    assert left == {pid for kind, pid in pids.items() if kind != "cleared"}


def reapers(identity):
    """Return the processes that wait for the end of a worker, without those that are ending."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            if f"\0{identity}\0" in Path(f"/proc/{name}/cmdline").read_text(errors="replace"):
                found.append(int(name))
    return found


def open_files(pid):
    return sorted(os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))


def test_reaper(tmp_path, eventually, monkeypatch):
    """When a worker ends, everything with its mark ends without any request, and nothing of another worker does."""
    monkeypatch.setattr(reaper, "GRACE_S", 0.1)
    identity = f"{os.urandom(8).hex()}-3-1"
    worker = fork()
    if not worker:
        page = process.mark_tree(identity)
        reaper.start_reaper(identity)
        start_children(str(tmp_path))
        while page:
            signal.pause()
    other = subprocess.Popen(["sleep", "281"], env={process.VARIABLE.decode(): f"{identity}0"})
    assert eventually(lambda: list(read_pids(tmp_path)) == KINDS)
    pids = read_pids(tmp_path)
    assert eventually(lambda: len(reapers(identity)) == 1)
    (pid,) = reapers(identity)
    assert os.getsid(pid) != os.getsid(worker)
    assert pid not in [child for child, _ in process.find_children([(worker, process.start_tick(worker))])[0]]

    def find_files():
        return [name for name in open_files(pid) if "pidfd" not in name]

    # An interpreter that is starting has files of its own open.
    assert eventually(lambda: find_files() == ["/dev/null"] * 3 + ["/memfd:fairlead-reaper (deleted)"]), find_files()
    try:
        end_parent((worker, 0))
        assert eventually(lambda: find_running(pids.values()) == [pids["cleared"]])
        assert eventually(lambda: not reapers(identity))
        assert find_running([other.pid]) == [other.pid]
    finally:
        other.kill()
        other.wait()
        for left in find_running(pids.values()):
            os.kill(left, signal.SIGKILL)


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


class Parent:
    """Starts processes of its own."""

    def __init__(self, folder="", fail=False):
        if fail:
            run_daemon(CODE.format(more="", path=f"{folder}/daemon"))
            while not os.path.exists(f"{folder}/daemon"):
                time.sleep(0.01)
            raise OSError("cannot start")

    def start(self, folder):
        start_children(folder)

    def pid(self):
        return os.getpid()


@pytest.fixture
def group(local_ray) -> Iterator[RayWorkerGroup]:
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Parent) as workers:
        yield workers


def start_processes(group, rank, folder, eventually) -> dict[str, int]:
    folder.mkdir()
    ray.get(group.workers[rank].start.remote(str(folder)))
    assert eventually(lambda: list(read_pids(folder)) == KINDS)
    return read_pids(folder)


def test_shutdown(group, tmp_path, eventually):
    """When shutdown returns, all processes that the workers have started have ended."""
    children = start_processes(group, 1, tmp_path / "1", eventually)
    assert group.shutdown() is True
    assert find_running(children.values()) == []


def test_restart(group, tmp_path, eventually):
    """Processes of a lost worker end before its slot is used again; processes of other workers continue."""
    lost, others = (start_processes(group, rank, tmp_path / str(rank), eventually) for rank in (1, 0))
    kill(group, 1)
    # Ray does not notice this death: a fork of the worker holds its connections.
    assert group.restart_failed_workers() == [1]
    assert find_running(lost.values()) in ([], [lost["cleared"]])
    assert find_running(others.values()) == list(others.values())
    assert group.shutdown() is True
    assert find_running(others.values()) == []
    for pid in find_running(lost.values()):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def late_reaper(monkeypatch) -> None:
    """The reapers of the workers leave their trees to the group."""
    monkeypatch.setattr(reaper, "GRACE_S", 600.0)


def test_process_that_does_not_end(late_reaper, group, tmp_path, eventually, monkeypatch, caplog):
    """A slot with a remaining process is not used again, and restart and shutdown report the process."""
    children = start_processes(group, 1, tmp_path / "1", eventually)
    kill(group, 1)
    with monkeypatch.context() as patched:
        for name, value in (("CHILD_GRACE_S", 0.1), ("KILLED_S", 0.1), ("send_signal", lambda processes, number: None)):
            patched.setattr(process, name, value)
        pid = children["daemon"]
        with pytest.raises(WorkerFailureError, match=rf"Nothing was restarted.*pid {pid} on node") as caught:
            group.restart_failed_workers()
        assert [failure.rank for failure in caught.value.failures] == [1]
    assert group.restart_failed_workers() == [1]
    assert find_running([pid]) == []
    children = start_processes(group, 1, tmp_path / "again", eventually)
    with monkeypatch.context() as patched:
        for name, value in (("CHILD_GRACE_S", 0.1), ("KILLED_S", 0.1), ("send_signal", lambda processes, number: None)):
            patched.setattr(process, name, value)
        assert group.shutdown() is False
    assert f"pid {children['daemon']} on node" in caplog.text
    for pid in find_running([*children.values(), *read_pids(tmp_path / "1").values()]):
        os.kill(pid, signal.SIGKILL)


def test_failed_start(local_ray, tmp_path):
    """Processes that a constructor has started end when the group does not start."""
    with RayVirtualCluster([1], use_gpus=False) as cluster, pytest.raises(WorkerStartError, match="cannot start"):
        RayWorkerGroup(cluster, RayWorkerBuilder(Parent, str(tmp_path), fail=True))
    assert find_running(read_pids(tmp_path).values()) == []
    assert list(read_pids(tmp_path)) == ["daemon"]

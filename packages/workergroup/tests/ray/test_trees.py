# SPDX-License-Identifier: Apache-2.0
"""What a worker has started ends with it, also when it is in a session of its own or its parent has died."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError, WorkerStartError
from fairlead_workergroup._remote import process as _trees
from fairlead_workergroup.testing import kill

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


def running(pids) -> list[int]:
    return [pid for pid in pids if _trees.start_tick(pid) >= 0]


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child runs nothing that waits for them
        return os.fork()


@pytest.fixture(autouse=True)
def short_grace(monkeypatch) -> None:
    """One child of each worker ignores SIGTERM."""
    monkeypatch.setattr(_trees, "CHILD_GRACE_S", 0.5)


@pytest.fixture
def parent(tmp_path, eventually) -> Iterator[tuple[int, int]]:
    """A process that has marked its tree and started a child of each kind: its pid and start tick."""
    child = fork()
    if not child:
        page = _trees.mark_tree("group-3-0")
        start_children(str(tmp_path))
        while page:
            signal.pause()
    assert eventually(lambda: list(read_pids(tmp_path)) == KINDS)
    yield child, _trees.start_tick(child)
    for pid in running([child, *read_pids(tmp_path).values()]):
        os.kill(pid, signal.SIGKILL)


def end_parent(parent) -> None:
    os.kill(parent[0], signal.SIGKILL)
    os.waitpid(parent[0], 0)


def test_found_before_the_end(parent, tmp_path):
    """Children whose parent lives are found by it, also without the mark."""
    found, none = _trees.find_children([parent, (parent[0], parent[1] - 1)])
    pids = read_pids(tmp_path)
    assert {pids["session"], pids["cleared"]} <= {pid for pid, _ in found}
    assert none == []
    end_parent(parent)
    assert _trees.end_trees([parent], found, ["group-3-"], 20) == []
    assert running(pids.values()) == []


def test_found_by_marks(parent, tmp_path):
    """What is left of a worker that has died is found by its mark, also when its process was never known."""
    end_parent(parent)
    pids = read_pids(tmp_path)
    assert _trees.end_trees([], [], ["group-30-"], 20) == []
    assert running(pids.values()) == list(pids.values())
    assert _trees.end_trees([], [], ["group-2-", "group-3-"], 20) == []
    assert running(pids.values()) == [pids["cleared"]]


def test_a_worker_that_does_not_end(parent, tmp_path, monkeypatch):
    """A worker that outlives what ends it gets SIGKILL, known or not; then its children end."""
    monkeypatch.setattr(_trees, "WORKER_GRACE_S", 0.1)
    pids = read_pids(tmp_path)
    assert _trees.end_trees([], *_trees.find_children([parent]), ["group-3-"], 20) == []
    assert running(pids.values()) == []


def test_another_process_of_the_same_pid(parent):
    """A process that has the pid of one that has ended is not touched."""
    pid, started = parent
    assert _trees.end_trees([(pid, started - 1)], [(pid, started - 1)], ["none-"], 20) == []
    _trees.send_signal([(pid, started - 1)], signal.SIGKILL)
    assert running([pid]) == [pid]


def test_survivors(parent, tmp_path, monkeypatch):
    """What does not end is returned."""
    end_parent(parent)
    monkeypatch.setattr(_trees, "send_signal", lambda processes, number: None)
    left = {pid for pid, _ in _trees.end_trees([], [], ["group-3-"], 0.3)}
    pids = read_pids(tmp_path)
    assert left == {pid for kind, pid in pids.items() if kind != "cleared"}


def test_pages_that_forks_share_count_once():
    """A worker with forks is not taken for one that uses many times its memory."""
    block = bytearray(b"x") * (100 * MB)
    processes = [(os.getpid(), _trees.start_tick(os.getpid()))]
    before = sum(map(_trees._proportional, processes))
    for _ in range(3):
        child = fork()
        if not child:
            signal.pause()
        processes.append((child, _trees.start_tick(child)))
    try:
        assert sum(map(_trees._private, processes)) > 400 * MB
        assert before - 10 * MB < sum(map(_trees._proportional, processes)) < before + 100 * MB
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
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Parent) as made:
        yield made


def started(group, rank, folder, eventually) -> dict[str, int]:
    folder.mkdir()
    ray.get(group.workers[rank].start.remote(str(folder)))
    assert eventually(lambda: list(read_pids(folder)) == KINDS)
    return read_pids(folder)


def test_shutdown(group, tmp_path, eventually):
    """When shutdown returns, everything that the workers had started has ended."""
    children = started(group, 1, tmp_path / "1", eventually)
    assert group.shutdown() is True
    assert running(children.values()) == []


def test_restart(group, tmp_path, eventually):
    """What a lost worker had started ends before its slot is used again; what the others have started does not."""
    lost, others = (started(group, rank, tmp_path / str(rank), eventually) for rank in (1, 0))
    kill(group, 1)
    # Ray does not notice this death: a fork of the worker holds its connections.
    assert group.restart_failed_workers() == [1]
    assert running(lost.values()) in ([], [lost["cleared"]])
    assert running(others.values()) == list(others.values())
    assert group.shutdown() is True
    assert running(others.values()) == []
    for pid in running(lost.values()):
        os.kill(pid, signal.SIGKILL)


def test_not_ended(group, tmp_path, eventually, monkeypatch, caplog):
    """A slot in which a process is left is not used again, and both restart and shutdown say which process."""
    children = started(group, 1, tmp_path / "1", eventually)
    kill(group, 1)
    with monkeypatch.context() as patched:
        for name, value in (("CHILD_GRACE_S", 0.1), ("KILLED_S", 0.1), ("send_signal", lambda processes, number: None)):
            patched.setattr(_trees, name, value)
        pid = children["daemon"]
        with pytest.raises(WorkerFailureError, match=rf"Nothing was restarted.*pid {pid} on node") as caught:
            group.restart_failed_workers()
        assert [failure.rank for failure in caught.value.failures] == [1]
    assert group.restart_failed_workers() == [1]
    assert running([pid]) == []
    children = started(group, 1, tmp_path / "again", eventually)
    with monkeypatch.context() as patched:
        for name, value in (("CHILD_GRACE_S", 0.1), ("KILLED_S", 0.1), ("send_signal", lambda processes, number: None)):
            patched.setattr(_trees, name, value)
        assert group.shutdown() is False
    assert f"pid {children['daemon']} on node" in caplog.text
    for pid in running([*children.values(), *read_pids(tmp_path / "1").values()]):
        os.kill(pid, signal.SIGKILL)


def test_a_start_that_fails(local_ray, tmp_path):
    """What a constructor had started ends when the group does not start."""
    with RayVirtualCluster([1], use_gpus=False) as cluster, pytest.raises(WorkerStartError, match="cannot start"):
        RayWorkerGroup(cluster, RayWorkerBuilder(Parent, str(tmp_path), fail=True))
    assert running(read_pids(tmp_path).values()) == []
    assert list(read_pids(tmp_path)) == ["daemon"]

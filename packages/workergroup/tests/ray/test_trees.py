# SPDX-License-Identifier: Apache-2.0
"""Processes that a worker has started end with it, also in their own sessions or after the death of their parent."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError, WorkerStartError
from fairlead_workergroup.testing import kill

from ..faults import find_running, keep_processes_alive, limit_ends_of_children
from ..processes import CODE, KINDS, find_reapers, read_pids, run_daemon, start_children


@pytest.fixture(autouse=True)
def short_grace(monkeypatch) -> None:
    """One child of each worker ignores SIGTERM."""
    limit_ends_of_children(monkeypatch, 0.5)


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


def test_restart(group, tmp_path, eventually):
    """Processes of a lost worker end before its slot is used again; processes of other workers continue."""
    lost, others = (start_processes(group, rank, tmp_path / str(rank), eventually) for rank in (1, 0))
    kill(group, 1)
    # Ray does not notice this death: a fork of the worker holds its connections.
    assert group.restart_failed_workers() == [1]
    assert find_running(lost.values()) == []
    assert find_running(others.values()) == list(others.values())
    assert group.shutdown() is True
    assert find_running(others.values()) == []


def kill_with_reaper(group, rank) -> None:
    """End a worker after its reaper, so that only the group ends what it has started."""
    (reaper,) = find_reapers(group.get_worker_status()[rank].pid)
    os.kill(reaper, signal.SIGKILL)
    kill(group, rank)


def test_process_that_does_not_end(group, tmp_path, eventually, monkeypatch, caplog):
    """A slot with a remaining process is not used again, and restart and shutdown report the process."""
    children = start_processes(group, 1, tmp_path / "1", eventually)
    kill_with_reaper(group, 1)
    with monkeypatch.context() as patched:
        keep_processes_alive(patched)
        pid = children["daemon"]
        with pytest.raises(WorkerFailureError, match=rf"Nothing was restarted.*pid {pid} on node") as caught:
            group.restart_failed_workers()
        assert [failure.rank for failure in caught.value.failures] == [1]
    assert group.restart_failed_workers() == [1]
    assert find_running([pid]) == []
    children = start_processes(group, 1, tmp_path / "again", eventually)
    kill_with_reaper(group, 1)
    with monkeypatch.context() as patched:
        keep_processes_alive(patched)
        assert group.shutdown() is False
    assert f"pid {children['daemon']} on node" in caplog.text
    for pid in find_running(children.values()):
        os.kill(pid, signal.SIGKILL)


def test_killed_worker(group, tmp_path, eventually):
    """What a worker has started is gone 5 s after its SIGKILL, also what ignores SIGTERM, and without any call."""
    children = start_processes(group, 1, tmp_path / "1", eventually)
    kill(group, 1)
    assert eventually(lambda: not find_running(children.values()), 5)


def test_failed_start(local_ray, tmp_path):
    """Processes that a constructor has started end when the group does not start."""
    with RayVirtualCluster([1], use_gpus=False) as cluster, pytest.raises(WorkerStartError, match="cannot start"):
        RayWorkerGroup(cluster, RayWorkerBuilder(Parent, str(tmp_path), fail=True))
    assert find_running(read_pids(tmp_path).values()) == []
    assert list(read_pids(tmp_path)) == ["daemon"]

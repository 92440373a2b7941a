# SPDX-License-Identifier: Apache-2.0
"""The end of a group: its order, its deadlines, and that nothing is left."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement.testing import assert_no_leaks
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError

from ..faults import (
    act_before_a_call_is_sent,
    find_running,
    limit_ends_of_workers,
)


class Cleaner:
    """A worker that records its cleanup in a file."""

    def __init__(self, folder=None):
        self.folder = folder

    def cleanup(self):
        with open(f"{self.folder}/{os.environ['RANK']}", "w") as file:
            file.write("cleaned")

    def cleanup_fails(self):
        self.cleanup()
        if os.environ["RANK"] == "1":
            raise OSError("disk full")

    def cleanup_hangs(self):
        self.cleanup()
        if os.environ["RANK"] == "1":
            time.sleep(1000)

    async def cleanup_async(self):
        self.cleanup()

    def cleanup_in_steps(self):
        yield "first"
        self.cleanup()

    async def cleanup_in_async_steps(self):
        yield "first"
        self.cleanup()

    def spin(self):
        while True:
            pass

    def pid(self):
        return os.getpid()


@pytest.fixture
def group(cluster, tmp_path):
    workers = RayWorkerGroup(cluster, RayWorkerBuilder(Cleaner, str(tmp_path)), workers_per_node=2)
    yield workers
    workers.shutdown(force=True)


def pids(group) -> list[int]:
    return ray.get([worker.pid.remote() for worker in group.workers])


def list_cleaned(tmp_path) -> list[str]:
    return sorted(os.listdir(tmp_path))


@pytest.mark.smoke
def test_processes_have_ended(group):
    """When shutdown returns, the workers' processes have ended."""
    processes = pids(group)
    assert find_running(processes) == processes
    assert group.shutdown() is True
    assert find_running(processes) == []


def test_two_threads(group):
    """The second thread also waits until the processes have ended, and gets the same result."""
    processes = pids(group)
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(lambda: (group.shutdown(), find_running(processes))) for _ in range(2)]
        assert [one.result(timeout=60) for one in both] == [(True, [])] * 2
    assert group.shutdown() is True  # a later shutdown does nothing


def test_force_during_a_cleanup(group, tmp_path, eventually):
    """`force` does not wait for a cleanup that hangs; both threads get the same result."""
    processes = pids(group)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(group.shutdown, "cleanup_hangs", None)
        assert eventually(lambda: len(list_cleaned(tmp_path)) == 2)
        assert group.shutdown(force=True) is False
        assert first.result(timeout=60) is False
    assert find_running(processes) == []


def test_reverse_order(group, monkeypatch):
    """Rank 0, which has the store of torch.distributed, is killed last."""
    killed, kill = [], ray.kill
    workers = list(group.workers)

    def note_and_kill(actor):
        if actor in workers:
            killed.append(workers.index(actor))
        kill(actor)  # also the node agent

    monkeypatch.setattr(ray, "kill", note_and_kill)
    group.shutdown()
    assert killed == [1, 0]


@pytest.mark.parametrize("method", ["cleanup_async", "cleanup_in_steps", "cleanup_in_async_steps"])
@pytest.mark.parametrize("overlapping", [False, True])
def test_cleanup_of_each_kind(cluster, tmp_path, method, overlapping):
    """A coroutine is awaited, and a generator runs to its end, whether or not async methods overlap."""
    builder = RayWorkerBuilder(Cleaner, str(tmp_path))
    group = RayWorkerGroup(cluster, builder, workers_per_node=1, async_communication=overlapping)
    assert group.shutdown(cleanup_method=method) is True
    assert list_cleaned(tmp_path) == ["0"]


def test_cleanup_fails(group, tmp_path, caplog):
    """A cleanup that fails on one worker is reported, and the cleanups of the others still run."""
    processes = pids(group)
    assert group.shutdown(cleanup_method="cleanup_fails") is False
    assert list_cleaned(tmp_path) == ["0", "1"]
    assert find_running(processes) == []
    assert "cleanup 'cleanup_fails' of rank 1 failed" in caplog.text
    assert "disk full" in caplog.text


def test_cleanup_hangs(group, caplog):
    """Shutdown waits for a cleanup that hangs until the deadline."""
    processes = pids(group)
    assert group.shutdown(cleanup_method="cleanup_hangs", timeout=5) is False
    assert find_running(processes) == []
    assert re.search(r"did not end within [\d.]+ s on ranks \[1\]", caplog.text)


def test_unknown_cleanup(group, caplog):
    """A cleanup method that does not exist is reported after all workers have been ended."""
    processes = pids(group)
    assert group.shutdown(cleanup_method="nothing") is False
    assert find_running(processes) == []
    assert "nothing" in caplog.text


def test_dead_worker(group, tmp_path):
    """A worker that is already dead does not stop the shutdown; the cleanups of the others count."""
    os.kill(pids(group)[1], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(group.workers[1].pid.remote())
    processes = ray.get([group.workers[rank].pid.remote() for rank in (0,)])
    assert group.shutdown(cleanup_method="cleanup") is True
    assert list_cleaned(tmp_path) == ["0"]
    assert find_running(processes) == []


@pytest.mark.parametrize("how", ["spin", "stop"])
def test_hung_worker(group, monkeypatch, how):
    """A worker that never answers again is ended too."""
    limit_ends_of_workers(monkeypatch, 1.0)
    processes = pids(group)
    if how == "spin":
        group.run_single_worker_single_data("spin", 1)
    else:
        os.kill(processes[1], signal.SIGSTOP)
    assert group.shutdown() is True
    assert find_running(processes) == []


def test_call_of_another_thread(group, monkeypatch):
    """A call that is being sent when the group ends reports that its workers are lost."""
    with monkeypatch.context() as patched:
        act_before_a_call_is_sent(patched, group.shutdown)
        call = group.call("pid")
    with pytest.raises(WorkerFailureError):
        call.result(timeout=60)


def test_dropped_group(cluster, recwarn, eventually):
    """A group without references releases its slots and its port."""

    def restart():
        with contextlib.suppress(ResourceInsufficientError):  # the workers of the first one have not ended yet
            return RayWorkerGroup(cluster, Cleaner, workers_per_node=1).shutdown()

    with assert_no_leaks():
        RayWorkerGroup(cluster, Cleaner, workers_per_node=1)
        gc.collect()
        assert eventually(restart, 60)
    texts = [str(one.message) for one in recwarn if one.category is ResourceWarning and "Cleaner" in str(one.message)]
    assert texts == [
        (
            "The worker group 'Cleaner' was dropped without shutdown(). Its workers are ended in the background. "
            "Use the group in a with statement, or call shutdown()."
        )
    ]


def test_cluster_shut_down_first(local_ray):
    """The shutdown of the cluster ends the workers of a group; the group's own shutdown still works."""
    with assert_no_leaks():
        cluster = RayVirtualCluster([1], use_gpus=False)
        group = RayWorkerGroup(cluster, Cleaner)
        processes = pids(group)
        cluster.shutdown()
        assert group.shutdown() is True
    assert find_running(processes) == []


DRIVER = """
import os, ray, sys
from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup

class Worker:
    def pid(self):
        return os.getpid()

ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
cluster = RayVirtualCluster([1], use_gpus=False)
group = RayWorkerGroup(cluster, Worker)
print(*group.call("pid").result())
"""


def test_interpreter_exit(local_ray, eventually):
    """A driver that ends without a shutdown leaves no process and prints nothing."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address],
        capture_output=True,
        text=True,
        timeout=240,
        # Ray's own warnings are not ours, of some versions about their own future.
        env={**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    processes = [int(pid) for pid in done.stdout.split()]
    assert len(processes) == 1
    assert eventually(lambda: not find_running(processes), 60)

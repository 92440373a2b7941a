# SPDX-License-Identifier: Apache-2.0
"""The test kit: its faults are real, take effect when the function returns, and end."""

import asyncio
import os
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, WorkerFailureError, WorkerGroupError
from fairlead_workergroup.spi import start_tick
from fairlead_workergroup.testing import assert_no_leaks, fill_memory, hang, kill, slow


class Slotted:
    """A class whose instances cannot have other attributes."""

    __slots__ = ()

    def rank(self):
        return int(os.environ["RANK"])

    def items(self):
        yield self.rank()

    async def later(self):
        await asyncio.sleep(0)
        return self.rank()

    def wait_for(self, gate):
        while not os.path.exists(gate):
            time.sleep(0.01)


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=4) as reserved:
        yield reserved


@pytest.fixture(scope="module")
def group(cluster):
    with RayWorkerGroup(cluster, Slotted) as workers:
        yield workers


@pytest.mark.parametrize("how", ["sleep", "native", "native-gil", "stop"])
def test_hang(group, how):
    """The worker hangs when `hang` returns, and continues after `close`, which can be repeated; others continue."""
    hung = hang(group, 1, how)
    status = group.get_worker_status()[1]
    assert (status.state, status.method) == (("idle", None) if how == "stop" else ("busy", "hang"))
    call = group.call("rank")
    assert group.at(worker=slice(2, None)).call("rank", timeout=60).result() == [2, 3]
    assert call.wait(0.3) is False
    hung.close()
    hung.close()
    assert call.result(timeout=60) == [0, 1, 2, 3]
    assert repr(hung) == f"Hang(1, {how!r}, closed)"


def test_stop_during_a_call(group, gate, wait_until_running):
    """A worker is stopped in the middle of a call."""
    call = group.at(worker=0).call("wait_for", gate)
    wait_until_running(group, "wait_for", 0)
    with hang(group, 0, "stop"):
        gate.touch()
        assert not call.wait(0.3)
    call.result(timeout=60)


def test_busy(group, gate):
    """A busy worker hangs when its turn comes; after the timeout it will not hang."""
    call = group.at(worker=0).call("wait_for", gate)
    with pytest.raises(TimeoutError, match=r"rank 0 .* has not begun to hang within 0.2 s"):
        hang(group, 0, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"rank 0 .* has not done it within 0.1 s"):
        slow(group, 0, 0, timeout_s=0.1)
    gate.touch()
    call.result()
    assert group.call("rank", timeout=60).result() == [0, 1, 2, 3]
    with hang(group, 0, timeout_s=60), pytest.raises(TimeoutError):
        hang(group, 0, timeout_s=0.1)
    assert group.call("rank", timeout=60).result() == [0, 1, 2, 3]


@pytest.mark.parametrize("concurrent", [False, True])
def test_slow(cluster, concurrent):
    """Calls of all kinds take longer; a new number replaces the previous one; 0 ends it."""
    with RayWorkerGroup(cluster, Slotted, workers_per_node=2, async_communication=concurrent) as group:
        slow(group, 1, 60)
        slow(group, 1, 0.3)
        for method, result in (("rank", 1), ("later", 1), ("items", [1])):
            began = time.monotonic()
            assert group.at(worker=1).call(method, collect=(), timeout=60).result() == result
            assert time.monotonic() - began >= 0.3
        slow(group, 1, 60)
        assert group.at(worker=0).call("rank", collect=(), timeout=60).result() == 0
        slow(group, 1, 0)
        assert group.call("rank", timeout=60).result() == [0, 1]
        with hang(group, 0):
            assert group.get_worker_status()[0].method == "hang"


def test_memory(group):
    """The memory is in use, and can be released; too much memory raises the worker's error."""
    before = group.get_resource_usage()[2].rss_bytes
    assert fill_memory(group, 2, 128 << 20) is True
    assert group.get_resource_usage()[2].rss_bytes >= before + (128 << 20)
    assert fill_memory(group, 2, 0) is True
    assert group.get_resource_usage()[2].rss_bytes < before + (32 << 20)
    with pytest.raises(MemoryError):
        fill_memory(group, 2, 1 << 60)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (lambda group: kill(group, 4), IndexError, "rank 4 is out of range: the group has ranks 0 to 3"),
        (lambda group: hang(group, -1), IndexError, "rank -1 is out of range"),
        (lambda group: slow(group, "0", 1), TypeError, "rank must be an int, got '0'"),
        (lambda group: fill_memory(group, True, 1), TypeError, "rank must be an int, got True"),
        (lambda group: hang(group, 0, "never"), ValueError, "how must be one of 'sleep', .* got 'never'"),
        (lambda group: slow(group, 0, -1), ValueError, "seconds must be a number of at least 0, got -1"),
        (lambda group: fill_memory(group, 0, "1GB"), ValueError, "size_bytes must be a whole number of at least 0"),
    ],
)
def test_bad_arguments(group, fault, error, message):
    """Wrong arguments are refused, and nothing happens."""
    with pytest.raises(error, match=message):
        fault(group)
    assert {status.state for status in group.get_worker_status()} == {"idle"}


def test_kill(cluster):
    """The process has ended when `kill` returns; it can be repeated; other faults of a dead worker raise."""
    with assert_no_leaks():
        group = RayWorkerGroup(cluster, "collections.Counter", workers_per_node=2)
        pids = [status.pid for status in group.get_worker_status()]
        kill(group, 1)
        assert start_tick(pids[1]) == -1 < start_tick(pids[0])
        kill(group, 1)
        for fault in (lambda: hang(group, 1), lambda: slow(group, 1, 1)):
            with pytest.raises(WorkerFailureError, match="rank 1"):
                fault()
        assert fill_memory(group, 1, 1) is False
        assert hang(group, 0).close() is None
        group.shutdown()
        with pytest.raises(WorkerGroupError, match="shut down"):
            kill(group, 0)


def test_kill_during_a_hang(cluster):
    """A worker that is stopped or holds the GIL can be killed, and its handle can still be closed."""
    with RayWorkerGroup(cluster, Slotted, workers_per_node=2) as group:
        for rank, how in enumerate(("stop", "native-gil")):
            with hang(group, rank, how):
                kill(group, rank)
        assert [status.state for status in group.get_worker_status()] == ["dead", "dead"]

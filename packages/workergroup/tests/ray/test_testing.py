# SPDX-License-Identifier: Apache-2.0
"""The test kit: its faults are real, take effect when the function returns, and end."""

import os

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, WorkerGroupError
from fairlead_workergroup.testing import assert_no_leaks, kill, resume, stop

from ..faults import find_running


class Slotted:
    """A class whose instances cannot have other attributes."""

    __slots__ = ()

    def rank(self):
        return int(os.environ["RANK"])


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=4) as reserved:
        yield reserved


@pytest.fixture(scope="module")
def group(cluster):
    with RayWorkerGroup(cluster, Slotted) as workers:
        yield workers


def test_stop(group):
    """The worker has stopped when `stop` returns, and continues after `resume`, which can be repeated."""
    stop(group, 1)
    status = group.get_worker_status()[1]
    assert (status.state, status.method) == ("idle", None)
    call = group.call("rank")
    assert group.at(worker=slice(2, None)).call("rank", timeout=60).result() == [2, 3]
    assert call.wait(0.3) is False
    resume(group, 1)
    resume(group, 1)
    assert call.result(timeout=60) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", [kill, stop, resume])
def test_bad_ranks(group, fault):
    """Wrong ranks are refused, and nothing happens."""
    with pytest.raises(IndexError, match="rank 4 is out of range: the group has ranks 0 to 3"):
        fault(group, 4)
    with pytest.raises(TypeError, match="rank must be an int, got '0'"):
        fault(group, "0")
    assert {status.state for status in group.get_worker_status()} == {"idle"}


def test_kill(cluster):
    """The process has ended when `kill` returns; it can be repeated. A group that has ended has no workers to kill."""
    with assert_no_leaks():
        group = RayWorkerGroup(cluster, "collections.Counter", workers_per_node=2)
        pids = [status.pid for status in group.get_worker_status()]
        kill(group, 1)
        assert find_running(pids) == pids[:1]
        kill(group, 1)
        resume(group, 1)
        group.shutdown()
        for fault in (kill, stop, resume):
            with pytest.raises(WorkerGroupError, match="shut down"):
                fault(group, 0)

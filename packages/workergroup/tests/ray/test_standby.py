# SPDX-License-Identifier: Apache-2.0
"""Standbys: processes that have loaded the class's module, and take over the ranks of lost workers."""

import os
import pickle

import pytest
from rich.console import Console

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError, current_worker
from fairlead_workergroup.testing import kill

IMPORTED_WITH_RANK = os.environ.get("RANK")


class Worker:
    """A worker that says where it was imported."""

    def __init__(self, value=None):
        self.value = value

    def facts(self):
        worker = current_worker()
        return worker.rank, worker.epoch, worker.incarnation, os.environ["RANK"], self.value

    def pid(self):
        return os.getpid(), IMPORTED_WITH_RANK


class Different:
    """A class whose ranks need different variables before they start."""

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return {}, {"PYTHONHASHSEED": str(bundle_indices[1][0])}, {}


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as reserved:
        yield reserved


def lose(group, rank):
    kill(group, rank)
    with pytest.raises(WorkerFailureError):
        group.call("facts").result(timeout=60)


def test_take_over(cluster, eventually):
    """A lost rank takes the standby with its process and its slot; another one starts in the slot that is free now."""
    events = []
    builder = RayWorkerBuilder(Worker, [7])
    with (
        RayWorkerGroup(cluster, builder, workers_per_node=[2], standby=1) as group,
        group.watch(0.2, on_event=events.append),
    ):
        assert eventually(lambda: group.standby == 1)
        assert [one["bundle_index"] for one in group.standby_metadata] == [2]
        console = Console(width=120)
        with console.capture() as shown:
            console.print(cluster.grid([group]))
        assert "standby" in shown.get()
        names = [one["name"] for one in group.worker_metadata]
        lose(group, 1)
        assert group.restart_failed_workers() == [1]
        assert group.epoch == 1
        assert group.call("facts").result() == [(0, 1, 0, "0", [7]), (1, 1, 1, "1", [7])]
        assert group.call("pid").result()[1][1] is None
        assert [one["bundle_index"] for one in group.worker_metadata] == [0, 2]
        assert [one["name"] for one in group.worker_metadata] == names
        # A handle, as another process has it, finds the actors by their names.
        assert pickle.loads(pickle.dumps(group.handle())).call("facts").result() == group.call("facts").result()
        assert eventually(lambda: group.standby == 1)
        assert [one["bundle_index"] for one in group.standby_metadata] == [1]
        # A standby that dies is started again.
        ready = [event for event in events if event.kind == "standby-ready"]
        assert eventually(lambda: sum(event.kind == "standby-ready" for event in events) >= 2), ready
        for rank in (0, 1):
            lose(group, rank)
            assert group.restart_failed_workers() == [rank]
            assert eventually(lambda: group.standby == 1)
        assert group.call("pid").result()[0][1] is None
        assert sorted(one["bundle_index"] for one in (*group.worker_metadata, *group.standby_metadata)) == [0, 1, 2]
        assert group.resize(worker=3) == 4
        assert group.worker_metadata[2]["bundle_index"] == 3
        assert group.shutdown()
        assert group.standby_metadata == []
        assert group.standby == 0


def test_standbys_are_refused(cluster):
    """Nothing is launched if there is no room for standbys, or if ranks could not take each other's place."""
    for options, match in [
        ({"standby": 1}, "needs slots that the group does not use, and there are 0"),
        ({"standby": -1}, "whole number"),
        ({"standby": True}, "whole number"),
        ({"standby": 1, "bundle_indices_list": [(0, [0, 1])]}, "tied groups cannot"),
    ]:
        with pytest.raises(ValueError, match=match):
            RayWorkerGroup(cluster, Worker, **options)
    with pytest.raises(ValueError, match="rank 1 has other options"):
        RayWorkerGroup(cluster, Different, workers_per_node=[2], standby=1)
    with RayWorkerGroup(cluster, Worker) as group:
        assert group.standby == 0


def test_group_scope(cluster, eventually):
    """With scope "group" everybody restarts, and the lost rank in the standby's process."""
    with RayWorkerGroup(cluster, Worker, workers_per_node=[2], standby=2, restart_scope="group") as group:
        assert eventually(lambda: group.standby == 2)
        lose(group, 0)
        assert group.restart_failed_workers() == [0, 1]
        assert [imported for _, imported in group.call("pid").result()] == [None, "1"]
        assert eventually(lambda: group.standby == 2)

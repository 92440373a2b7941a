# SPDX-License-Identifier: Apache-2.0
"""Tests of groups over several nodes. The nodes are raylets that share one address."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from fairlead_placement import RayVirtualCluster
from fairlead_placement.extension import alive_nodes, drain_deadlines
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec, create_local_venv_on_each_node
from fairlead_workergroup import RayWorkerGroup, Restart, WorkerFailureError


class Worker:
    def where(self) -> tuple[int, str, str, str]:
        ranks = [os.environ[name] for name in ("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        return os.getpid(), ray.get_runtime_context().get_node_id(), ":".join(ranks), os.environ["MASTER_ADDR"]


@pytest.fixture
def three_nodes(joining: Cluster) -> Cluster:
    """Return a head without CPUs with two nodes of four CPUs each."""
    for _ in range(2):
        joining.add_node(num_cpus=4)
    return joining


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie. A zombie holds no resources."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def call_where(group: RayWorkerGroup) -> list[tuple[int, str, str, str]]:
    return group.get_all_worker_results(group.run_all_workers_single_data("where"))


def test_group_over_two_nodes(three_nodes):
    """Ranks follow physical order, and node ranks count the group's nodes.

    One agent holds the master port on the node of rank 0, and another one has the board, on the node of the driver.
    """
    axes = NamedSharding.from_shape(dp=2, tp=2)
    with RayVirtualCluster([2, 2], use_gpus=False) as cluster:
        slots = cluster.slots()
        assert len({slot.node_id for slot in slots}) == 2
        with RayWorkerGroup(cluster, Worker, sharding_annotations=axes) as group:
            found = call_where(group)
            assert [node_id for _, node_id, *_ in found] == [slot.node_id for slot in slots]
            assert [ranks for *_, ranks, _ in found] == ["0:0:2", "0:1:2", "1:0:2", "1:1:2"]
            assert {master for *_, master in found} == {slots[0].node_ip}
            agents = [
                row["Address"]["NodeID"]
                for row in ray._private.state.actors().values()
                if row["State"] != "DEAD" and row["ActorClassName"] == "NodeAgent"
            ]
            driver = ray.get_runtime_context().get_node_id()
            assert sorted(agents) == sorted({slots[0].node_id, driver})


def test_restart_without_free_slots(joining, monkeypatch):
    """A restart that finds no slots fails and does not count as a restart. Once a node joins, a restart succeeds."""
    for _ in range(2):
        joining.add_node(num_cpus=2)
    with (
        RayVirtualCluster([2, 2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, restart=Restart(max_restarts=1)) as group,
    ):
        gone = next(node for node in joining.worker_nodes if node.node_id == group.worker_metadata[-1]["node_id"])
        joining.remove_node(gone, allow_graceful=False)
        # Do not wait for minutes until slots become free. All else has its time: on a busy machine it takes seconds.
        replace = cluster.replace_lost_nodes
        monkeypatch.setattr(cluster, "replace_lost_nodes", lambda timeout_s: replace(timeout_s=1.0))
        deadline = time.monotonic() + 60
        while gone.node_id in alive_nodes():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(3):
            with pytest.raises(WorkerFailureError, match="could not be started again"):
                group.restart_failed_workers()
        monkeypatch.undo()
        joining.add_node(num_cpus=2)
        joining.wait_for_nodes()
        assert group.restart_failed_workers() == [2, 3]
        assert [status.restarts for status in group.get_worker_status()] == [0, 0, 1, 1]


def test_node_dies(three_nodes, eventually):
    """The workers of a dead node fail as node-lost, the others still work, and shutdown skips the dead workers."""
    with RayVirtualCluster([2, 2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        slots = cluster.slots()
        gone = slots[3].node_id
        raylet = next(node for node in three_nodes.worker_nodes if node.node_id == gone)
        os.kill(raylet.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        assert eventually(lambda: gone not in alive_nodes(), 60)
        with pytest.raises(WorkerFailureError) as caught:
            call_where(group)
        assert {failure.kind for failure in caught.value.failures} == {"node-lost"}
        assert {failure.rank for failure in caught.value.failures} <= {2, 3}
        living = ray.get([group.workers[rank].where.remote() for rank in range(2)])
        assert [node_id for _, node_id, *_ in living] == [slots[0].node_id] * 2
        assert group.shutdown() is True
        assert not any(is_running(pid) for pid, *_ in living)


def test_restart_in_new_slots(three_nodes):
    """Ranks of a lost node move to its new slots."""
    bundles = [(1, [0]), (1, [1])]
    with (
        RayVirtualCluster([2, 2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, bundle_indices_list=bundles) as group,
    ):
        gone = next(node for node in three_nodes.worker_nodes if node.node_id == call_where(group)[0][1])
        three_nodes.remove_node(gone, allow_graceful=False)
        three_nodes.add_node(num_cpus=4)
        deadline = time.monotonic() + 60
        while gone.node_id in alive_nodes():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert group.restart_failed_workers() == [0, 1]
        slots = cluster.slots()
        assert [slot.node_idx for slot in slots] == [0, 0, 1, 1]
        assert [node_id for _, node_id, *_ in call_where(group)] == [slot.node_id for slot in slots[2:]]


def test_a_draining_node(
    three_nodes: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., bool],
) -> None:
    """No environment is built on a node that drains, as a warning says."""
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path))
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        leaving, staying = (node_id for _, node_id, *_ in call_where(group))
        client = ray._private.worker.global_worker.gcs_client
        # Later than the end of the test on a busy machine: an environment is built in between.
        assert client.drain_node(leaving, 2, "maintenance", int((time.time() + 600) * 1000))[0]
        assert eventually(lambda: leaving in drain_deadlines())

        # An idle node ends as soon as it is drained, and this one has a worker.
        python = create_local_venv_on_each_node(VenvSpec(requirements=[]))
        assert Path(python).exists()
        assert [leaving[:8] in record.message for record in caplog.records if "Skipped" in record.message] == [True]
        assert create_local_venv_on_each_node(VenvSpec(requirements=[]), nodes=[staying]) == python
        with pytest.raises(ValueError, match=f"alive and not draining.*{leaving}"):
            create_local_venv_on_each_node(VenvSpec(requirements=[]), nodes=[leaving])

# SPDX-License-Identifier: Apache-2.0
"""Groups on several nodes: ranks that move, and nodes that drain or are lost."""

import os
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_workergroup import RayWorkerGroup, Timeouts, WorkerFailureError, current_worker
from fairlead_workergroup.testing import kill

from ..faults import drain_without_agents

pytestmark = pytest.mark.nightly


class Worker:
    """A worker that knows its node."""

    def where(self):
        return ray.get_runtime_context().get_node_id(), current_worker().incarnation

    def variables(self):
        names = ("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {name: os.environ[name] for name in names}


@pytest.fixture(scope="module")
def nodes(raylets):
    quiet = {"logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": 2}, [{"num_cpus": 2}] * 2, **quiet) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(nodes):
    """Yield a cluster with two slots on each node, the head, and the other nodes in the order of the slots."""
    head = ray.get_runtime_context().get_node_id()
    with RayVirtualCluster([2, 2, 2], use_gpus=False) as reserved:
        first, last = (slot.node_id for slot in reserved.slots()[::2] if slot.node_id != head)
        yield reserved, head, first, last


def start(reserved, counts, worker=Worker, **options):
    """Return a group with this number of workers on each node."""
    per_node = [counts.get(slot.node_id, 0) for slot in reserved.slots()[::2]]
    return RayWorkerGroup(reserved, worker, workers_per_node=per_node, **options)


def test_drain_of_a_node_without_an_agent(cluster, monkeypatch, caplog):
    """Ray starts no agent on a node that drains, so the processes there are not looked at, and the ranks move."""
    reserved, head, first, _ = cluster
    ends = {first}
    with start(reserved, {head: 1, first: 1}) as group:
        silent = drain_without_agents(monkeypatch, ends)
        assert group.restart([0, 1], elsewhere=True) == [0, 1]
        # Nobody asks again, as an agent is asked that may be about to go.
        assert sorted(silent) == sorted(ends)
        assert [incarnation for _, incarnation in group.call("where").result()] == [1, 1]
    assert "which drains; they end with it at the latest: not schedulable" in caplog.text


def test_facts_after_a_move(cluster):
    """When rank 0 has moved to another node, all ranks know their present places and the present master."""
    with RayWorkerGroup(cluster[0], Worker, workers_per_node=[2, 1, 0]) as group:
        port = group.master_port
        group.restart([0], elsewhere=True)
        if group.master_port == port:  # one time in 600, the other node has chosen the same port
            group.restart([0], elsewhere=True)
        nodes = [one["node_id"] for one in group.worker_metadata]
        variables = group.call("variables").result(timeout=60)
        masters = [(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in variables]
        sizes = [int(one["LOCAL_WORLD_SIZE"]) for one in variables]
        # No two ranks of a node have the same LOCAL_RANK, and each node has one NODE_RANK.
        places = {(node_id, one["LOCAL_RANK"]) for node_id, one in zip(nodes, variables, strict=True)}
        numbers = {(node_id, one["NODE_RANK"]) for node_id, one in zip(nodes, variables, strict=True)}
        expected = [nodes.count(node_id) for node_id in nodes], [(group.master_address, str(group.master_port))] * 3
        assert (len(places), len(numbers), sizes, masters) == (3, 2, *expected)


@pytest.fixture
def ends(nodes, monkeypatch):
    """Return what Ray reports, which a test changes: the lost nodes, and the ends in ms of those that drain."""
    lost, draining, list_nodes = set(), {}, ray.nodes

    def list_living():
        return [row | {"Alive": row["Alive"] and row["NodeID"] not in lost} for row in list_nodes()]

    monkeypatch.setattr(ray, "nodes", list_living)
    state = type(ray._private.state.state)
    monkeypatch.setattr(state, "get_draining_nodes", lambda _: dict(draining))
    return lost, draining


def lose(group, rank):
    kill(group, rank)
    with pytest.raises(WorkerFailureError):
        group.at(worker=rank).call("where").result(timeout=60)


def where(group):
    return [node_id for node_id, _ in group.call("where").result(timeout=60)]


def test_restart_while_nodes_drain(cluster, ends):
    """A lost rank leaves a node that drains, and moves to none that drains."""
    (reserved, head, first, last), (_, draining) = cluster, ends
    with start(reserved, {head: 2}, timeouts=Timeouts(start_s=60)) as group:
        draining[first] = 0
        lose(group, 1)
        assert group.restart_failed_workers() == [1]
        assert where(group) == [head, head]
        draining[head] = 0
        lose(group, 1)
        assert group.restart_failed_workers() == [1]
        assert where(group) == [head, last]
        draining[last] = 0
        lose(group, 1)
        with pytest.raises(WorkerFailureError, match=r"rank\(s\) 1 are lost, or Ray drains .* there are 0 that can"):
            group.restart_failed_workers()
        draining.clear()
        assert group.restart_failed_workers() == [1]
        assert where(group)[1] == last


def test_no_slot_of_a_node_that_ends(cluster, ends):
    """Starts, resizes and restarts choose no slot whose node is lost or drains."""
    (reserved, head, first, last), (lost, draining) = cluster, ends
    bad = [slot for slot in reserved.slots() if slot.node_id == first]
    with start(reserved, {head: 2}, timeouts=Timeouts(start_s=60)) as group:
        lost.add(first)
        group.resize(worker=3)
        assert where(group) == [head, head, last]
        group.restart([2], elsewhere=True)
        assert where(group) == [head, head, last]
        with pytest.raises(ResourceInsufficientError, match="is lost, or about to end because Ray drains it"):
            group.resize(worker=4, slots=bad[:1])
        lost.clear()
        draining[first] = 0
        with pytest.raises(ResourceInsufficientError, match="cannot run in bundle 0"):
            RayWorkerGroup(bad, Worker)
        group.resize(worker=2)
        with pytest.raises(ValueError, match=r"3 more worker\(s\) need as many free slots, and there are 2"):
            group.resize(worker=5)


def test_a_node_that_drains(cluster):
    """A rank leaves a node that Ray drains."""
    reserved, head, first, _ = cluster
    with start(reserved, {head: 1, first: 1}) as group:
        rank = where(group).index(first)
        client = ray._private.worker.global_worker.gcs_client
        assert client.drain_node(first, 2, "maintenance", int((time.time() + 600) * 1000))[0]
        assert group.restart([rank], elsewhere=True, timeout=60) == [rank]
        assert first not in where(group)
    ray.shutdown()  # the node cannot be used again

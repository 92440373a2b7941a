# SPDX-License-Identifier: Apache-2.0
"""The workers of a node that Ray drains move to another node before it ends."""

import time

import pytest
import ray

from fairlead_placement import PlacementError, RayVirtualCluster, spi
from fairlead_workergroup import RayWorkerGroup, current_worker
from fairlead_workergroup._lifecycle import shutdown


class Worker:
    """A worker that knows its state and its node."""

    def __init__(self):
        self.state = None

    def keep(self, state):
        self.state = state

    def hand_over(self):
        return self.state

    def take(self, state=None):
        self.state = state

    def where(self):
        return ray.get_runtime_context().get_node_id(), self.state, current_worker().incarnation


@pytest.fixture(scope="module")
def nodes(raylets):
    quiet = {"logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": 2}, [{"num_cpus": 2}] * 2, **quiet) as made:
        yield made


def test_drain_of_a_node_without_an_agent(nodes, eventually, monkeypatch, caplog):
    """Ray starts no agent on a node that drains, so the processes there are not looked at, and the ranks move."""
    head = ray.get_runtime_context().get_node_id()
    with (
        RayVirtualCluster([2, 2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, workers_per_node=1) as group,
    ):
        ends = {one["node_id"] for one in group.worker_metadata} - {head}

        silent = []

        def run_on_nodes(function, asks, **options):
            silent.extend(node_id for node_id in asks if node_id in ends)
            answers = spi.run_on_nodes(function, asks, **options)
            return answers | {node_id: PlacementError("not schedulable") for node_id in asks if node_id in ends}

        monkeypatch.setattr(shutdown, "run_on_nodes", run_on_nodes)
        monkeypatch.setattr(shutdown, "draining_nodes", lambda: frozenset(ends))
        assert group.replace([0, 1]) == 1
        # Nobody asks again, as an agent is asked that may be about to go.
        assert sorted(silent) == sorted(ends)
        assert [incarnation for *_, incarnation in group.call("where").result()] == [1, 1]
    assert "which drains; they end with it at the latest: not schedulable" in caplog.text


def test_drain(nodes, eventually):
    """The state is handed over, the other node is untouched, and calls go on."""
    head = ray.get_runtime_context().get_node_id()
    with RayVirtualCluster([2, 2, 2], use_gpus=False) as cluster:
        options = {"on_handover": "hand_over", "on_restart": "take", "on_drain": "replace"}
        with RayWorkerGroup(cluster, Worker, workers_per_node=1, **options) as group:
            group.call("keep", 7).result()
            before = group.call("where").result()
            rank, gone = next((rank, node_id) for rank, (node_id, *_) in enumerate(before) if node_id != head)
            client = ray._private.worker.global_worker.gcs_client
            assert client.drain_node(gone, 2, "maintenance", int((time.time() + 120) * 1000))[0]
            assert eventually(lambda: group.epoch == 1, 60)
            after = group.call("where").result(timeout=60)
            assert after[rank][0] != gone
            assert after[rank][1:] == (7, 1)
            others = [other for other in range(3) if other != rank]
            assert [after[other] for other in others] == [before[other] for other in others]

# SPDX-License-Identifier: Apache-2.0
"""Nodes that die, and nodes that join later: several raylets on one address."""

import os
import signal
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import PlacementTimeoutError, RayVirtualCluster


def kill(nodes: Cluster, node_id: str, eventually) -> None:
    """Kill a node without a graceful shutdown."""
    (node,) = [one for one in nodes.worker_nodes if one.node_id == node_id]
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    assert eventually(lambda: not any(row["NodeID"] == node_id and row["Alive"] for row in ray.nodes()), 60)


def where(slot):
    def here():
        return ray.get_runtime_context().get_node_id()

    strategy = PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle_index)
    return ray.get(ray.remote(num_cpus=1)(here).options(scheduling_strategy=strategy).remote(), timeout=120)


def live_groups():
    return [row["name"].split("-")[0] for row in placement_group_table().values() if row["state"] != "REMOVED"]


def test_a_lost_node_is_replaced(nodes, eventually):
    """Survivors stay usable, others are not delayed, and new slots take the places of the lost ones."""
    with RayVirtualCluster([2, 2], use_gpus=False, name="lasting") as cluster:
        before = cluster.slots()
        gone, kept = before[0].node_id, before[2].node_id
        assert cluster.replace_lost_nodes() == ()
        kill(nodes, gone, eventually)

        assert where(before[2]) == kept
        began = time.monotonic()
        with pytest.raises(PlacementTimeoutError, match=r"Waited \d+\.\d s"):
            cluster.replace_lost_nodes(timeout_s=1)  # the cluster itself holds all that is left
        assert time.monotonic() - began >= 1
        assert cluster.slots() == before

        late = nodes.add_node(num_cpus=4)
        with RayVirtualCluster([1], use_gpus=False, name="other"):  # the parked group does not delay it
            new = cluster.replace_lost_nodes()
        assert [slot.node_id for slot in new] == [late.node_id] * 2
        assert cluster.slots() == new + before[2:]
        assert [(s.node_idx, s.node_rank, s.local_rank) for s in cluster.slots()] == [
            (0, 0, 0),
            (0, 0, 1),
            (1, 1, 0),
            (1, 1, 1),
        ]
        assert [where(slot) for slot in cluster.slots()] == [late.node_id] * 2 + [kept] * 2
        assert [group.id for group in cluster.get_placement_groups()] == [
            new[0].placement_group.id,
            before[2].placement_group.id,
        ]
        assert live_groups() == ["lasting", "lasting"]  # the group that lost all its bundles is gone
        assert cluster.replace_lost_nodes() == ()

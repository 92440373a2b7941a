# SPDX-License-Identifier: Apache-2.0
"""When an autoscaler may remove a node, by the state that Ray's head reports to it."""

import pytest
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import NodeStatus

from fairlead_placement import RayVirtualCluster


def test_a_node_is_idle_again(raylets, eventually):
    """After the last cluster on a node has been shut down, nothing of it keeps an autoscaler from removing the node."""
    with raylets({"num_cpus": 0}, [{"num_cpus": 2}], logging_level="error") as nodes:
        (node,), client = nodes.worker_nodes, GcsClient(nodes.address)

        def is_idle():
            states = get_cluster_resource_state(client).node_states
            (state,) = [state for state in states if state.node_id.hex() == node.node_id]
            return state.status == NodeStatus.IDLE

        if not eventually(is_idle):
            pytest.fail("the node was not idle before")
        with RayVirtualCluster([2], use_gpus=False) as cluster:
            cluster.get_master_address_and_port()
            if not eventually(lambda: not is_idle()):
                pytest.fail("Ray did not report that the node is in use")
        assert eventually(is_idle, 3)

# SPDX-License-Identifier: Apache-2.0
"""Ray's autoscaler, of both versions, adds a node for a reservation, and removes it after the cluster is shut down.

Its provider starts raylets on this machine. A node counts as idle after 5 s.
"""

import pytest
import ray

from fairlead_placement import NodeAgent, RayVirtualCluster

# Version 1 knows nodes by this kind of id in place of their addresses.
HEAD = f"{0:05}".rjust(56, "f")
PROVIDER = """
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider as Provider
"""
IDLE_S = 5.0


@pytest.fixture(scope="module", params=[1, 2])
def autoscaler(request, raylets, run_autoscaler):
    """Return the folder of the output of an autoscaler of a cluster that has a head without room only."""
    variables = {
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
        "RAY_FAKE_CLUSTER": "1",
    }
    options = {"num_cpus": 0, "no_monitor": True, "env_vars": variables}
    with (
        raylets(options, logging_level="error", log_to_driver=False) as cluster,
        run_autoscaler(request.param, cluster.address, HEAD, PROVIDER, idle_minutes=IDLE_S / 60) as folder,
    ):
        yield folder


def workers():
    return [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["NodeID"] != HEAD]


def test_up_and_down(autoscaler, eventually):
    """A reservation gets a node that was not there, and the node goes soon after its cluster is shut down."""
    assert workers() == []
    with RayVirtualCluster([6], use_gpus=False, reserve_timeout_s=120, wait_for_nodes_s=60) as cluster:
        (node_id,) = workers()
        assert {slot.node_id for slot in cluster.slots()} == {node_id}
        cluster.get_master_address_and_port()
        assert NodeAgent(node_id).run(lambda: 1) == 1
    if not eventually(lambda: not workers(), IDLE_S + 10):
        output = [path.read_text()[-3000:] for path in autoscaler.glob("monitor*.*")]
        pytest.fail(f"the node did not go: {output}")

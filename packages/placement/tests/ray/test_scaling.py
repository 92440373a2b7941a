# SPDX-License-Identifier: Apache-2.0
"""Ray's autoscaler (version 2) adds a node on request, and removes it after the cluster there is shut down.

Its provider starts raylets on this machine, at most two of 6 CPUs. A node counts as idle after 5 s. `nox -s nightly`
runs the tests that start several nodes.
"""

import pytest
import ray
from ray.autoscaler.v2.sdk import request_cluster_resources

from fairlead_placement import RayVirtualCluster
from fairlead_placement.extension import autoscaler_is_there, run_on_nodes

# Version 1 knows nodes by this kind of id in place of their addresses.
HEAD = f"{0:05}".rjust(56, "f")
PROVIDER = """
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider as Provider
"""
IDLE_S = 5.0
# A node of this provider starts in 5 to 20 s.
NODE_S = 180.0


@pytest.fixture(scope="module")
def autoscaler(raylets, run_autoscaler, eventually):
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
        run_autoscaler(cluster.address, HEAD, PROVIDER, idle_minutes=IDLE_S / 60) as folder,
    ):
        assert eventually(autoscaler_is_there, 120)
        yield folder


def workers():
    return [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["NodeID"] != HEAD]


def test_up_and_down(autoscaler, eventually):
    """A reservation waits for a node that was requested, and the node goes soon after its cluster is shut down."""
    assert workers() == []
    # As `request_resources` does on a head whose launcher has chosen this autoscaler.
    address = ray.get_runtime_context().gcs_address
    request_cluster_resources(address, [{"resources": {"CPU": 6}}])
    with RayVirtualCluster([6], use_gpus=False, wait_for_nodes_s=NODE_S) as cluster:
        request_cluster_resources(address, [])
        (node_id,) = workers()
        assert {slot.node_id for slot in cluster.slots()} == {node_id}
        cluster.get_master_address_and_port()
        assert run_on_nodes(int, {node_id: ("1",)}) == {node_id: 1}
    # The node goes after its idle time.
    if not eventually(lambda: not workers(), IDLE_S + 10):
        output = [path.read_text()[-3000:] for path in autoscaler.glob("monitor*.*")]
        pytest.fail(f"the node did not go: {output}")

# SPDX-License-Identifier: Apache-2.0
"""A real autoscaler: whether it is noticed, the demand that it reads in Ray's state, and nodes that it may remove.

Ray's `AutoscalingCluster` stops every Ray on the machine, so the autoscaler's own process is started here instead. Its
provider launches no nodes.
"""

import threading

import pytest
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement.extension import autoscaler_is_there

# The id of the head in the provider.
HEAD = "head"
PROVIDER = """
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

class Provider(FakeMultiNodeProvider):
    def _create_node_with_resources_and_labels(self, *args):
        pass
"""


class Head:
    """A cluster of a head without room and a node of 2 CPUs, and what Ray's head reports to an autoscaler."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.client = GcsClient(cluster.address)
        (self.node,) = cluster.worker_nodes

    def demand(self):
        """Return the number of bundles of each placement group that is pending."""
        gangs = get_cluster_resource_state(self.client).pending_gang_resource_requests
        return [len(gang.requests) for gang in gangs]

    def is_idle(self):
        """Return whether an autoscaler may remove the node of 2 CPUs."""
        states = get_cluster_resource_state(self.client).node_states
        (state,) = [one for one in states if one.node_id.hex() == self.node.node_id]
        return state.status == NodeStatus.IDLE

    def is_scaled(self):
        """Return whether an autoscaler has reported its state."""
        reply = GetClusterStatusReply.FromString(self.client.get_cluster_status())
        return reply.autoscaling_state.last_seen_cluster_resource_state_version > 0


@pytest.fixture(scope="module")
def head(raylets):
    # As on Kubernetes, Ray does not start an autoscaler itself.
    variables = {"RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_NODE_TYPE_NAME": "ray.head.default"}
    options = {"num_cpus": 0, "no_monitor": True, "env_vars": variables}
    with raylets(options, [{"num_cpus": 2, "resources": {"x": 2}}], logging_level="error") as cluster:
        yield Head(cluster)


@pytest.fixture(scope="module")
def start_autoscaler(head, run_autoscaler):
    """Return a context manager that runs an autoscaler."""
    return lambda version: run_autoscaler(version, head.cluster.address, HEAD, PROVIDER, idle_minutes=10)


@pytest.fixture(scope="module")
def scaled(head, start_autoscaler, eventually):
    """Return the head while an autoscaler (version 2) runs, which has reported its state."""
    with start_autoscaler(2) as folder:
        if not eventually(head.is_scaled, 120):
            pytest.fail(f"the autoscaler does not run: {[path.read_text() for path in folder.glob('err')]}")
        yield head


class Reservation:
    """Reserves a cluster on a thread of its own."""

    def __init__(self, cluster):
        self.error = None
        self._cluster = cluster
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._cluster.reserve()
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.error = error

    def has_ended(self):
        return not self._thread.is_alive()

    def wait(self):
        self._thread.join()
        self._cluster.shutdown()


def test_version_1_is_noticed(head, start_autoscaler, eventually):
    """An autoscaler of version 1 is noticed by its status, which is removed again for the other tests."""
    assert not autoscaler_is_there()
    with start_autoscaler(1):
        assert eventually(autoscaler_is_there)
    head.client.internal_kv_del(DEBUG_AUTOSCALING_STATUS.encode(), False, None)
    assert not autoscaler_is_there()


def test_missing_nodes_are_demand(scaled, eventually):
    """What needs a new node is in Ray's pending demand until that node has joined; what has room is placed."""
    reservation = Reservation(RayVirtualCluster([2, 6], use_gpus=False, reserve_timeout_s=600))
    assert eventually(lambda: reservation.has_ended() or scaled.demand() == [6])
    assert reservation.error is None
    added = scaled.cluster.add_node(num_cpus=6)
    try:
        reservation.wait()
        assert reservation.error is None
        assert scaled.demand() == []
    finally:
        scaled.cluster.remove_node(added)


def test_no_demand_outlives_a_failure(scaled, eventually):
    """A reservation that fails at its deadline has been demand before, and is none after it."""
    reservation = Reservation(RayVirtualCluster([50], use_gpus=False, reserve_timeout_s=3))
    assert eventually(scaled.demand)
    assert eventually(reservation.has_ended)
    # Nothing else withdraws the demand later: the cluster is not dropped, and is not shut down.
    assert eventually(lambda: not scaled.demand())
    with pytest.raises(ResourceInsufficientError, match=r"Waited [3-9]\.\d s"):
        raise reservation.error


def test_a_node_is_idle_again(scaled, eventually):
    """After the last cluster on a node has been shut down, nothing of it keeps an autoscaler from removing the node."""
    if not eventually(scaled.is_idle):
        pytest.fail("the node was not idle before")
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        cluster.get_master_address_and_port()
        if not eventually(lambda: not scaled.is_idle()):
            pytest.fail("Ray did not report that the node is in use")
    assert eventually(scaled.is_idle, 3)

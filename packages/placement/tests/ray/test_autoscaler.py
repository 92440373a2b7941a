# SPDX-License-Identifier: Apache-2.0
"""A real autoscaler: whether it is noticed, the demand that it reads in Ray's state, and nodes that it may remove.

Ray's `AutoscalingCluster` stops every Ray on the machine, so the autoscaler's own process is started here instead. Its
provider launches no nodes.
"""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement._reserve import wait as _wait
from fairlead_placement.extension import autoscaler_is_there

# The id of the head in the provider.
HEAD = "head"
# How long the agents of these tests stay for further requests.
IDLE_S = 2.0
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


def test_an_autoscaler_is_noticed(scaled):
    """An autoscaler that runs and may add nodes is noticed."""
    assert autoscaler_is_there()


@pytest.mark.parametrize(("counts", "bundles"), [([6], 6), ([2, 6], 2)])
def test_missing_nodes_are_demand(scaled, eventually, counts, bundles):
    """A request that needs a new node is in Ray's pending demand, as one group, until that node has joined."""
    cluster = RayVirtualCluster(counts, use_gpus=False, reserve_timeout_s=600)
    reservation = Reservation(cluster)
    eventually(lambda: reservation.has_ended() or scaled.demand())
    assert not isinstance(reservation.error, ResourceInsufficientError), "refused at once"
    assert scaled.demand() == [bundles]
    added = scaled.cluster.add_node(num_cpus=6)
    try:
        reservation.wait()
        assert reservation.error is None
        assert scaled.demand() == []
    finally:
        scaled.cluster.remove_node(added)


def test_a_wait_for_others_is_demand(scaled, hold_group, pauses, eventually):
    """A request that the nodes could hold if others held nothing is in Ray's pending demand while it waits."""
    cluster = RayVirtualCluster([2], use_gpus=False, node_resource_constraints=[{"x": 1}], reserve_timeout_s=600)
    with hold_group([{"x": 2}]):
        reservation = Reservation(cluster)
        eventually(lambda: scaled.demand() or len(pauses) >= 5)
        shown = scaled.demand()
    reservation.wait()
    if reservation.error is not None:
        raise reservation.error
    assert shown == [2]
    assert scaled.demand() == []


def test_requests_that_wait_for_one_node_are_served_in_turn(scaled, hold_group, eventually):
    """Neither takes the node for its demand, so the first to look gets it, and the other one stays demand."""
    clusters = [
        RayVirtualCluster([2], use_gpus=False, node_resource_constraints=[{"x": 1}], reserve_timeout_s=600)
        for _ in range(2)
    ]
    with hold_group([{"x": 2}]):
        waiting = [Reservation(cluster) for cluster in clusters]
        assert eventually(lambda: scaled.demand() == [2, 2])
    assert eventually(lambda: any(one.has_ended() for one in waiting))
    waiting.sort(key=Reservation.has_ended)
    assert eventually(lambda: scaled.demand() == [2])
    assert [one.has_ended() for one in waiting] == [False, True]
    waiting[1].wait()
    waiting[0].wait()
    assert [one.error for one in waiting] == [None, None]
    assert scaled.demand() == []


@pytest.mark.parametrize(
    ("count", "passes_s", "error"),
    [
        pytest.param(50, 0, "reports that it cannot add nodes", id="infeasible"),
        pytest.param(6, 600, r"Waited 6\d\d\.\d s for nodes", id="too late"),
    ],
)
def test_no_demand_outlives_a_failure(scaled, eventually, monkeypatch, count, passes_s, error):
    """A reservation that fails has been demand before, and is none after it (seam: the clock of its wait)."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr(_wait, "time", clock)
    reservation = Reservation(RayVirtualCluster([count], use_gpus=False, reserve_timeout_s=600))
    assert eventually(scaled.demand)
    ahead[0] = passes_s
    assert eventually(reservation.has_ended)
    # Nothing else withdraws the demand later: the cluster is not dropped, and is not shut down.
    assert eventually(lambda: not scaled.demand())
    with pytest.raises(ResourceInsufficientError, match=error):
        raise reservation.error


@pytest.mark.nightly
def test_no_demand_outlives_an_interrupt(scaled, hold_group, eventually):
    """Ctrl-C ends the wait of a reservation and withdraws its demand."""

    def interrupt():
        eventually(scaled.demand)
        os.kill(os.getpid(), signal.SIGINT)

    cluster = RayVirtualCluster([2], use_gpus=False, node_resource_constraints=[{"x": 1}], reserve_timeout_s=600)
    with hold_group([{"x": 2}]):
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            cluster.reserve()
        thread.join()
        assert eventually(lambda: not scaled.demand())


def test_a_node_is_idle_again(scaled, eventually):
    """After the last cluster on a node has been shut down, nothing of it keeps an autoscaler from removing the node."""
    if not eventually(scaled.is_idle):
        pytest.fail("the node was not idle before")
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        cluster.get_master_address_and_port()
        if not eventually(lambda: not scaled.is_idle()):
            pytest.fail("Ray did not report that the node is in use")
    assert eventually(scaled.is_idle, 3)

# SPDX-License-Identifier: Apache-2.0
"""Ray's autoscaler, of both versions, adds a node for a reservation, and removes it after the cluster is shut down.

Its provider starts raylets on this machine, at most two of 6 CPUs. A node counts as idle after 5 s. `nox -s nightly`
runs the tests that start several nodes.
"""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement.extension import autoscaler_is_there, run_on_nodes

# Version 1 knows nodes by this kind of id in place of their addresses.
HEAD = f"{0:05}".rjust(56, "f")
PROVIDER = """
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider as Provider
"""
IDLE_S = 5.0
# A node of this provider starts in 5 to 20 s.
NODE_S = 180.0


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.nightly), 2])
def autoscaler(request, raylets, run_autoscaler, eventually):
    """Return the folder of the output of an autoscaler of a cluster that has a head without room only.

    Before its first report a cluster counts as one of fixed size.
    """
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
        assert eventually(autoscaler_is_there, 120)
        yield folder


def workers():
    return [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["NodeID"] != HEAD]


def test_up_and_down(autoscaler, eventually):
    """A reservation gets a node that was not there, and the node goes soon after its cluster is shut down."""
    assert workers() == []
    with RayVirtualCluster([6], use_gpus=False, reserve_timeout_s=NODE_S) as cluster:
        (node_id,) = workers()
        assert {slot.node_id for slot in cluster.slots()} == {node_id}
        cluster.get_master_address_and_port()
        assert run_on_nodes(int, {node_id: ("1",)}) == {node_id: 1}
    check_empty(autoscaler, eventually)


def check_empty(autoscaler, eventually):
    """Refuse nodes that are there after their idle time, and demand."""
    if not eventually(lambda: not workers(), IDLE_S + 10):
        output = [path.read_text()[-3000:] for path in autoscaler.glob("monitor*.*")]
        pytest.fail(f"the node did not go: {output}")
    assert demand() == []


def demand():
    """Return the number of bundles of each placement group that is pending."""
    state = get_cluster_resource_state(GcsClient(ray.get_runtime_context().gcs_address))
    return [len(gang.requests) for gang in state.pending_gang_resource_requests]


def reserve(count, timeout_s=NODE_S):
    return RayVirtualCluster([count], use_gpus=False, reserve_timeout_s=timeout_s).reserve()


@pytest.mark.nightly
def test_two_at_once(autoscaler, eventually):
    """Each of two reservations that wait gets a node; their demand is seen within 2 s, and is gone 2 s after them."""
    assert eventually(lambda: not workers(), IDLE_S + 10)
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        waiting = [pool.submit(reserve, 6) for _ in range(2)]
        assert eventually(lambda: demand() == [6, 6], 10)
        shown_s = time.monotonic() - began
        clusters = [one.result() for one in waiting]
    assert eventually(lambda: demand() == [], 2)
    nodes = [{slot.node_id for slot in cluster.slots()} for cluster in clusters]
    assert len(nodes[0] | nodes[1]) == 2
    sys.stdout.write(f"demand after {shown_s:.1f} s, both served after {time.monotonic() - began:.1f} s\n")
    for cluster in clusters:
        cluster.shutdown()
    check_empty(autoscaler, eventually)


@pytest.mark.nightly
def test_too_much(autoscaler, eventually):
    """A demand above `max_workers` fails, and so does one that no node type has; neither leaves demand or nodes."""
    for counts in ([7], [6, 6, 6]):
        with pytest.raises(ResourceInsufficientError, match=r"cannot add nodes|Waited \d+\.\d s for nodes"):
            RayVirtualCluster(counts, use_gpus=False, reserve_timeout_s=20).reserve()
    assert eventually(lambda: demand() == [], 2)
    check_empty(autoscaler, eventually)


@pytest.mark.nightly
def test_interrupt(autoscaler, eventually):
    """Ctrl-C while a node is launched leaves no demand, and the node goes when it was idle."""

    def interrupt():
        eventually(demand, 10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        reserve(6)
    thread.join()
    assert eventually(lambda: demand() == [], 2)
    eventually(workers, 20)  # it may have been launched already
    check_empty(autoscaler, eventually)


@pytest.mark.nightly
def test_a_node_that_ends_in_use(autoscaler, eventually):
    """A node that is taken back while it is used is a lost node, and its replacement is a new one."""
    with reserve(6) as cluster:
        (node_id,) = workers()
        client = GcsClient(ray.get_runtime_context().gcs_address)
        assert client.drain_node(node_id, 2, "preempted", int((time.time() + 5) * 1000))[0]
        for process in psutil.process_iter(["cmdline"]):
            if f"--node_id={node_id}" in (process.info["cmdline"] or ()):
                process.kill()  # its raylet
        assert eventually(lambda: node_id not in workers(), 90)
        slots = cluster.replace_lost_nodes(NODE_S)
        assert {slot.node_id for slot in slots} == set(workers())
    check_empty(autoscaler, eventually)


@pytest.mark.nightly
def test_extend(autoscaler, eventually):
    """A cluster that is extended gets a new node, and gives it back."""
    with reserve(6) as cluster:
        before = set(workers())
        assert cluster.extend([6], timeout_s=NODE_S) == (1,)
        (added,) = set(workers()) - before
        assert {slot.node_id for slot in cluster.slots()} == {*before, added}
        cluster.release_nodes([1])
        assert eventually(lambda: set(workers()) == before, IDLE_S + 10)
    check_empty(autoscaler, eventually)

# SPDX-License-Identifier: Apache-2.0
"""Several nodes: the node of each logical node, their order, and nodes that join later."""

import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement import (
    RayVirtualCluster,
    ResourceInsufficientError,
    lease_ports,
    release_ports,
)


@pytest.fixture(scope="module")
def cluster(raylets):
    """Start three nodes of 2, 4 and 4 CPUs, the latter with 2 GPUs.

    Their physical order is the reverse of the order in which they start.
    """
    # Domains are ordered by their lowest rank: the head's is the last.
    head = {"num_cpus": 2, "resources": {"nvlink_domain_b": 1, "topo_rank": 3}}
    workers = [
        {"num_cpus": 4, "num_gpus": 2, "resources": {"nvlink_domain_a": 1, "topo_rank": rank}} for rank in (2, 1)
    ]
    with raylets(head, workers, logging_level="warning") as made:
        yield made


@pytest.fixture
def ids(cluster):
    """Return the node ids in physical order."""
    rank = {2.0: 1, 1.0: 0}
    rows = [row for row in ray.nodes() if row["Alive"]]
    return [row["NodeID"] for row in sorted(rows, key=lambda row: rank.get(row["Resources"].get("topo_rank"), 2))]


def facts(cluster):
    return [(slot.node_idx, slot.node_id, slot.node_rank, slot.local_rank) for slot in cluster.slots()]


def test_logical_nodes_are_physical_nodes(ids):
    """Each logical node has its own physical node; slots and equal asks are in physical order."""
    with RayVirtualCluster([4, 4, 2], use_gpus=False) as cluster:
        assert facts(cluster) == [
            *((0, ids[0], 0, local) for local in range(4)),
            *((1, ids[1], 1, local) for local in range(4)),
            *((2, ids[2], 2, local) for local in range(2)),
        ]
        for group, node_id in zip(cluster.get_placement_groups(), ids, strict=True):
            assert set(placement_group_table(group)["bundles_to_node_id"].values()) == {node_id}


def test_agents(ids, agent_pids, eventually):
    """An agent is there as long as something is held on its node; on this process's own node it serves what follows."""
    own = ray.get_runtime_context().get_node_id()
    others = [node_id for node_id in ids if node_id != own]
    with RayVirtualCluster([1, 1, 1], use_gpus=False, monitor_memory=True) as cluster:
        slots = cluster.slots()
        leases = [lease for (lease,) in lease_ports(slots)]
        agents = agent_pids()
        assert len(agents) == 3
        release_ports(leases[:2])
        assert agent_pids() == agents
        release_ports(leases[2:])
    assert eventually(lambda: not agent_pids(*others))
    (agent,) = agent_pids(own)
    with lease_ports([slot for slot in slots if slot.node_id == own])[0][0]:
        assert agent_pids() == [agent]


def test_segments(ids):
    """Groups of `segment_size` logical nodes are in one topology domain, each on its own node."""
    with RayVirtualCluster([1, 0, 1], use_gpus=False, segment_size=2) as cluster:
        assert facts(cluster) == [(0, ids[0], 0, 0), (2, ids[1], 1, 0)]
    with pytest.raises(ResourceInsufficientError, match="in segments of 2 nodes of one topology domain"):
        RayVirtualCluster([1, 1, 1, 1], use_gpus=False, segment_size=2).reserve()
    assert RayVirtualCluster([1, 1, 1], use_gpus=False, segment_size=3).explain().verdict == "impossible"


def test_label_selector(ids):
    """Only matching nodes take bundles; the table shows the selector."""
    selector = {"ray.io/node-id": f"in({ids[2]}, {ids[1]})"}
    with RayVirtualCluster([2, 2], use_gpus=False, label_selector=selector) as cluster:
        assert {slot.node_id for slot in cluster.slots()} == {ids[1], ids[2]}
    other = RayVirtualCluster([2], use_gpus=False, label_selector={"accelerator": "!none", "zone": "a"})
    with pytest.raises(ResourceInsufficientError, match="on zone: a"):
        other.reserve()


def test_particular_gpus(ids, eventually):
    """A logical node gets a node on which its GPUs are free. If there is none, the error lists holders."""
    with RayVirtualCluster([1], gpu_ids=[1], name="first") as first:
        with RayVirtualCluster([2, 1], gpu_ids=[[0, 1], [0]]) as cluster:
            assert (first.slots()[0].node_id, cluster.slots()[0].node_id) == (ids[0], ids[0])
            assert [(s.node_idx, s.node_id, s.accelerator_ids) for s in cluster.slots()] == [
                (1, ids[0], ("0",)),
                (0, ids[1], ("0",)),
                (0, ids[1], ("1",)),
            ]
        with RayVirtualCluster([1, 1], gpu_ids=[[0], [0]]) as cluster:
            assert [(s.node_id, s.accelerator_ids) for s in cluster.slots()] == [(ids[0], ("0",)), (ids[1], ("0",))]
        with RayVirtualCluster([1], gpu_ids=[1], name="second") as second:
            assert second.slots()[0].node_id == ids[1]
            # Until the nodes report the reservations, all GPUs look free.
            assert eventually(lambda: ray.available_resources()["GPU"] == 2)
            with pytest.raises(ResourceInsufficientError) as caught:
                RayVirtualCluster([2], gpu_ids=[1, 0], reserve_timeout_s=0).reserve()
        for node_id in ids[:2]:
            gone = f"GPU 0, 1, requested for logical node 0, are not all free on node {node_id[:8]}"
            assert gone in caught.value.reason
        assert {holder.name.rpartition("-")[0] for holder in caught.value.report.holders} == {"first-0", "second-0"}


def test_ports_on_several_nodes(ids):
    """Each node leases its own ports. All must differ here, because the nodes share one address."""
    with RayVirtualCluster([2, 2, 2], use_gpus=False) as cluster:
        leases = [lease for of_slot in lease_ports(cluster.slots()) for lease in of_slot]
        assert [lease.node_id for lease in leases] == [node_id for node_id in ids for _ in range(2)]
        assert len({(lease.address, lease.port) for lease in leases}) == 6
        for lease in leases:
            lease.release()


def test_a_node_that_joins_later(cluster):
    """`wait_for_nodes_s` waits for a node that is joining. Without it, the request is refused with that advice."""
    with pytest.raises(ResourceInsufficientError, match=r"wait for nodes that are joining \(wait_for_nodes_s\)"):
        RayVirtualCluster([6], use_gpus=False).reserve()
    began = time.monotonic()
    with pytest.raises(ResourceInsufficientError, match=r"Waited \d+\.\d s for nodes"):
        RayVirtualCluster([6], use_gpus=False, wait_for_nodes_s=1).reserve()
    assert time.monotonic() - began >= 1

    late = RayVirtualCluster([6], use_gpus=False, wait_for_nodes_s=170)
    waiter = threading.Thread(target=late.reserve)
    waiter.start()
    node = cluster.add_node(num_cpus=6)
    try:
        waiter.join()
        assert {slot.node_id for slot in late.slots()} == {node.node_id}
    finally:
        late.shutdown()
        cluster.remove_node(node)

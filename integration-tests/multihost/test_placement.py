# SPDX-License-Identifier: Apache-2.0
"""Reservations and groups over hosts that have addresses of their own."""

from fairlead_placement import RayVirtualCluster


def places(cluster):
    return [(slot.node_idx, slot.node_ip, slot.node_rank, slot.local_rank) for slot in cluster.slots()]


def test_strict_pack(hosts):
    """Each logical node is on one host, all hosts are used, slots are in physical order."""

    def driver():
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False) as cluster:
            return places(cluster)

    ips = [f"10.77.0.{number}" for number in (5, 3, 4, 2)]
    assert hosts.drive(driver) == [(node, ip, node, local) for node, ip in enumerate(ips) for local in range(2)]

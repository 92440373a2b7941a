# SPDX-License-Identifier: Apache-2.0
"""Tests of reservations and groups over hosts with different addresses."""

import os
import socket

import pytest
from ray.util.placement_group import placement_group_table

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup


def places(cluster):
    return [(slot.node_idx, slot.node_ip, slot.node_rank, slot.local_rank) for slot in cluster.slots()]


def own_address():
    """Return the source address of this process's connections, which may differ from the address that Ray reports."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return probe.getsockname()[0]


class Worker:
    def where(self):
        return int(os.environ["RANK"]), own_address(), os.environ["MASTER_ADDR"]

    def all_reduce(self, x):
        """Return the sum over all ranks, computed by torch."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        total = torch.tensor([x])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()


@pytest.mark.nightly
def test_strict_pack(hosts, addresses):
    """Each logical node is placed on one host, all hosts are used, and slots are in physical order."""

    def driver():
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False) as cluster:
            return places(cluster)

    assert hosts.drive(driver) == [(node, ip, node, local) for node, ip in enumerate(addresses) for local in range(2)]


def test_ranks(hosts, addresses):
    """Ranks follow the topology, not the order in which hosts joined, and the first host is the master of all ranks."""

    def driver():
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
            return group.get_all_worker_results(group.run_all_workers_single_data("where"))

    expected = [(rank, addresses[rank // 2], addresses[0]) for rank in range(8)]
    assert hosts.drive(driver) == expected


@pytest.mark.nightly
def test_unified(hosts, addresses):
    """A unified reservation is one placement group with each logical node on a different host."""

    def driver():
        with RayVirtualCluster([2, 1, 2], use_gpus=False).reserve(unified=True) as cluster:
            (group,) = cluster.get_placement_groups()
            assert len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 3
            return places(cluster)

    first, second, third, _ = addresses
    assert hosts.drive(driver) == [
        (0, first, 0, 0),
        (0, first, 0, 1),
        (1, second, 1, 0),
        (2, third, 2, 0),
        (2, third, 2, 1),
    ]


def test_all_reduce(hosts, addresses):
    """torch's ranks connect over four addresses, at a master port that the group leases."""
    pytest.importorskip("torch")

    def driver():
        env_vars = {"GLOO_SOCKET_IFNAME": "eth0"}
        with (
            RayVirtualCluster([1, 1, 1, 1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, env_vars=env_vars) as group,
        ):
            where = group.get_all_worker_results(group.run_all_workers_single_data("where"))
            sums = group.get_all_worker_results(group.run_all_workers_multiple_data("all_reduce", [1.0, 2.0, 4.0, 8.0]))
            return [address for _, address, _ in where], sums, 1400 <= group.master_port <= 1999

    assert hosts.drive(driver) == (addresses, [15.0] * 4, True)

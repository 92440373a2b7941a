# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-placement as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, assert_type

from ray.util.placement_group import PlacementGroup

import fairlead_placement as placement
from fairlead_placement import PortLease, RayVirtualCluster, Slot, extension, testing


def reserve(groups: list[PlacementGroup], config: placement.ClusterConfig) -> None:
    assert_type(placement.init_ray(Path("logs"), address="local", num_cpus=4), Any)
    with RayVirtualCluster([2, 0, 2], use_gpus=False, name="small") as cluster, testing.assert_no_leaks():
        assert_type(cluster, RayVirtualCluster)
    RayVirtualCluster([2, 2], gpu_ids=[[0, 1], [2, 3]], placement_group_strategy="PACK", communication_backend="gloo")
    RayVirtualCluster([2], gpu_ids="auto", label_selector={"kind": "big"}, reserve_timeout_s=10)
    assert_type(placement.read_slots(groups, 2), tuple[Slot, ...])
    assert_type(RayVirtualCluster.from_config(config, use_gpus=False), RayVirtualCluster)
    RayVirtualCluster.from_config({"gpus_per_node": 8, "num_nodes": 2, "segment_size": None})
    RayVirtualCluster(8)  # type: ignore[arg-type]
    RayVirtualCluster([8], placement_group_strategy="TIGHT")  # type: ignore[arg-type]
    RayVirtualCluster.from_config({"num_nodes": 2})  # type: ignore[typeddict-item]


def use(cluster: RayVirtualCluster) -> None:
    assert_type(cluster.reserve(unified=True), RayVirtualCluster)
    assert_type(cluster.slots(), tuple[Slot, ...])
    assert_type(cluster.get_placement_groups(), list[PlacementGroup])
    assert_type(cluster.get_master_address_and_port(), tuple[str, int])
    assert_type(cluster.get_available_addresses_and_ports_batch([(0, 1)]), list[tuple[str, int]])
    assert_type((cluster.world_size(), cluster.node_count()), tuple[int, int])
    assert_type(cluster.replace_lost_nodes(timeout_s=60), tuple[Slot, ...])
    assert_type(cluster.print_cluster_grid(), None)
    assert_type(cluster.shutdown(), bool)


def explain(cluster: RayVirtualCluster) -> None:
    report = cluster.explain(unified=True)
    assert_type(report, placement.ReservationReport)
    assert_type(report.verdict, Literal["fits", "taken", "impossible"])
    assert_type(report.nodes, tuple[placement.Node, ...])
    assert_type(report.holders, tuple[placement.ResourceHolder, ...])
    (usage, *_) = cluster.get_resource_usage()
    assert_type(usage, placement.NodeUsage)


def lease(slots: Sequence[Slot]) -> None:
    leases = placement.lease_ports(slots, count=2, low=1400, high=1500)
    assert_type(leases, tuple[tuple[PortLease, ...], ...])
    with leases[0][0] as held:
        assert_type((held.address, held.port), tuple[str, int])
    assert_type(placement.release_ports(leases[0]), None)
    assert_type((slots[0].node_idx, slots[0].env), tuple[int, Mapping[str, str]])
    placement.lease_ports(slots[0])  # type: ignore[arg-type]
    slots[0].node_idx = 1  # type: ignore[misc]


def ask_nodes(node_id: str) -> None:
    assert_type(extension.run_on_nodes(os.getpid, {node_id: ()}, timeout_s=1), dict[str, int | Exception])
    extension.run_on_nodes("getpid", {node_id: ()})  # type: ignore[arg-type]


def order() -> None:
    topology: dict[str, tuple[str | None, float | None]] = {"a": ("x", 0), "b": (None, None)}
    assert_type(placement.select_segment_nodes(topology, segment_size=1, num_nodes=1), tuple[list[str], list[str]])
    assert_type(placement.sort_bundle_indices_by_topology([(0, "x", 0, "a"), ("1", None, None, "b")]), list[int])


def read_errors(error: Exception) -> None:
    match error:
        case placement.HeadTimeoutError():
            assert_type(error.reason, str)
        case placement.PlacementTimeoutError() | placement.ResourceInsufficientError():
            assert_type(error.report, placement.ReservationReport | None)
        case placement.PortUnavailableError():
            assert_type((error.node_ip, error.low, error.high), tuple[str, int, int])
        case placement.PlacementError():
            assert_type(error.args, tuple[Any, ...])

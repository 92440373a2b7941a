# SPDX-License-Identifier: Apache-2.0
"""What the cluster has right now, read from Ray."""

import ray
from ray.util.placement_group import placement_group_table

from ._planner import Node, physical_order
from ._ray_private import draining_nodes, free_per_node, job_of_placement_group
from ._report import Holder

__all__ = ["read_holders", "read_nodes"]


def read_nodes() -> tuple[Node, ...]:
    """The nodes that are alive and not about to go, in physical order."""
    free = free_per_node()
    leaving = draining_nodes()
    nodes = [
        Node(
            node_id=row["NodeID"],
            ip=row["NodeManagerAddress"],
            total=row["Resources"],
            # A node that has just joined is listed before it is known what is free there: nothing, until it is.
            free=free.get(row["NodeID"], {}),
            labels=row.get("Labels") or {},
        )
        for row in ray.nodes()
        if row["Alive"] and row["NodeID"] not in leaving
    ]
    return tuple(sorted(nodes, key=physical_order))


def read_holders() -> tuple[Holder, ...]:
    """The placement groups that hold resources."""
    holders = []
    for group_id, row in placement_group_table().items():
        if row["state"] == "REMOVED":
            continue
        bundles: dict[str, tuple[dict[str, float], ...]] = {}
        for index, node_id in row["bundles_to_node_id"].items():
            if node_id:
                bundles[node_id] = (*bundles.get(node_id, ()), row["bundles"][index])
        if bundles:
            holders.append(Holder(row["name"], group_id, job_of_placement_group(group_id), bundles))
    return tuple(holders)

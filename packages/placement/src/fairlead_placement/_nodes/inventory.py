# SPDX-License-Identifier: Apache-2.0
"""What the cluster has right now, read from Ray."""

from collections.abc import Mapping

import ray
from ray.util.placement_group import placement_group_table

from .._plan.model import Node
from .._plan.topology import physical_order
from .._ray_private import draining_nodes, free_per_node, job_of_placement_group, live_actors
from .._show.report import Holder

__all__ = ["alive_nodes", "read_holders", "read_nodes"]


def alive_nodes() -> frozenset[str]:
    """The ids of the nodes that Ray takes to be alive, those that are about to go included."""
    return frozenset(row["NodeID"] for row in ray.nodes() if row["Alive"])


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
    return tuple(physical_order(nodes))


def read_holders() -> tuple[Holder, ...]:
    """The placement groups that hold resources, and the actors that hold some outside of any."""
    holders = []
    for group_id, row in placement_group_table().items():
        if row["state"] == "REMOVED":
            continue
        bundles: dict[str, tuple[Mapping[str, float], ...]] = {}
        for index, node_id in row["bundles_to_node_id"].items():
            if node_id:
                bundles[node_id] = (*bundles.get(node_id, ()), row["bundles"][index])
        if bundles:
            job = job_of_placement_group(group_id)
            holders.append(Holder("placement group", row["name"], group_id, job, bundles))
    for actor in live_actors():
        # In a placement group it holds "CPU_group_...": what the group holds already.
        own = {what: amount for what, amount in actor.resources.items() if amount > 0 and "_group_" not in what}
        if own and actor.node_id:
            name = actor.name or actor.class_name
            holders.append(Holder("actor", name, actor.actor_id, actor.job_id, {actor.node_id: (own,)}))
    return tuple(holders)

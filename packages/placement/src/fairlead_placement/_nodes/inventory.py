# SPDX-License-Identifier: Apache-2.0
"""Reads from Ray's head what the cluster has right now, and who holds it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from .._model import Node
from .._plan.topology import physical_order
from .._ray_private import draining_nodes, free_per_node, job_of_placement_group, live_actors
from .._show.report import Holder
from ..exceptions import HeadTimeoutError
from .head import ask_head

# Callers that can do without an answer wait no longer.
ALIVE_S = 5.0


def alive_nodes(*, timeout_s: float | None = None) -> frozenset[str]:
    """Return the ids of the nodes that Ray considers alive, including those that are draining.

    Args:
        timeout_s: seconds that Ray's head may take; None for what is left of `head_deadline`, or for no limit.

    Raises:
        HeadTimeoutError: the head did not answer in time.
    """
    rows = ask_head("list the nodes", ray.nodes, timeout_s=timeout_s)
    return frozenset(row["NodeID"] for row in rows if row["Alive"])


def choose_alive(node_ids: Iterable[str]) -> list[str]:
    """Return the nodes that are alive; all of them if Ray's head does not answer. Their agents answer without it."""
    try:
        alive = alive_nodes(timeout_s=ALIVE_S)
    except HeadTimeoutError:
        return list(node_ids)
    return [node_id for node_id in node_ids if node_id in alive]


def read_nodes() -> tuple[Node, ...]:
    """Return the nodes that are alive and not draining, in physical order.

    Raises:
        HeadTimeoutError: Ray's head did not answer within `head_deadline`.
    """
    return ask_head("list the nodes and what is free on them", _read_nodes)


def _read_nodes() -> tuple[Node, ...]:
    free = free_per_node()
    leaving = draining_nodes()
    rows = [row for row in ray.nodes() if row["Alive"] and row["NodeID"] not in leaving]
    if free is None:
        free = _estimate_free(rows)
    return tuple(
        physical_order(
            Node(
                node_id=row["NodeID"],
                ip=row["NodeManagerAddress"],
                total=row["Resources"],
                # A node that has just joined is listed before Ray knows what is free there. Until then, nothing is.
                free=free.get(row["NodeID"], {}),
                labels=row.get("Labels") or {},
            )
            for row in rows
        )
    )


def _estimate_free(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Mapping[str, float]]:
    """Return what no placement group or actor holds on each node. Ray does not list what tasks hold."""
    free = {row["NodeID"]: Counter(row["Resources"]) for row in rows}
    for holder in _read_holders():
        for node_id, bundles in holder.bundles.items():
            for bundle in bundles if node_id in free else ():
                free[node_id].subtract(bundle)
    return free


def read_holders() -> tuple[Holder, ...]:
    """Return the placement groups that hold resources, and the actors that hold resources outside of any group.

    Raises:
        HeadTimeoutError: Ray's head did not answer within `head_deadline`.
    """
    return ask_head("list who holds resources", _read_holders)


def _read_holders() -> tuple[Holder, ...]:
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
        # An actor in a placement group holds "CPU_group_...", which the group holds already.
        own = {what: amount for what, amount in actor.resources.items() if amount > 0 and "_group_" not in what}
        if own and actor.node_id:
            name = actor.name or actor.class_name
            holders.append(Holder("actor", name, actor.actor_id, actor.job_id, {actor.node_id: (own,)}))
    return tuple(holders)

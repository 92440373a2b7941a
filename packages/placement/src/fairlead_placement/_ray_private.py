# SPDX-License-Identifier: Apache-2.0
"""Every call on Ray that is not public, each with its reason and what happens without it."""

from collections.abc import Mapping
from typing import Any

import ray

__all__ = [
    "actor_holdings",
    "autoscaler_is_there",
    "draining_nodes",
    "find_cluster",
    "free_per_node",
    "job_of_placement_group",
    "live_actors",
]


def free_per_node() -> Mapping[str, Mapping[str, float]]:
    """Free resources by node id. A resource that is used up is absent, not zero.

    `ray.available_resources()` is public but sums over the cluster, and a sum says nothing about what fits where.
    There is no other way to know, so this has no fallback.
    """
    found: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return found


def draining_nodes() -> frozenset[str]:
    """Nodes that are about to go. Without this call they look like any other and are found out when they die."""
    ask: Any = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(ask()) if ask is not None else frozenset()


def job_of_placement_group(placement_group_id: str) -> str:
    """The job that made a placement group: the last four bytes of its id (the state API says it, given a dashboard)."""
    return placement_group_id[-8:]


def find_cluster() -> str | None:
    """The `host:port` that `ray.init(address="auto")` would attach to, or None.

    Ray says it only by attaching, and attaching to a cluster that has died is tried for minutes. Without this call
    the address is "auto", and that is what happens.
    """
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:
        return "auto"
    try:
        found: str | None = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None
    return found


def actor_holdings() -> list[tuple[str, str, str, str, Mapping[str, float]]]:
    """(actor id, name or class, job, node id, what it holds) of every actor that is alive.

    No public call says what an actor holds without the dashboard. Without this one, reports name placement groups
    only, and the rest as "tasks, or actors".
    """
    try:
        from ray.core.generated.gcs_pb2 import ActorTableData
    except ImportError:
        return []
    rows = [
        ActorTableData.FromString(raw)
        for raw in ray._private.state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    ]
    return [
        (
            row.actor_id.hex(),
            row.name or row.class_name,
            row.job_id.hex(),
            row.address.node_id.hex(),
            {one.name: sum(used.quantity for used in one.resource_ids) for one in row.resource_mapping},
        )
        for row in rows
    ]


def autoscaler_is_there() -> bool:
    """Whether an autoscaler has told Ray what it may add.

    Only it reports a cluster configuration, and nothing public says so. Without this call a request that the present
    nodes cannot hold is refused at once.
    """
    ask: Any = getattr(ray._private.state.state, "get_max_resources_from_cluster_config", None)
    return ask is not None and ask() is not None


def live_actors() -> Mapping[str, tuple[str, str]]:
    """(class name, name) of every actor that is not dead, by id.

    `ray.util.state.list_actors` is public but needs the dashboard, which many clusters run without. No fallback.
    """
    return {
        actor_id: (row["ActorClassName"], row["Name"])
        for actor_id, row in ray._private.state.actors().items()
        if row["State"] != "DEAD"
    }

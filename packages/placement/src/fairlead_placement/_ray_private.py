# SPDX-License-Identifier: Apache-2.0
"""Every call on Ray that is not public, each with its reason and what happens without it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

__all__ = [
    "GpuActor",
    "draining_nodes",
    "find_cluster",
    "free_per_node",
    "gpu_actors",
    "job_of_placement_group",
    "live_actors",
    "visible_gpus",
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


def live_actors() -> Mapping[str, tuple[str, str]]:
    """(class name, name) of every actor that is not dead, by id.

    `ray.util.state.list_actors` is public but needs the dashboard, which many clusters run without. No fallback.
    """
    return {
        actor_id: (row["ActorClassName"], row["Name"])
        for actor_id, row in ray._private.state.actors().items()
        if row["State"] != "DEAD"
    }


@dataclass(frozen=True)
class GpuActor:
    """A live actor that holds GPUs: Ray's numbers of them on its node, not their ids."""

    node_id: str
    class_name: str
    name: str
    job_id: str
    group_id: str
    gpus: tuple[int, ...]


def gpu_actors() -> tuple[GpuActor, ...]:
    """The live actors that hold GPUs.

    Only the private actor table says which GPUs; the state API has amounts alone, and needs the dashboard. Without it
    no actor is named when GPUs are refused.
    """
    try:
        from ray.core.generated.gcs_pb2 import ActorTableData

        rows = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
        actors = [ActorTableData.FromString(row) for row in rows]
    except (ImportError, AttributeError, TypeError):
        return ()
    found = []
    for actor in actors:
        gpus = {
            held.index
            for resource in actor.resource_mapping
            # "GPU_group_<group>" is what an actor in a placement group holds of it.
            if resource.name == "GPU" or resource.name.startswith("GPU_group_")
            for held in resource.resource_ids
        }
        if gpus:
            found.append(
                GpuActor(
                    node_id=actor.node_id.hex(),
                    class_name=actor.class_name,
                    name=actor.name,
                    job_id=actor.job_id.hex(),
                    group_id=actor.placement_group_id.hex(),
                    gpus=tuple(sorted(gpus)),
                )
            )
    return tuple(found)


def visible_gpus() -> Callable[[], list[str] | None]:
    """A function, for a task, that tells the ids of all GPUs of its node, or None when they are 0, 1, ...

    Ray tells a process only the ids that it holds. Without this attribute the ids are taken to be 0, 1, ...
    """

    def ids() -> list[str] | None:
        visible: dict[str, list[str] | None] = getattr(
            ray._private.worker.global_worker, "original_visible_accelerator_ids", {}
        )
        return visible.get("GPU")

    return ids

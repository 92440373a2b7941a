# SPDX-License-Identifier: Apache-2.0
"""The GPUs of nodes: their ids, who holds them, and groups that hold the free ones one by one.

Ray reports the id of a GPU only to a process that holds it.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._model import Node
from .._nodes.agent import guard_groups, is_driver
from .._nodes.head import ask_head
from .._nodes.inventory import read_holders
from .._plan.topology import accelerator_order
from .._ray_private import LiveActor, live_actors, visible_gpus
from .._show.report import Holder
from .groups import PLACING_S, Reserved, create_group, remove, unique_name
from .slots import LEAST_S, accelerator_ids

Fillers = Mapping[str, Mapping[str, Reserved]]


def gpu_names(nodes: Sequence[Node], *, deadline: float) -> dict[str, tuple[str, ...]]:
    """Return the ids of all GPUs of each node, by node id, in Ray's own order.

    They are 0, 1, ..., unless the node's Ray was started with CUDA_VISIBLE_DEVICES. One short task per node reports
    them. A node that does not answer is assumed to have 0, 1, ...
    """
    counts = {node.node_id: int(node.total.get("GPU", 0)) for node in nodes}
    names = {node_id: tuple(map(str, range(count))) for node_id, count in counts.items()}
    refs = ask_head("start tasks that report GPU ids", _report_visible, [one for one, count in counts.items() if count])
    # One silent node must not use up the time of the whole reservation.
    limit_s = min(30.0, max(LEAST_S, deadline - time.monotonic()))
    answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=limit_s) if refs else ([], [])
    for ref in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # its node has gone
            visible = ray.get(ref)
            if visible:
                names[refs[ref]] = tuple(visible[: counts[refs[ref]]])
    return names


def _report_visible(node_ids: Sequence[str]) -> dict[Any, str]:
    """Start a task on each node; return the node ids by the tasks' references."""
    task = ray.remote(num_cpus=0, max_retries=0)(visible_gpus())
    return {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(): node_id
        for node_id in node_ids
    }


@contextlib.contextmanager
def hold_free_gpus(nodes: Sequence[Node], *, deadline: float) -> Iterator[Fillers]:
    """Hold every whole GPU that is free on the nodes, each in a placement group of its own, until the block ends.

    Yields the groups by node id and GPU id. The block may drop some of them earlier. All of them are gone after it,
    also if it or the start fails.

    Args:
        nodes: the nodes.
        deadline: the end of the reservation's time, as of `time.monotonic`, to read the ids.
    """
    made: list[Reserved] = []
    guard_groups()
    try:
        for node in nodes:
            for _ in range(int(node.free.get("GPU", 0))):
                bundle = {"GPU": 1.0}
                name = "" if is_driver() else unique_name("fairlead-gpu")
                group = create_group([bundle], name, nodes=[node.node_id])
                made.append(Reserved(group, (0,), (node.node_id,), (bundle,)))
        placed = _wait_until_placed(made)
        # GPUs that were free in sum but not as a whole, or that others have taken since, must not be taken later.
        there = {one.group.id for one in placed}
        drop([one for one in made if one.group.id not in there])
        held: dict[str, dict[str, Reserved]] = {node.node_id: {} for node in nodes}
        for one, ((gpu_id,),) in zip(placed, accelerator_ids(placed, deadline=deadline), strict=True):
            held[one.node_ids[0]][gpu_id] = one
        yield held
    finally:
        drop(made)


def drop(made: Sequence[Reserved]) -> None:
    """Remove groups and wait until their resources are back. Groups that are removed already are ignored."""
    remove([one.group for one in made])


def _wait_until_placed(made: Sequence[Reserved]) -> list[Reserved]:
    """Return the groups that Ray has placed, after it has placed all, or no other one for as long as one may take."""
    placed: list[Reserved] = []
    deadline = time.monotonic() + PLACING_S
    while len(placed) < len(made) and time.monotonic() < deadline:
        table = ask_head("list placement groups", placement_group_table)
        now = [one for one in made if table.get(one.group.id.hex(), {}).get("state") == "CREATED"]
        if len(now) > len(placed):
            placed, deadline = now, time.monotonic() + PLACING_S
        else:
            time.sleep(0.005)
    return placed


def held_by(node_id: str, names: Sequence[str], missing: Iterable[str], free: Iterable[str]) -> str:
    """Return a part of a sentence for each missing id: which actor or which idle reservation holds it.

    Args:
        node_id: the node.
        names: ids of all its GPUs, in Ray's order.
        missing: the ids to explain.
        free: ids that nobody holds.

    Ray reports which GPUs a live actor has, but not those of a placement group in which nothing runs. These are found
    by elimination: if several groups are idle on the node, all of them are named.
    """
    live = ask_head("list actors", live_actors)
    actors = [actor for actor in live if actor.gpus and actor.node_id == node_id]
    holders = [holder for holder in read_holders() if holder.kind == "placement group" and node_id in holder.bundles]
    groups = {holder.holder_id: holder for holder in holders}
    of_id: dict[str, list[LiveActor]] = {}
    for actor in actors:
        for index in actor.gpus:
            if index < len(names):
                of_id.setdefault(names[index], []).append(actor)
    idle = [group for group in groups.values() if _gpus(group, node_id) > _count_used(group, actors)]
    unknown = set(names) - set(of_id) - set(free)
    candidates = [f"placement group {_group(group)}, in which nothing runs" for group in idle]
    # Ray reports nothing about tasks.
    if len(unknown) > sum(_gpus(group, node_id) - _count_used(group, actors) for group in idle):
        candidates.append("a running task")
    unexplained = sorted(set(missing) & unknown, key=accelerator_order)
    parts = [
        f"id {one} is held by " + " and ".join(_actor(actor, groups.get(actor.group_id)) for actor in of_id[one])
        for one in sorted(set(missing) & set(of_id), key=accelerator_order)
    ]
    if unexplained:
        ids = ("id " if len(unexplained) == 1 else "ids ") + ", ".join(unexplained)
        parts.append(f"{ids} {'is' if len(unexplained) == 1 else 'are'} held by {' or '.join(candidates)}")
    return "; ".join(parts)


def _gpus(group: Holder, node_id: str) -> float:
    return sum(bundle.get("GPU", 0) for bundle in group.bundles[node_id])


def _count_used(group: Holder, actors: Sequence[LiveActor]) -> int:
    return len({index for actor in actors if actor.group_id == group.holder_id for index in actor.gpus})


def _actor(actor: LiveActor, group: Holder | None) -> str:
    name = f" {actor.name!r}" if actor.name else ""
    inside = "" if group is None else f" in placement group {_group(group)}"
    return f"actor {actor.class_name}{name} (job {actor.job_id}){inside}"


def _group(group: Holder) -> str:
    return f"{group.name or 'unnamed'} {group.holder_id[:8]} (job {group.job_id})"

# SPDX-License-Identifier: Apache-2.0
"""Turns placed groups into slots in physical order, with the ids of their accelerators."""

import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .._model import ACCELERATOR_TYPE, PRECISION
from .._nodes.functions import OPTIONS
from .._nodes.head import alive_nodes, ask_head, head_deadline, read_nodes
from .._plan.topology import accelerator_order
from .._ray_private import start_task
from .._slot import Slot
from ..exceptions import PlacementError, PlacementTimeoutError
from .groups import Check, Reserved, allow, read_placed

# Their ids, by the name of the resource.
Accelerators = Mapping[str, tuple[str, ...]]
# A task that reports an id gets this long, even when the reservation's own time is used up: a busy node may need a
# minute to start a process, and the resources are held by then.
LEAST_S = 60.0
# How often a wait for these tasks looks whether it should end.
LOOK_S = 0.5
NOT_SHARED = ("CPU", "object_store_memory", ACCELERATOR_TYPE)


def slots_of(
    placed: Sequence[Reserved], capacity: int, *, deadline: float, check: Check = allow, least_s: float = LEAST_S
) -> tuple[Slot, ...]:
    """Return the bundles of groups as slots in physical order.

    The deadline is for reading the ids of accelerators, which may take `least_s` in any case; `check` is called
    meanwhile, and raises if that should end.
    """
    accelerators: list[list[Accelerators]] = [[{}] * len(reserved.bundles) for reserved in placed]
    if any(bundle.keys() - {"CPU"} for reserved in placed for bundle in reserved.bundles):
        accelerators = accelerator_ids(placed, deadline=deadline, check=check, least_s=least_s)
    nodes = {node.node_id: (position, node) for position, node in enumerate(read_nodes(with_free=False))}
    if gone := {node_id for reserved in placed for node_id in reserved.node_ids} - nodes.keys():
        raise PlacementError(f"Node(s) {sorted(gone)} were lost while the cluster was being reserved. Try again.")
    ordered: list[tuple[tuple[object, ...], Slot]] = []
    for reserved, ids in zip(placed, accelerators, strict=True):
        for index, (node_idx, node_id) in enumerate(zip(reserved.node_idx, reserved.node_ids, strict=True)):
            position, node = nodes[node_id]
            # What one of several workers requests is rounded down to Ray's precision: rounded up, the last worker would
            # not fit and would stay pending. Ray takes whole CPUs only.
            shares = {
                name: math.floor(amount * PRECISION / capacity) / PRECISION
                for name, amount in reserved.bundles[index].items()
            }
            others = {name: share for name, share in shares.items() if share > 0 and not name.startswith(NOT_SHARED)}
            slot = Slot(
                placement_group=reserved.group,
                bundle_index=index,
                node_idx=node_idx,
                node_id=node_id,
                node_ip=node.ip,
                node_rank=0,
                local_rank=0,
                accelerators=ids[index],
                labels=dict(node.labels),
                worker_resources={"CPU": max(1.0, math.floor(shares.get("CPU", 0.0))), **others},
                capacity=capacity,
            )
            order = [accelerator_order(number) for numbers in ids[index].values() for number in numbers]
            ordered.append(((position, order, node_idx, len(ordered)), slot))
    return number_slots(slot for _, slot in sorted(ordered, key=operator.itemgetter(0)))


def read_slots(
    placement_groups: Sequence[PlacementGroup], max_colocated_worker_groups: int = 1, *, timeout_s: float = 180.0
) -> tuple[Slot, ...]:
    """Return the bundles of placement groups that others have made, each a logical node, as slots in physical order.

    Args:
        placement_groups: Ray's placement groups.
        max_colocated_worker_groups: how many worker groups may share the slots. Each needs a CPU of a bundle.
        timeout_s: seconds to wait until the groups are placed and their accelerators are free, whose ids are read.

    Raises:
        PlacementError: a group has been removed, or is one of another cluster.
        PlacementTimeoutError: a group was not placed, or its accelerators were not free, in time.
    """
    deadline = time.monotonic() + timeout_s
    with head_deadline(timeout_s):
        placed = read_placed(placement_groups, deadline=deadline)
        return slots_of(placed, max_colocated_worker_groups, deadline=deadline, least_s=0.0)


def number_slots(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the slots with their nodes numbered in the order of the slots, and the slots of each node."""
    on_node: dict[str, list[int]] = {}
    numbered = []
    for slot in slots:
        rank, taken = on_node.setdefault(slot.node_id, [len(on_node), 0])
        numbered.append(replace(slot, node_rank=rank, local_rank=taken))
        on_node[slot.node_id][1] += 1
    return tuple(numbered)


def accelerator_ids(
    reserved: Sequence[Reserved], *, deadline: float, check: Check = allow, least_s: float = LEAST_S
) -> list[list[Accelerators]]:
    """Return the ids of the accelerators of every bundle, by group and bundle index."""
    # Ray reports them only to a process that holds them, and refuses a request that spans bundles. So each bundle with
    # accelerators runs a short task, all at once.
    known = ray.get_runtime_context().get_accelerator_ids().keys()
    held = {
        (g, index): kinds
        for g, group in enumerate(reserved)
        for index, bundle in enumerate(group.bundles)
        if (kinds := {kind: amount for kind, amount in bundle.items() if kind in known and amount > 0})
    }
    began = time.monotonic()
    timeout_s = max(least_s, deadline - began)
    refs = ask_head("start tasks that report the ids of accelerators", _report_ids, reserved, held) if held else {}
    late = list(refs.values())
    while late and (left_s := began + timeout_s - time.monotonic()) > 0:
        _, late = ray.wait(late, num_returns=len(late), timeout=min(LOOK_S, left_s))
        if late:
            check()
            alive_nodes()  # which fails in time if the head is silent
    if late:
        raise PlacementTimeoutError(
            f"The accelerators are reserved, but {len(refs)} tasks that ask for their ids did not finish within "
            f"{timeout_s:.0f} s. The nodes may be starting processes very slowly; or others, in placement groups of "
            "theirs, use them. Wait longer (reserve_timeout_s, or timeout_s of replace_lost_nodes or read_slots), "
            "or look at the nodes."
        )
    ids = dict(zip(refs, ray.get(list(refs.values())), strict=True))
    return [[ids.get((g, index), {}) for index in range(len(group.bundles))] for g, group in enumerate(reserved)]


def _report_ids(
    reserved: Sequence[Reserved], held: Mapping[tuple[int, int], Mapping[str, float]]
) -> dict[tuple[int, int], Any]:
    """Start a task in every bundle that has accelerators; return the references by group and bundle index."""

    def read_ids() -> dict[str, tuple[str, ...]]:
        return {kind: tuple(ids) for kind, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}

    task = ray.remote(read_ids)
    return {
        (g, index): start_task(
            task,
            (),
            **OPTIONS,
            num_gpus=kinds.get("GPU", 0),
            resources={kind: amount for kind, amount in kinds.items() if kind != "GPU"},
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved[g].group, index),
        )
        for (g, index), kinds in held.items()
    }

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

from .._model import ACCELERATOR_TYPE, PRECISION, Node, check_positive
from .._nodes.functions import run_tasks
from .._nodes.head import head_deadline, read_nodes
from .._plan.topology import accelerator_order
from .._slot import Slot
from ..exceptions import PlacementError, PlacementTimeoutError
from .groups import Reserved, read_placed

# Their ids, by the name of the resource.
Accelerators = Mapping[str, tuple[str, ...]]
# A task that reports an id gets this long, even when the reservation's own time is used up: a busy node may need a
# minute to start a process, and the resources are held by then.
LEAST_S = 60.0
NOT_SHARED = ("CPU", "object_store_memory", ACCELERATOR_TYPE)


def slots_of(placed: Sequence[Reserved], capacity: int, known: Sequence[Node], *, timeout_s: float) -> tuple[Slot, ...]:
    """Return the bundles of groups as slots in physical order; the time is for the ids of accelerators.

    The nodes are read again if those that are known, in physical order, lack one.
    """
    accelerators: list[list[Accelerators]] = [[{}] * len(reserved.bundles) for reserved in placed]
    if any(bundle.keys() - {"CPU"} for reserved in placed for bundle in reserved.bundles):
        accelerators = accelerator_ids(placed, timeout_s=timeout_s)
    used = {node_id for reserved in placed for node_id in reserved.node_ids}
    present = known if used <= {node.node_id for node in known} else read_nodes()
    nodes = {node.node_id: (position, node) for position, node in enumerate(present)}
    if gone := used - nodes.keys():
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
        ValueError: `max_colocated_worker_groups` is not a positive integer.
        PlacementError: a group has been removed, or is one of another cluster.
        PlacementTimeoutError: a group was not placed, or its accelerators were not free, in time.
    """
    check_positive("max_colocated_worker_groups", max_colocated_worker_groups)
    deadline = time.monotonic() + timeout_s
    with head_deadline(timeout_s):
        placed = read_placed(placement_groups, deadline=deadline)
        return slots_of(placed, max_colocated_worker_groups, (), timeout_s=max(0.0, deadline - time.monotonic()))


def number_slots(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the slots with their nodes numbered in the order of the slots, and the slots of each node."""
    on_node: dict[str, list[int]] = {}
    numbered = []
    for slot in slots:
        rank, taken = on_node.setdefault(slot.node_id, [len(on_node), 0])
        numbered.append(replace(slot, node_rank=rank, local_rank=taken))
        on_node[slot.node_id][1] += 1
    return tuple(numbered)


def accelerator_ids(placed: Sequence[Reserved], *, timeout_s: float) -> list[list[Accelerators]]:
    """Return the ids of the accelerators of every bundle, by group and bundle index."""
    # Ray reports them only to a process that holds them, and refuses a request that spans bundles. So each bundle with
    # accelerators runs a short task, all at once.
    known = ray.get_runtime_context().get_accelerator_ids().keys()
    options: dict[tuple[int, int], dict[str, Any]] = {}
    for number, group in enumerate(placed):
        for index, bundle in enumerate(group.bundles):
            held = {kind: amount for kind, amount in bundle.items() if kind in known and amount > 0}
            place = PlacementGroupSchedulingStrategy(group.group, index)
            if held:
                gpus = held.pop("GPU", 0)
                options[number, index] = {"num_gpus": gpus, "resources": held, "scheduling_strategy": place}

    def read_ids() -> dict[str, tuple[str, ...]]:
        return {kind: tuple(ids) for kind, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}

    outcomes = run_tasks(read_ids, dict.fromkeys(options, ()), options, timeout_s=timeout_s)
    for _, error in outcomes.values():
        if isinstance(error, ray.exceptions.GetTimeoutError):
            raise PlacementTimeoutError(
                f"The accelerators are reserved, but {len(outcomes)} tasks that ask for their ids did not finish "
                f"within {timeout_s:.0f} s. The nodes may be starting processes very slowly; or others, in placement "
                "groups of theirs, use them. Wait longer (reserve_timeout_s, or timeout_s of launch, read_slots or "
                "replace_lost_nodes), or look at the nodes."
            )
        if error is not None:
            raise PlacementError(f"A node was lost while the ids of its accelerators were read. Try again: {error}")
    return [
        [outcomes.get((number, index), ({}, None))[0] for index in range(len(group.bundles))]
        for number, group in enumerate(placed)
    ]

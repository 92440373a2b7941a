# SPDX-License-Identifier: Apache-2.0
"""From placement groups to slots: in physical order, with what a worker in each needs to know."""

import math
from collections.abc import Mapping, Sequence

from .._nodes.inventory import read_nodes
from .._plan.model import PRECISION, Node
from .._slot import Slot
from ..exceptions import PlacementError
from .accelerators import accelerator_ids
from .groups import Reserved

__all__ = ["slots_of"]


def slots_of(placed: Sequence[Reserved], capacity: int, *, deadline: float) -> tuple[Slot, ...]:
    """Return the bundles of groups as slots in physical order.

    Every bundle that has accelerators is asked for their ids, until the `deadline` of the reservation.
    """
    ids = accelerator_ids(placed, deadline=deadline)
    nodes = read_nodes()
    position = {node.node_id: at for at, node in enumerate(nodes)}
    gone = {node_id for one in placed for node_id in one.node_ids} - set(position)
    if gone:
        raise PlacementError(f"Node(s) {sorted(gone)} were lost while the cluster was being reserved. Try again.")
    rows = sorted(
        (position[node_id], [_number(one_id) for one_id in ids[g][index]], one.node_idx[index], g, index)
        for g, one in enumerate(placed)
        for index, node_id in enumerate(one.node_ids)
    )
    node_rank = {at: rank for rank, at in enumerate(dict.fromkeys(row[0] for row in rows))}
    on_node = dict.fromkeys(node_rank, 0)
    slots = []
    for at, _, node_idx, g, index in rows:
        slots.append(_slot(placed[g], index, nodes[at], ids[g][index], node_idx, node_rank[at], on_node[at], capacity))
        on_node[at] += 1
    return tuple(slots)


def _number(accelerator_id: str) -> tuple[int, int, str]:
    """Sort key: ids are numbers for GPUs, but may be anything."""
    return (0, int(accelerator_id), "") if accelerator_id.isdigit() else (1, 0, accelerator_id)


def _slot(
    one: Reserved,
    index: int,
    node: Node,
    ids: tuple[str, ...],
    node_idx: int,
    node_rank: int,
    local_rank: int,
    capacity: int,
) -> Slot:
    return Slot(
        placement_group=one.group,
        bundle_index=index,
        node_idx=node_idx,
        node_id=node.node_id,
        node_ip=node.ip,
        node_rank=node_rank,
        local_rank=local_rank,
        accelerator_ids=ids,
        labels=dict(node.labels),
        worker_resources=_share(one.bundles[index], capacity),
        capacity=capacity,
    )


def _share(bundle: Mapping[str, float], capacity: int) -> dict[str, float]:
    """What one worker asks of a bundle that `capacity` workers share: a CPU, and its part of the GPU."""
    share = {"CPU": 1.0}
    if bundle.get("GPU", 0) > 0:
        # Rounded down to Ray's precision: rounded up, the last worker would not fit and would stay pending.
        share["GPU"] = math.floor(bundle["GPU"] * PRECISION / capacity) / PRECISION
    return share

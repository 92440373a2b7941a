# SPDX-License-Identifier: Apache-2.0
"""Whole slices taken from Ray, and given back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import Node, Slot
from fairlead_placement.spi import place_pinned, remove_placement_groups

from .._accelerators.config import AcceleratorConfigType
from .._accelerators.slices import SliceInfo
from .._health import gone_nodes

RETURN_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Lease:
    """A slice that is held.

    One placement group holds all hosts and, on worker 0, the head resource, which is the lock of the slice: Ray's own
    helpers request it first. Bundle i is worker i, because each bundle is pinned to its host.

    Attributes:
        slice: the slice.
        group: the placement group.
    """

    slice: SliceInfo
    group: PlacementGroup

    def slot(self, worker: int, *, node_idx: int = 0, node_rank: int = 0, local_rank: int = 0, **more: Any) -> Slot:
        """Return a host as a slot of fairlead-placement; `more` are further fields of the slot."""
        return Slot(
            placement_group=self.group,
            bundle_index=worker,
            node_idx=node_idx,
            node_id=self.slice.node_ids[worker],
            node_ip=self.slice.node_ips[worker],
            node_rank=node_rank,
            local_rank=local_rank,
            **more,
        )


def explain_busy(config: AcceleratorConfigType, one: SliceInfo, nodes: Mapping[str, Node]) -> str:
    """Return which hosts of a slice are in use; empty if the slice can be taken now."""
    busy = [
        worker
        for worker, node_id in enumerate(one.node_ids)
        if any(nodes[node_id].free.get(name, 0.0) < amount for name, amount in config.bundle(one, worker).items())
    ]
    return f"somebody else uses worker {', '.join(map(str, busy))}" if busy else ""


def take(config: AcceleratorConfigType, chosen: Sequence[SliceInfo]) -> list[Lease] | None:
    """Take all of these slices; return None, and take none, if somebody else was faster."""
    # Pinned to nodes, not to labels: a new host with the name of a lost one does not bring half of the slice back.
    groups = place_pinned(
        {
            f"fairlead-{one.slice_name}": [
                (node_id, config.bundle(one, worker)) for worker, node_id in enumerate(one.node_ids)
            ]
            for one in chosen
        }
    )
    return None if groups is None else [Lease(*lease) for lease in zip(chosen, groups, strict=True)]


def give_back(leases: Sequence[Lease] | None) -> bool:
    """Return slices and wait until Ray has their resources; False if that took too long."""
    if not leases or not ray.is_initialized():
        return True
    return remove_placement_groups([lease.group for lease in leases], timeout_s=RETURN_TIMEOUT_S)


def find_lost(leases: Sequence[Lease], quarantined: Collection[str]) -> list[Lease]:
    """Return the leases with a host that is gone or quarantined, and those that Ray has removed."""
    bad = gone_nodes(node_id for lease in leases for node_id in lease.slice.node_ids) | frozenset(quarantined)
    return [
        lease
        for lease in leases
        if bad.intersection(lease.slice.node_ids) or placement_group_table(lease.group).get("state") != "CREATED"
    ]

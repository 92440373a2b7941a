# SPDX-License-Identifier: Apache-2.0
"""The value that crosses package borders: a place for one worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A reserved bundle, with what a worker in it needs to know.

    Attributes:
        placement_group: the Ray placement group that holds the bundle.
        bundle_index: Ray's own index of the bundle in that group (not a physical order).
        node_idx: number of the logical node (index into the cluster's `bundle_ct_per_node_list`).
        node_id: Ray's id of the physical node, hexadecimal.
        node_ip: address of the physical node.
        node_rank: number of the physical node among those of the cluster, 0.. in physical order.
        local_rank: number of the slot on its physical node, 0.. in physical order.
        accelerators: ids of the accelerators of the bundle, by the name of the resource, as Ray names them.
        labels: labels of the physical node.
        worker_resources: what one worker here requests from Ray, such as `{"CPU": 1, "GPU": 0.5}`.
        capacity: how many worker groups may share the slot.
        env: variables that every process in this slot must have.
    """

    placement_group: PlacementGroup
    bundle_index: int
    node_idx: int
    node_id: str
    node_ip: str
    node_rank: int
    local_rank: int
    accelerators: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    worker_resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    capacity: int = 1
    env: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def accelerator_ids(self) -> tuple[str, ...]:
        """The ids of all its accelerators; empty on CPU."""
        return tuple(number for ids in self.accelerators.values() for number in ids)

    @property
    def key(self) -> tuple[str, int]:
        """The bundle, as the id of its placement group and its index there."""
        return self.placement_group.id.hex(), self.bundle_index

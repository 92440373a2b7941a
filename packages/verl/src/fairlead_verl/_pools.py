# SPDX-License-Identifier: Apache-2.0
"""verl's resource pools over reservations of Fairlead."""

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

from ray.util.placement_group import PlacementGroup
from verl.plugin.platform import get_platform
from verl.single_controller.ray import base

from fairlead_placement import RayVirtualCluster, Slot, read_slots

# The slots of each placement group, in physical order, and its cluster, which holds the reservation if this process has
# made it. verl merges and splits pools by their placement groups alone, and never releases them.
_known: dict[str, tuple[RayVirtualCluster | None, list[Slot]]] = {}


def remember(cluster: RayVirtualCluster) -> None:
    """Keep the slots of a cluster by their placement groups."""
    for slot in cluster.slots():
        _known.setdefault(slot.key[0], (cluster, []))[1].append(slot)


def refuse(reason: str) -> NoReturn:
    """Raise the error for an option of verl that this package cannot provide."""
    raise NotImplementedError(
        f"fairlead-verl {reason}. Set FAIRLEAD_VERL=0 to use verl's own classes. On a cluster that already runs, set "
        "it in Ray's runtime_env: \"+ray_kwargs.ray_init.runtime_env.env_vars.FAIRLEAD_VERL='0'\"."
    )


def refuse_detached(what: str) -> NoReturn:
    """Raise the error for what shall outlive the driver."""
    refuse(f"has no {what}: its reservations and workers end with the process that made them")


def read_seconds(variable: str, default: float) -> float:
    """Return the seconds that an environment variable sets, as verl has no argument for them."""
    value = os.environ.get(variable, "")
    try:
        return float(value or default)
    except ValueError:
        raise ValueError(f"{variable} must be a number of seconds, got {value!r}.") from None


class RayResourcePool(base.RayResourcePool):  # type: ignore[misc]
    """verl's pool. A reservation that fails explains why, and bundles are in physical order."""

    pgs: list[PlacementGroup] | None

    def get_placement_groups(
        self, strategy: Any = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Return the placement groups, one for each node, in physical order. Reserves."""
        if self.pgs is None:
            if self.detached:
                refuse_detached("detached pools")
            accelerated = self.use_gpu and self.accelerator_type
            cluster = RayVirtualCluster(
                list(self.store),
                accelerators={get_platform().ray_resource_name(): 1} if self.use_gpu else {},
                max_colocated_worker_groups=self.max_colocate_count,
                name=name or self.name_prefix,
                placement_group_strategy=strategy,
                node_resource_constraints=[{self.accelerator_type: 1e-4}] * len(self.store) if accelerated else None,
                reserve_timeout_s=read_seconds("FAIRLEAD_VERL_RESERVE_TIMEOUT_S", 180.0),
            )
            remember(cluster)
            # In physical order, and each in a place of `store` with its number of bundles.
            by_size = defaultdict[int, list[PlacementGroup]](list)
            for group in {slot.key[0]: slot.placement_group for slot in cluster.slots()}.values():
                by_size[len(_known[group.id.hex()][1])].append(group)
            self.pgs = [by_size[count].pop(0) for count in self.store]
        return self.pgs


class SubRayResourcePool(RayResourcePool):
    """A part of a pool: some bundles of its placement groups."""

    def __init__(
        self,
        placement_groups: Iterable[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pgs = list(placement_groups)
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size

    @property
    def world_size(self) -> int:
        """The number of its bundles."""
        return self.subgroup_world_size


def slots_of(pool: Any) -> list[Slot]:
    """Return the slots of a pool whose placement groups exist."""
    slots: list[Slot] = []
    for count, group in zip(pool.store, pool.get_placement_groups(), strict=True):
        if group.id.hex() not in _known:
            _known[group.id.hex()] = None, list(read_slots([group], pool.max_colocate_count))
        slots += _known[group.id.hex()][1][:count]
    if isinstance(pool, SubRayResourcePool):
        return slots[pool.start_bundle_index :][: pool.subgroup_world_size]
    return slots

# SPDX-License-Identifier: Apache-2.0
"""Placement groups of slices, and the request for missing slices. The only module that knows how Ray reserves slices.

One group holds a slice: bundle i is pinned to the node of TPU worker i, and the bundle of worker 0 has the slice's head
resource, by which Ray's own `SlicePlacementGroup` also takes slices. Ray places the whole group or nothing of it.

- **A slice is lost.** Ray parks the group, and looks for no other nodes. The pool sees it as a loss (`is_intact`),
  removes the group, and takes another slice.
- **Two jobs want the same slices.** Both choose free slices in the order of their names, so the job that gets the first
  one gets the others too. The groups of the other job find no room: all of them are removed, and the job waits until as
  many slices as it needs are free. While it waits it takes nothing, so no two jobs wait for each other's slices.
- **An autoscaler is to bring a slice.** While slices are missing, and only if an autoscaler is there, `Demand` requests
  one group with the bundle of worker 0 of every slice that the pool does not hold, even of free ones. Ray cannot place
  a part of it, so it takes none of the free ones, and an autoscaler sees how many are missing beside them. The head
  resource makes it add whole slices. Once Ray has placed the group, all slices have come: the group is removed,
  and they are taken like any others. A `SlicePlacementGroup` would hold the free slices during the wait.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from fairlead_placement import (
    PlacementError,
    PortLease,
    Slot,
    extension,
    lease_ports,
    release_ports,
)

from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._slices import SliceInfo

logger = logging.getLogger(__name__)
_RELEASE_S = 10.0
# The other hosts of a slice join later than worker 0, so a request that was met is repeated only after this time.
_REPEAT_S = 60.0


@dataclass(frozen=True)
class Lease:
    """A slice that is held by one placement group: bundle i is worker i."""

    slice: SliceInfo
    group: PlacementGroup
    port: PortLease  # of the coordinator of the slice, on worker 0


def make_slots(leases: Sequence[Lease]) -> list[Slot]:
    """Return every host, in the order of slices and TPU worker ids, without the ranks that `number_slots` gives."""
    return [
        _make_slot(lease.slice, lease.group, number, worker)
        for number, lease in enumerate(leases)
        for worker in range(lease.slice.num_hosts)
    ]


def _make_slot(place: SliceInfo, group: PlacementGroup, number: int = 0, worker: int = 0) -> Slot:
    return Slot(
        placement_group=group,
        bundle_index=worker,
        node_idx=number,
        node_id=place.node_ids[worker],
        node_ip=place.node_ips[worker],
        node_rank=0,
        local_rank=0,
    )


def take(config: AcceleratorConfigType, chosen: Sequence[SliceInfo]) -> list[Lease] | None:
    """Take all of these slices, with ports; return None, and take none, if somebody else was faster.

    Raises:
        PlacementError: the ports could not be leased, in most cases because a host is lost. Nothing is taken then.
    """
    wanted = {
        f"fairlead-{place.slice_name}": [
            (node_id, config.bundle(place, worker)) for worker, node_id in enumerate(place.node_ids)
        ]
        for place in chosen
    }
    with extension.head_deadline():
        groups = extension.place_pinned(wanted)
    if groups is None:
        return None
    try:
        ports = lease_ports([*map(_make_slot, chosen, groups)])
    except BaseException:
        extension.remove_placement_groups(groups)
        raise
    return [Lease(place, group, port) for place, group, (port,) in zip(chosen, groups, ports, strict=True)]


def give_back(leases: Sequence[Lease]) -> bool:
    """Return slices and ports, and wait until Ray has the resources of the slices; False if that took too long."""
    try:
        release_ports([lease.port for lease in leases], timeout_s=_RELEASE_S)
    except PlacementError as error:  # The host may be lost before Ray knows; otherwise it releases its ports later.
        logger.debug("Ports were not released in time: %s", error)
    finally:
        returned = extension.remove_placement_groups([lease.group for lease in leases])
    return returned


def is_intact(group: PlacementGroup) -> bool:
    """Return whether a group is placed on all its nodes, as far as Ray knows; HeadTimeoutError like all requests."""
    row: dict[str, Any] = extension.ask_head("look at a placement group", placement_group_table, group) or {}
    return row.get("state") == "CREATED"


class Demand:
    """The request for missing slices, or for room for workers, that an autoscaler sees."""

    def __init__(self, config: AcceleratorConfigType) -> None:
        self._config = config
        self._group: list[PlacementGroup] = []  # one, or none
        self._next_at = 0.0

    def update(self, count: int) -> None:
        """Request `count` slices, if there is an autoscaler, or withdraw the request if it is met."""
        with extension.head_deadline():
            if self._group:
                if is_intact(self._group[0]):
                    self.withdraw()
                    self._next_at = time.monotonic() + _REPEAT_S
            elif time.monotonic() >= self._next_at:
                undo = extension.remove_placement_groups
                self._group = extension.ask_head("request slices", self._create, count, undo=undo)

    def _create(self, count: int) -> list[PlacementGroup]:
        if not extension.autoscaler_is_there():
            return []
        config = self._config
        count *= 1 if isinstance(config, TpuAcceleratorConfig) else config.worker_count
        name = f"fairlead-wanted-{uuid.uuid4().hex[:8]}"
        return [placement_group([config.bundle(None, worker=0)] * count, name=name)]

    def withdraw(self) -> None:
        """Request nothing any more. Can be repeated."""
        group, self._group = self._group, []
        with extension.head_deadline():
            extension.remove_placement_groups(group)

# SPDX-License-Identifier: Apache-2.0
"""Whole slices taken from Ray, and given back."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from fairlead_placement import Node
from fairlead_placement.spi import autoscaler_is_there, place_pinned, remove_placement_groups

from .._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import TYPE, WORKER_ID, SliceInfo
from .._health import Head
from ..exceptions import HeadUnreachableError

__all__ = ["Demand", "Lease", "fits", "give_back", "take"]

logger = logging.getLogger(__name__)
_RETURNED_S = 15.0


@dataclass(frozen=True)
class Lease:
    """A slice that is held.

    One placement group holds all hosts and, on worker 0, the head resource, which is the slice's lock: whoever goes by
    Ray's own helpers asks for it first. Bundle i is worker i, because each bundle is pinned to its host.

    Attributes:
        slice: the slice.
        group: the placement group.
        bundles: what it holds on each host.
    """

    slice: SliceInfo
    group: PlacementGroup
    bundles: tuple[Mapping[str, float], ...] = field(hash=False)


def fits(config: AcceleratorConfigType, one: SliceInfo, free: Mapping[str, Node]) -> str:
    """Who is in the way of taking a slice: nothing if it can be taken now."""
    busy = [
        worker
        for worker, node_id in enumerate(one.node_ids)
        if any(free[node_id].free.get(name, 0.0) < amount for name, amount in config.bundle(one, worker).items())
    ]
    return f"somebody else uses worker {', '.join(map(str, busy))}" if busy else ""


def take(config: AcceleratorConfigType, chosen: Sequence[SliceInfo]) -> list[Lease] | None:
    """Take slices, or none: None if somebody was faster."""
    bundles = [tuple(config.bundle(one, worker) for worker in range(one.num_hosts)) for one in chosen]
    # Pinned to nodes rather than to labels: a new host that takes a lost one's name does not bring half of it back.
    groups = place_pinned(
        {
            f"fairlead-{one.slice_name}": list(zip(one.node_ids, held, strict=True))
            for one, held in zip(chosen, bundles, strict=True)
        }
    )
    if groups is None:
        return None
    return [Lease(*lease) for lease in zip(chosen, groups, bundles, strict=True)]


def give_back(leases: Sequence[Lease]) -> bool:
    """Return slices, and wait until Ray has them; False if that took too long."""
    if not leases or not ray.is_initialized():
        return True
    return remove_placement_groups([lease.group for lease in leases], timeout_s=_RETURNED_S)


class Demand:
    """Shows an autoscaler what is missing: a group for each slice, on hosts of its type, whatever their slice.

    Nothing is to be placed in them. As soon as one is placed its hosts are there, and it is withdrawn.
    """

    def __init__(self, config: AcceleratorConfigType, head: Head) -> None:
        self._config = config
        self._head = head
        self._groups: list[PlacementGroup] = []

    def show(self, count: int) -> None:
        """Ask for `count` more slices; again if those that were asked for have come.

        Raises:
            HeadUnreachableError: the head did not answer in time.
        """
        self._head.ask(self._show, count)

    def _show(self, count: int) -> None:
        if not autoscaler_is_there():
            return
        ready = [group.ready() for group in self._groups]
        placed, _ = ray.wait(ready, num_returns=len(ready), timeout=0) if ready else ([], [])
        come = [group for group, ref in zip(self._groups, ready, strict=True) if ref in placed]
        self._groups = [group for group in self._groups if group not in come]
        remove_placement_groups(come, timeout_s=_RETURNED_S)
        for _ in range(count - len(self._groups) - len(come)):
            self._groups.append(self._ask())

    def _ask(self) -> PlacementGroup:
        config = self._config
        workers = range(config.hosts_per_slice)
        bundles = [config.bundle(config.nominal(), worker) for worker in workers]
        selectors = None
        if isinstance(config, TpuAcceleratorConfig):
            selectors = [{TYPE: config.kind, WORKER_ID: str(worker)} for worker in workers]
        name = f"fairlead-wanted-{config.kind}-{uuid.uuid4().hex[:8]}"
        return placement_group(bundles, strategy="PACK", name=name, bundle_label_selector=selectors)

    def withdraw(self) -> None:
        """Ask for nothing more. Can be repeated.

        Raises:
            HeadUnreachableError: the head did not answer in time.
        """
        groups, self._groups = self._groups, []
        if groups and ray.is_initialized():
            self._head.ask(lambda: remove_placement_groups(groups, timeout_s=_RETURNED_S))

    def __enter__(self) -> "Demand":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.withdraw()
        except HeadUnreachableError as error:  # the reason for which the wait ends is the one to raise
            logger.warning("Placement groups that ask an autoscaler for %s may be left: %s", self._config.kind, error)

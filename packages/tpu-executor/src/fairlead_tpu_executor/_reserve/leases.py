# SPDX-License-Identifier: Apache-2.0
"""Whole slices taken from Ray and given back, and their ports."""

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import (
    HeadTimeoutError,
    PlacementError,
    PortLease,
    PortUnavailableError,
    Slot,
    lease_ports,
    release_ports,
)
from fairlead_placement.extension import place_pinned, remove_placement_groups

from .._accelerators.config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import SliceInfo
from .._health import gone_nodes, silent_nodes

RETURN_TIMEOUT_S = 15.0
_RELEASE_S = 10.0


class HostLostError(Exception):
    """Hosts were lost while they were taken: dead or draining for Ray, or silent. None if only the head was silent."""

    def __init__(self, node_ids: Collection[str]) -> None:
        super().__init__(node_ids)
        self.node_ids = node_ids


@dataclass(frozen=True)
class Lease:
    """A slice that is held by one placement group: bundle i is worker i, and that of worker 0 has the slice's lock."""

    slice: SliceInfo
    group: PlacementGroup
    port: PortLease  # of the coordinator of the slice, on worker 0


@dataclass(frozen=True)
class Held:
    """The slices of a pool and their ports at one time. A change makes a new value."""

    leases: tuple[Lease, ...] = ()
    megascale: PortLease | None = None  # of the coordinator of several slices

    @cached_property
    def slices(self) -> tuple[SliceInfo, ...]:
        return tuple(lease.slice for lease in self.leases)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every host, in the order of slices and TPU worker ids, without the ranks that `number_slots` gives."""
        return tuple(
            _make_slot(lease.slice, lease.group, at, worker)
            for at, lease in enumerate(self.leases)
            for worker in range(lease.slice.num_hosts)
        )

    @cached_property
    def first_hosts(self) -> tuple[int, ...]:
        """The number of hosts before each slice, and at the end the number of all hosts."""
        return tuple(itertools.accumulate((each.num_hosts for each in self.slices), initial=0))


def _make_slot(one: SliceInfo, group: PlacementGroup, at: int, worker: int) -> Slot:
    return Slot(
        placement_group=group,
        bundle_index=worker,
        node_idx=at,
        node_id=one.node_ids[worker],
        node_ip=one.node_ips[worker],
        node_rank=0,
        local_rank=0,
    )


def take(config: AcceleratorConfigType, chosen: Sequence[SliceInfo]) -> list[Lease] | None:
    """Take all of these slices, with ports; return None, and take none, if somebody else was faster.

    Raises:
        HostLostError: a host on which a port was requested was lost meanwhile. Nothing is taken then.
    """
    # Pinned to nodes, not to labels: a new host with the name of a lost one does not bring half of the slice back.
    bundles = [[(node_id, config.bundle(one, worker)) for worker, node_id in enumerate(one.node_ids)] for one in chosen]
    groups = place_pinned(dict(zip([f"fairlead-{one.slice_name}" for one in chosen], bundles, strict=True)))
    if groups is None:
        return None
    try:
        ports = _lease([_make_slot(*each, at=0, worker=0) for each in zip(chosen, groups, strict=True)])
    except BaseException:
        remove_placement_groups(groups, timeout_s=RETURN_TIMEOUT_S)
        raise
    return [Lease(one, group, port) for one, group, (port,) in zip(chosen, groups, ports, strict=True)]


def _lease(slots: Sequence[Slot], **ports: Any) -> tuple[tuple[PortLease, ...], ...]:
    """Lease a port on the node of each slot; `HostLostError` if that fails because a node is lost."""
    try:
        return lease_ports(slots, **ports)
    except PlacementError as error:
        if isinstance(error, PortUnavailableError):
            raise
        node_ids = {slot.node_id for slot in slots}
        lost = gone_nodes(node_ids) | silent_nodes(node_ids)
        if not lost and not isinstance(error, HeadTimeoutError):
            raise
        raise HostLostError(lost) from error


def give_back(leases: Sequence[Lease] | None, megascale: PortLease | None = None) -> bool:
    """Return slices and ports, and wait until Ray has the resources of the slices; False if that took too long."""
    leases = leases or ()
    try:
        release(*(lease.port for lease in leases), megascale)
    finally:
        returned = remove_placement_groups([lease.group for lease in leases], timeout_s=RETURN_TIMEOUT_S)
    return returned


def release(*ports: PortLease | None) -> None:
    # A silent host may be lost before Ray knows. A host that is not lost releases its ports later.
    with contextlib.suppress(PlacementError):
        release_ports([port for port in ports if port is not None], timeout_s=_RELEASE_S)


def find_lost(leases: Sequence[Lease], quarantined: Collection[str]) -> list[Lease]:
    """Return the leases with a host that is gone or quarantined, and those that Ray has removed."""
    bad = gone_nodes([node_id for lease in leases for node_id in lease.slice.node_ids]).union(quarantined)
    return [
        lease
        for lease in leases
        if bad.intersection(lease.slice.node_ids) or placement_group_table(lease.group).get("state") != "CREATED"
    ]


def megascale_port(config: AcceleratorConfigType, driver: Mapping[str, str]) -> int:
    """Return the port of the coordinator of several slices: the configuration's, else `COORD_PORT`, else 8081."""
    if isinstance(config, TpuAcceleratorConfig) and config.megascale_port is not None:
        return config.megascale_port
    text = config.env_vars.get("COORD_PORT") or driver.get("COORD_PORT") or str(MEGASCALE_DEFAULT_PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"COORD_PORT must be a port, 1 to 65535, got {text!r}.")
    return int(text)


def replace_megascale(held: Held, port: int | None) -> PortLease | None:
    """Release the port of the coordinator of several slices, and lease another one where it is needed.

    Raises:
        HostLostError: its host was lost meanwhile.
    """
    release(held.megascale)
    if port is None:
        return None
    slot = held.slots[0]
    try:
        return _lease([slot], low=port, high=port)[0][0]
    except PortUnavailableError as error:
        error.add_note(
            f"The coordinator of several slices needs port {port} on {slot.node_ip}, which another process has. Find "
            f"it there (ss -tlnp 'sport = :{port}') and end it, or choose another port (megascale_port, COORD_PORT)."
        )
        raise

# SPDX-License-Identifier: Apache-2.0
"""Slices that are held, and the ports of their coordinators."""

import itertools
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ray.util.placement_group import PlacementGroup

from fairlead_placement import (
    PlacementError,
    PortLease,
    PortUnavailableError,
    Slot,
    extension,
    lease_ports,
    release_ports,
)

from . import _groups
from ._config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from ._slices import SliceInfo

logger = logging.getLogger(__name__)
_RELEASE_S = 10.0
# The kernel keeps a port busy for 60 s after a server on it has closed a connection (TIME_WAIT).
_CLOSED_S = 62.0
_CONNECT_S = 1.0


@dataclass(frozen=True)
class Lease:
    """A slice that is held by one placement group: bundle i is worker i."""

    slice: SliceInfo
    group: PlacementGroup
    port: PortLease  # of the coordinator of the slice, on worker 0


@dataclass(frozen=True)
class Held:
    """The slices of a pool and their ports at one time. A change makes a new value."""

    leases: tuple[Lease, ...] = ()
    megascale: PortLease | None = None  # of the coordinator of several slices

    @property
    def slices(self) -> tuple[SliceInfo, ...]:
        return tuple(lease.slice for lease in self.leases)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every host, in the order of slices and TPU worker ids, without the ranks that `number_slots` gives."""
        return tuple(
            _make_slot(lease.slice, lease.group, number, worker)
            for number, lease in enumerate(self.leases)
            for worker in range(lease.slice.num_hosts)
        )

    @cached_property
    def first_hosts(self) -> tuple[int, ...]:
        """The number of hosts before each slice, and at the end the number of all hosts."""
        return tuple(itertools.accumulate((place.num_hosts for place in self.slices), initial=0))


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
    groups = _groups.hold(config, chosen)
    if groups is None:
        return None
    try:
        ports = lease_ports([*map(_make_slot, chosen, groups)])
    except BaseException:
        _groups.remove(groups)
        raise
    return [Lease(place, group, port) for place, group, (port,) in zip(chosen, groups, ports, strict=True)]


def give_back(leases: Sequence[Lease], megascale: PortLease | None = None) -> bool:
    """Return slices and ports, and wait until Ray has the resources of the slices; False if that took too long."""
    try:
        release(*(lease.port for lease in leases), megascale)
    finally:
        returned = _groups.remove([lease.group for lease in leases])
    return returned


def release(*ports: PortLease | None) -> None:
    try:
        release_ports([port for port in ports if port is not None], timeout_s=_RELEASE_S)
    except PlacementError as error:  # The host may be lost before Ray knows; otherwise it releases its ports later.
        logger.debug("Ports were not released in time: %s", error)


def find_lost(leases: Sequence[Lease], dead: Collection[str]) -> list[Lease]:
    """Return the leases with a host that is dead, draining or replaced, and those that Ray has removed."""
    present = {node.node_id for node in extension.read_nodes(with_free=False)}.difference(dead)
    return [
        lease
        for lease in leases
        if not present.issuperset(lease.slice.node_ids) or not _groups.is_intact(lease.group, lease.slice)
    ]


def megascale_port(config: AcceleratorConfigType, driver: Mapping[str, str]) -> int:
    """Return the port of the coordinator of several slices: the configuration's, else `COORD_PORT`, else 8081."""
    if isinstance(config, TpuAcceleratorConfig) and config.megascale_port is not None:
        return config.megascale_port
    text = config.env_vars.get("COORD_PORT") or driver.get("COORD_PORT") or str(MEGASCALE_DEFAULT_PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"COORD_PORT must be a port, 1 to 65535, got {text!r}.")
    return int(text)


def lease_megascale(lease: Lease, port: int, check_open: Callable[[], None]) -> PortLease:
    """Lease the port of the coordinator of several slices on worker 0 of a slice.

    If no process listens on the port, its last server may have closed connections, and the kernel frees the port within
    a minute. This waits for that.
    """
    until = time.monotonic() + _CLOSED_S
    while True:
        check_open()
        try:
            return lease_ports([_make_slot(lease.slice, lease.group)], low=port, high=port)[0][0]
        except PortUnavailableError as error:
            address = lease.slice.ip_address
            is_served = bool(error.leased) or _is_served(address, port)
            if is_served or time.monotonic() >= until:
                waited = "" if is_served else f", for {_CLOSED_S:g} s, although no process listens there"
                error.add_note(
                    f"The coordinator of several slices needs port {port} on {address}, which was taken{waited}. Find "
                    f"its user there (ss -tanp 'sport = :{port}') and end it, or choose another port (megascale_port, "
                    "COORD_PORT)."
                )
                raise
        time.sleep(1.0)


def _is_served(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False

# SPDX-License-Identifier: Apache-2.0
"""Whole slices taken from Ray and given back, and their ports."""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import (
    Node,
    PlacementError,
    PortLease,
    PortUnavailableError,
    Slot,
    lease_ports,
    release_ports,
)
from fairlead_placement.spi import place_pinned, remove_placement_groups

from .._accelerators.config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import SliceInfo
from .._health import gone_nodes

RETURN_TIMEOUT_S = 15.0
_RELEASE_S = 10.0


@dataclass(frozen=True)
class Lease:
    """A slice that is held by one placement group: bundle i is worker i, and that of worker 0 has the slice's lock."""

    slice: SliceInfo
    group: PlacementGroup


@dataclass(frozen=True)
class Held:
    """The slices of a pool and their ports at one time. A change makes a new value."""

    leases: tuple[Lease, ...] = ()
    # By slice and requested port; None is any port, for the coordinator of the slice.
    ports: Mapping[tuple[Lease, int | None], PortLease] = field(default_factory=dict)

    @cached_property
    def slices(self) -> tuple[SliceInfo, ...]:
        return tuple(lease.slice for lease in self.leases)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every host, in the order of slices and TPU worker ids, without the ranks that `number_slots` gives."""
        return tuple(
            Slot(
                placement_group=lease.group,
                bundle_index=worker,
                node_idx=at,
                node_id=lease.slice.node_ids[worker],
                node_ip=lease.slice.node_ips[worker],
                node_rank=0,
                local_rank=0,
            )
            for at, lease in enumerate(self.leases)
            for worker in range(lease.slice.num_hosts)
        )

    @cached_property
    def first_hosts(self) -> tuple[int, ...]:
        """The number of hosts before each slice, and at the end the number of all hosts."""
        return tuple(itertools.accumulate((each.num_hosts for each in self.slices), initial=0))

    def coordinator(self, at: int) -> str:
        """Return the `host:port` on worker 0 of slice number `at`. An IPv6 address stands in brackets."""
        return self.ports[self.leases[at], None].host_port

    @cached_property
    def megascale(self) -> PortLease | None:
        """The port of the coordinator of all slices; None with one slice."""
        return next((port for (_, requested), port in self.ports.items() if requested is not None), None)


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


def megascale_port(config: AcceleratorConfigType, driver: Mapping[str, str]) -> int:
    """Return the port of the coordinator of several slices: the configuration's, else `COORD_PORT`, else 8081."""
    if isinstance(config, TpuAcceleratorConfig) and config.megascale_port is not None:
        return config.megascale_port
    text = config.env_vars.get("COORD_PORT") or driver.get("COORD_PORT") or str(MEGASCALE_DEFAULT_PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"COORD_PORT must be a port, 1 to 65535, got {text!r}.")
    return int(text)


def hold_ports(held: Held, megascale: int | None) -> Held:
    """Lease the ports that the slices need, release all others, and return what is held; after an error none is."""
    needed: list[tuple[Lease, int | None]] = [(lease, None) for lease in held.leases]
    needed += [] if megascale is None else [(held.leases[0], megascale)]
    ports = {key: held.ports[key] for key in needed if key in held.ports}
    try:
        release(port for key, port in held.ports.items() if key not in ports)
        first_hosts = [held.slots[at] for at in held.first_hosts[:-1]]
        new = [at for at, lease in enumerate(held.leases) if (lease, None) not in ports]
        for at, (port,) in zip(new, lease_ports([first_hosts[at] for at in new]), strict=True):
            ports[held.leases[at], None] = port
        if megascale is not None and needed[-1] not in ports:
            ports[needed[-1]] = _lease_port(first_hosts[0], megascale)
    except BaseException:
        release(ports.values())
        raise
    return Held(held.leases, ports)


def give_back_all(held: Held) -> bool:
    """Release all ports and return all slices; False if Ray did not have the resources in time."""
    try:
        release(held.ports.values())
    finally:
        returned = give_back(held.leases)
    return returned


def release(ports: Iterable[PortLease]) -> None:
    # A silent host may be lost before Ray knows. A host that is not lost releases its ports later.
    with contextlib.suppress(PlacementError):
        release_ports(list(ports), timeout_s=_RELEASE_S)


def _lease_port(slot: Slot, port: int) -> PortLease:
    try:
        return lease_ports([slot], low=port, high=port)[0][0]
    except PortUnavailableError as error:
        error.add_note(
            f"The coordinator of several slices needs port {port} on {slot.node_ip}, which another process has. Find "
            f"it there (ss -tlnp 'sport = :{port}') and end it, or choose another port (megascale_port, COORD_PORT)."
        )
        raise

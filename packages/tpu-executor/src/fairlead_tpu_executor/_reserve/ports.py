# SPDX-License-Identifier: Apache-2.0
"""The ports that a pool holds: one on worker 0 of each slice, and that of the coordinator of several slices."""

import contextlib
import threading
from collections.abc import Sequence

from fairlead_placement import (
    NodeAgent,
    PlacementError,
    PortLease,
    PortUnavailableError,
    Slot,
    lease_ports,
    release_ports,
)

from .. import _host
from .leases import Lease

__all__ = ["Ports"]

_RELEASE_S = 10.0


class Ports:
    """Held for as long as the slices are, so that an attempt does not pay for them."""

    def __init__(self) -> None:
        self._coordinators: dict[Lease, PortLease] = {}
        self._megascale: tuple[Lease, int, PortLease] | None = None
        # Two threads when Ray's head answers a request that a pool no longer waits for.
        self._lock = threading.Lock()

    def update(self, leases: Sequence[Lease], megascale_port: int | None) -> None:
        """Hold what these slices need, and nothing else.

        Args:
            leases: the slices, in order.
            megascale_port: the port of their coordinator; None without one.

        Raises:
            PortUnavailableError: a port is taken; for the coordinator's with a note of who has it.
        """
        with self._lock:
            self._update(leases, megascale_port)

    def _update(self, leases: Sequence[Lease], megascale_port: int | None) -> None:
        old = [self._coordinators.pop(lease) for lease in list(self._coordinators) if lease not in leases]
        if self._megascale is not None and (
            megascale_port is None or self._megascale[:2] != (leases[0], megascale_port)
        ):
            old.append(self._megascale[2])
            self._megascale = None
        # A host that does not answer may be lost before Ray knows. If it is not, it gives its ports back later.
        with contextlib.suppress(PlacementError):
            release_ports(old, timeout_s=_RELEASE_S)
        new = [lease for lease in leases if lease not in self._coordinators]
        ports = lease_ports([_first(lease) for lease in new])
        self._coordinators |= {lease: port for lease, (port,) in zip(new, ports, strict=True)}
        if megascale_port is not None and self._megascale is None:
            self._megascale = (leases[0], megascale_port, _lease_one(_first(leases[0]), megascale_port))

    def coordinator(self, lease: Lease) -> str:
        """Return the `host:port` that the hosts of a slice use. An IPv6 address stands in brackets."""
        return self._coordinators[lease].host_port

    @property
    def megascale(self) -> str | None:
        """`host:port` for all slices; None with one slice."""
        return None if self._megascale is None else self._megascale[2].host_port

    def release(self) -> None:
        """Hold nothing. Can be repeated."""
        self.update([], None)


def _first(lease: Lease) -> Slot:
    one = lease.slice
    return Slot(
        placement_group=lease.group,
        bundle_index=0,
        node_idx=0,
        node_id=one.node_ids[0],
        node_ip=one.ip_address,
        node_rank=0,
        local_rank=0,
    )


def _lease_one(slot: Slot, port: int) -> PortLease:
    try:
        return lease_ports([slot], low=port, high=port)[0][0]
    except PortUnavailableError as error:
        try:
            holder = NodeAgent(slot.node_id).run(_host.describe_port, port)
        except PlacementError as unknown:
            holder = f"an unknown process ({unknown})"
        error.add_note(
            f"Port {port} is that of the coordinator of several slices; {holder} has it on {slot.node_ip}. End that, "
            "or choose another (megascale_port, COORD_PORT)."
        )
        raise

# SPDX-License-Identifier: Apache-2.0
"""The ports of a reservation: one on worker 0 of each slice, and that of the coordinator of several slices."""

import contextlib
import threading
from collections.abc import Mapping, Sequence

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
from .._accelerators.config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from .leases import Lease

_RELEASE_S = 10.0


def megascale_port(config: AcceleratorConfigType, driver: Mapping[str, str]) -> int:
    """Return the port of the coordinator of several slices.

    It is that of the configuration, else `COORD_PORT` of the user's variables or of the driver, else 8081.

    Raises:
        ValueError: `COORD_PORT` is not a port.
    """
    if isinstance(config, TpuAcceleratorConfig) and config.megascale_port is not None:
        return config.megascale_port
    text = config.env_vars.get("COORD_PORT") or driver.get("COORD_PORT") or str(MEGASCALE_DEFAULT_PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"COORD_PORT must be a port, 1 to 65535, got {text!r}.")
    return int(text)


class Ports:
    """Ports that are held as long as the slices, so that an attempt does not wait for them."""

    def __init__(self) -> None:
        # By slice and requested port; None is any port, for the coordinator of the slice.
        self._held: dict[tuple[Lease, int | None], PortLease] = {}
        # A second thread comes here when Ray's head answers a request that the pool no longer waits for.
        self._lock = threading.Lock()

    def update(self, leases: Sequence[Lease], megascale: int | None) -> None:
        """Hold what these slices need, and release everything else.

        Args:
            leases: the slices, in order.
            megascale: the port of the coordinator of all slices; None for no coordinator.

        Raises:
            PortUnavailableError: a port is taken; for that of the coordinator a note says which process has it.
        """
        with self._lock:
            needed: list[tuple[Lease, int | None]] = [(lease, None) for lease in leases]
            if megascale is not None:
                needed.append((leases[0], megascale))
            old = [self._held.pop(key) for key in list(self._held) if key not in needed]
            # A silent host may be lost before Ray knows. A host that is not lost releases its ports later.
            with contextlib.suppress(PlacementError):
                release_ports(old, timeout_s=_RELEASE_S)
            new = [lease for lease in leases if (lease, None) not in self._held]
            ports = lease_ports([lease.slot(0) for lease in new])
            self._held |= {(lease, None): port for lease, (port,) in zip(new, ports, strict=True)}
            if megascale is not None and needed[-1] not in self._held:
                self._held[needed[-1]] = _lease_port(leases[0].slot(0), megascale)

    def coordinator(self, lease: Lease) -> str:
        """Return the `host:port` that the hosts of a slice use. An IPv6 address stands in brackets."""
        return self._held[lease, None].host_port

    @property
    def megascale(self) -> str | None:
        """The `host:port` of the coordinator of all slices; None with one slice."""
        return next((held.host_port for (_, port), held in self._held.items() if port is not None), None)

    def release(self) -> None:
        """Release all ports. Can be repeated."""
        self.update([], None)


def _lease_port(slot: Slot, port: int) -> PortLease:
    try:
        return lease_ports([slot], low=port, high=port)[0][0]
    except PortUnavailableError as error:
        try:
            holder = NodeAgent(slot.node_id).run(_host.describe_port, port)
        except PlacementError as unknown:
            holder = f"an unknown process ({unknown})"
        error.add_note(
            f"The coordinator of several slices needs port {port} on {slot.node_ip}, which {holder} has. End that "
            "process, or choose another port (megascale_port, COORD_PORT)."
        )
        raise

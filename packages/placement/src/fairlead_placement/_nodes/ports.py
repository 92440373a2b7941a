# SPDX-License-Identifier: Apache-2.0
"""Leases ports of nodes, which the agents of this process hold."""

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray

from .._model import group_pairs
from .._slot import Slot
from ..exceptions import PortUnavailableError
from .agent import ANSWER_S, ask_agents, nodes_with, release

# Below the ephemeral range of every operating system, above the ports reserved for root.
PORT_LOW = 1400
PORT_HIGH = 1999
# The leases of this process. Their ids are the names that the agents hold.
_leases: set["PortLease"] = set()


@dataclass(frozen=True)
class PortLease(contextlib.AbstractContextManager["PortLease"]):
    """A port held on a node until it is released, or the process that leased it ends.

    Only that process can release it. The node's agent binds it on IPv4 and IPv6, so no other lease and no plain `bind`
    can use it on either. A server that sets SO_REUSEADDR, as torch's TCPStore and gRPC do, can listen on it while it is
    held.

    Attributes:
        address: of the node, IPv4 or IPv6, without brackets.
        port: its number.
        node_id: Ray's id of the node.
        lease_id: the agent's id of the lease.
    """

    address: str
    port: int
    node_id: str
    lease_id: str

    @property
    def host_port(self) -> str:
        """The address and the port as in URLs and gRPC, with brackets around an IPv6 address."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def release(self, *, timeout_s: float = ANSWER_S) -> None:
        """Release the port, as `release_ports` does."""
        release_ports([self], timeout_s=timeout_s)

    def __exit__(self, *_: object) -> None:
        self.release()


def lease_ports(
    slots: Sequence[Slot],
    *,
    count: int = 1,
    low: int = PORT_LOW,
    high: int = PORT_HIGH,
    timeout_s: float = ANSWER_S,
) -> tuple[tuple[PortLease, ...], ...]:
    """Lease `count` ports on the node of each slot, with one request to each node, all at once.

    If the agent that holds them dies, they are lost, with a warning in the log.

    Args:
        slots: the slots on whose nodes ports are leased. Several slots of one node get different ports.
        count: ports per slot.
        low, high: the first and the last port of the range.
        timeout_s: seconds that all of it may take. An agent that has to start takes about one.

    Returns:
        For each slot, its leases.

    Raises:
        ValueError: a count below 1, or a range that is empty or outside 1..65535.
        PortUnavailableError: a node has too few free ports; nothing stays leased.
        PlacementTimeoutError: an agent did not answer in time; nothing stays leased.
    """
    check_range(low, high)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    began = time.monotonic()  # which fairlead-inspect reads from outside, with `timeout_s`
    wanted = [[PortLease(slot.node_ip, 0, slot.node_id, uuid.uuid4().hex) for _ in range(count)] for slot in slots]
    on_node = group_pairs((lease.node_id, lease) for leases in wanted for lease in leases)
    ids = {node_id: [lease.lease_id for lease in leases] for node_id, leases in on_node.items()}
    leased: dict[str, PortLease] = {}
    try:
        for node_id, answer in ask_agents("lease", ids, low, high, timeout_s=timeout_s).items():
            if isinstance(answer, Exception):
                raise answer
            ports, held, in_use = answer
            if not ports:
                address = on_node[node_id][0].address
                raise PortUnavailableError(address, len(ids[node_id]), low, high, held, in_use)
            for lease, port in zip(on_node[node_id], ports, strict=True):
                leased[lease.lease_id] = replace(lease, port=port)
    except BaseException:
        # A lease whose answer never arrives is released too.
        release(ids, timeout_s=max(0.0, began + timeout_s - time.monotonic()))
        raise
    _leases.update(leased.values())
    return tuple(tuple(leased[lease.lease_id] for lease in leases) for leases in wanted)


def leased_ports() -> list[PortLease]:
    """Return the leases of this process."""
    return [lease for lease in [*_leases] if nodes_with(lease.lease_id)]


def check_range(low: int, high: int) -> None:
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"port range must satisfy 1 <= low <= high <= 65535, got low={low}, high={high}")


def release_ports(leases: Sequence[PortLease], *, timeout_s: float = ANSWER_S) -> None:
    """Release ports, with one request to each node, within `timeout_s` seconds for all of them.

    Can be repeated; does nothing if Ray has ended, the node is gone, or another process has leased them. An agent that
    does not answer in time releases them later.
    """
    per_node = group_pairs((lease.node_id, lease.lease_id) for lease in leases)
    _leases.difference_update(leases)
    if ray.is_initialized():  # else the agents ended with the connection, and their sockets with them
        release(per_node, timeout_s=timeout_s)

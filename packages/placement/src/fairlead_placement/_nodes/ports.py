# SPDX-License-Identifier: Apache-2.0
"""Leases ports of nodes, which their agents hold."""

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray

from .._model import group_pairs
from .._slot import Slot
from ..exceptions import PlacementError, PortUnavailableError
from .agent import ANSWER_S, ask_living, ask_nodes, this_process
from .head import choose_alive

# Below the ephemeral range of every operating system, above the ports reserved for root.
PORT_LOW = 1400
PORT_HIGH = 1999


@dataclass(frozen=True)
class PortLease(contextlib.AbstractContextManager["PortLease"]):
    """A port held on a node until it is released, or the process that leased it ends.

    The node's agent binds it on IPv4 and IPv6, so no other lease and no plain `bind` can use it on either. A server
    that sets SO_REUSEADDR, as torch's TCPStore and gRPC do, can listen on it while it is held.

    Attributes:
        address: of the node, IPv4 or IPv6, without brackets.
        port: its number.
        node_id: Ray's id of the node.
        lease_id: the agent's id of the lease.

    >>> lease = PortLease("10.0.0.1", 1400, "0" * 56, "id")
    >>> lease.host_port
    '10.0.0.1:1400'
    >>> PortLease("fd00::1", 1400, "0" * 56, "id").host_port
    '[fd00::1]:1400'
    """

    address: str
    port: int
    node_id: str
    lease_id: str

    @property
    def host_port(self) -> str:
        """The address and the port as in URLs and gRPC, with brackets around an IPv6 address."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def release(self) -> None:
        """Release the port. Can be repeated; does nothing if Ray has ended or the node is gone."""
        release_ports([self])

    def __exit__(self, *_: object) -> None:
        self.release()


def lease_ports(
    slots: Sequence[Slot], *, count: int = 1, low: int = PORT_LOW, high: int = PORT_HIGH
) -> tuple[tuple[PortLease, ...], ...]:
    """Lease `count` ports on the node of each slot, with one request to each node, all at once.

    Args:
        slots: the slots on whose nodes ports are leased. Several slots of one node get different ports.
        count: ports per slot.
        low: first port of the range.
        high: last port of the range, included.

    Returns:
        For each slot, in order, its `count` leases.

    Raises:
        ValueError: a count below 1, or a range that is empty or outside 1..65535.
        PortUnavailableError: a node has too few free ports; nothing stays leased.
    """
    check_range(low, high)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    wanted = [[PortLease(slot.node_ip, 0, slot.node_id, uuid.uuid4().hex) for _ in range(count)] for slot in slots]
    on_node = group_pairs((lease.node_id, lease) for leases in wanted for lease in leases)
    ids = {node_id: [lease.lease_id for lease in leases] for node_id, leases in on_node.items()}
    port: dict[str, int] = {}
    try:
        requests = {node_id: (there, low, high, this_process()) for node_id, there in ids.items()}
        for node_id, answer in ask_nodes("lease", requests, ANSWER_S).items():
            if isinstance(answer, Exception):
                raise answer
            ports, leased, in_use = answer
            if not ports:
                address = on_node[node_id][0].address
                raise PortUnavailableError(address, len(ids[node_id]), low, high, leased, in_use)
            port.update(zip(ids[node_id], ports, strict=True))
    except BaseException:
        # A lease whose answer never arrives is released too. If that fails too, the first error is raised.
        with contextlib.suppress(PlacementError):
            release_ports([lease for leases in wanted for lease in leases])
        raise
    return tuple(tuple(replace(lease, port=port[lease.lease_id]) for lease in leases) for leases in wanted)


def check_range(low: int, high: int) -> None:
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"port range must satisfy 1 <= low <= high <= 65535, got low={low}, high={high}")


def release_ports(leases: Sequence[PortLease], *, timeout_s: float = ANSWER_S) -> None:
    """Release ports, with one request to each node, all at once.

    Can be repeated; does nothing if Ray has ended or the node is gone.

    Args:
        leases: the leases.
        timeout_s: seconds to wait for all agents.

    Raises:
        PlacementError: an agent did not answer, although its node is alive. The ports of the other nodes are released,
            and those of this node will be if the agent answers later.
    """
    per_node = group_pairs((lease.node_id, lease.lease_id) for lease in leases)
    if not per_node or not ray.is_initialized():
        return  # the agents ended with the job, and their sockets with them
    # A node that has gone holds no sockets.
    ask_living("release", {node_id: (per_node[node_id],) for node_id in choose_alive(per_node)}, timeout_s)

# SPDX-License-Identifier: Apache-2.0
"""Which hosts are well: as Ray says, and as they answer themselves."""

import socket
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement.spi import alive_nodes, draining_nodes

from ._reserve.leases import Lease

__all__ = ["dead_nodes", "gone_nodes", "lost_leases", "silent_nodes"]

_ANSWER_S = 1.0


def dead_nodes(node_ids: Iterable[str]) -> frozenset[str]:
    """Those that Ray takes to be dead."""
    return frozenset(node_ids) - alive_nodes()


def gone_nodes(node_ids: Iterable[str]) -> frozenset[str]:
    """Those that are dead or about to go."""
    return frozenset(node_ids) - (alive_nodes() - draining_nodes())


def silent_nodes(node_ids: Collection[str]) -> frozenset[str]:
    """Those that Ray takes to be alive, but whose raylet takes no connection.

    Ray notices the death of a node after 15 s to a minute; what runs on the others fails at once. Whether it does not
    answer tells sooner where to look.
    """
    rows = [row for row in ray.nodes() if row["Alive"] and row["NodeID"] in node_ids]
    if not rows:
        return frozenset()
    with ThreadPoolExecutor(min(64, len(rows))) as pool:
        answers = pool.map(lambda row: _answers(row["NodeManagerAddress"], row["NodeManagerPort"]), rows)
        return frozenset(row["NodeID"] for row, well in zip(rows, answers, strict=True) if not well)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_S):
            return True
    except OSError:
        return False


def lost_leases(leases: Sequence[Lease], quarantined: Collection[str]) -> list[Lease]:
    """The slices of which a host is not there, or that are not held any more."""
    bad = gone_nodes(node_id for lease in leases for node_id in lease.slice.node_ids) | frozenset(quarantined)
    return [
        lease
        for lease in leases
        if bad.intersection(lease.slice.node_ids) or placement_group_table(lease.group).get("state") != "CREATED"
    ]

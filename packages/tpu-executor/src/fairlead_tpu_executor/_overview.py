# SPDX-License-Identifier: Apache-2.0
"""The slices of a cluster as a table: which are whole, and who uses them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fairlead_placement import Holder, Node

from ._accelerators.slices import SLICE_NAME, TOPOLOGY, TYPE, SliceInfo, SliceLack, find_slices
from ._accelerators.tpu_types import TpuType, canonical_name, tpu_type

__all__ = ["SliceStatus", "as_table", "slice_statuses"]


@dataclass(frozen=True)
class SliceStatus:
    """A slice as its hosts show it.

    Attributes:
        slice_name: its name.
        kind: its type.
        topology: such as "2x2x2"; empty if the hosts do not say.
        present: how many of its hosts are there.
        expected: how many a whole one has; 0 if its type is not known.
        state: "whole", or what it lacks.
        users: who holds TPUs of it.
    """

    slice_name: str
    kind: str
    topology: str
    present: int
    expected: int
    state: str
    users: tuple[str, ...]


def slice_statuses(nodes: Sequence[Node], holders: Sequence[Holder]) -> tuple[SliceStatus, ...]:
    """Every slice of which a host is there, by type and name. Pure.

    Args:
        nodes: those that are alive and not about to go.
        holders: who holds what on them.
    """
    rows: dict[str, SliceStatus] = {}
    for kind in sorted({canonical_name(node.labels[TYPE]) for node in nodes if TYPE in node.labels}):
        members = [node for node in nodes if canonical_name(node.labels.get(TYPE, "")) == kind]
        per_vm = int(max(node.total.get("TPU", 0) for node in members))
        wanted = _type(kind, per_vm) or _type(kind, None)
        if wanted is None:
            name = f"hosts of type {kind}"
            rows[name] = SliceStatus(name, kind, "", len(members), 0, "its type is not known", _users(members, holders))
            continue
        found = find_slices(nodes, wanted)
        every: list[SliceInfo | SliceLack] = [*found.intact, *found.lacking]
        for one in every:
            hosts = [node for node in nodes if _belongs(node, one.slice_name)]
            topology = ", ".join(sorted({node.labels.get(TOPOLOGY, "") for node in hosts}))
            state = one.what if isinstance(one, SliceLack) else "whole"
            rows[one.slice_name] = SliceStatus(
                one.slice_name, kind, topology, len(hosts), wanted.hosts, state, _users(hosts, holders)
            )
    return tuple(rows.values())


def _type(kind: str, chips_per_vm: int | None) -> TpuType | None:
    try:
        return tpu_type(kind, chips_per_vm=chips_per_vm)
    except ValueError:
        return None


def _belongs(node: Node, name: str) -> bool:
    own = node.labels.get(SLICE_NAME, "")
    return TYPE in node.labels and name in (own, node.node_id[:8], f"{own}/{node.node_id[:8]}")


def _users(hosts: Sequence[Node], holders: Sequence[Holder]) -> tuple[str, ...]:
    users = []
    named = 0.0
    for holder in holders:
        held = sum(bundle.get("TPU", 0) for node in hosts for bundle in holder.bundles.get(node.node_id, ()))
        named += held
        if held:
            users.append(f"{holder.kind} {holder.name or 'without a name'} (job {holder.job_id}): {held:g} TPU")
    used = sum(node.total.get("TPU", 0) - node.free.get("TPU", 0) for node in hosts)
    return (*users, f"tasks: {used - named:g} TPU") if used - named > 1e-4 else tuple(users)


def as_table(statuses: Sequence[SliceStatus]) -> RenderableType:
    """For people."""
    if not statuses:
        return Text("No host of this cluster says that it is part of a TPU slice.")
    table = Table("slice", "type", "topology", "hosts", "state", "used by", title="TPU slices", title_justify="left")
    for one in statuses:
        hosts = f"{one.present}/{one.expected or '?'}"
        # As Text: what looks like markup in somebody's name is not.
        cells = (one.slice_name, one.kind, one.topology, hosts, one.state, "\n".join(one.users) or "nobody")
        table.add_row(*map(Text, cells))
    return table

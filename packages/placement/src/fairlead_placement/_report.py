# SPDX-License-Identifier: Apache-2.0
"""What was asked, what is there, and who holds it: the table under every refusal."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._planner import Ask, Node
from ._render import as_text

__all__ = ["Holder", "Report"]


@dataclass(frozen=True)
class Holder:
    """A placement group that holds resources."""

    name: str
    placement_group_id: str
    job_id: str
    bundles: Mapping[str, tuple[Mapping[str, float], ...]]
    """Node id -> the bundles it holds there."""


@dataclass(frozen=True)
class Report:
    """What was asked of which nodes, as a value that prints as tables.

    Attributes:
        asks: what was asked, one entry per logical node in use.
        nodes: the nodes that were there, in physical order.
        holders: the placement groups that held resources on them.
    """

    asks: tuple[Ask, ...]
    nodes: tuple[Node, ...]
    holders: tuple[Holder, ...] = ()

    def __rich__(self) -> RenderableType:
        asked = Table("logical node", "bundles", "each", "strategy", title="Asked", title_justify="left")
        for first, last, ask in _runs(self.asks):
            number = str(first) if first == last else f"{first} to {last}"
            asked.add_row(number, str(ask.count), Text(_amounts(ask.bundle)), ask.strategy)
        wanted = {name for ask in self.asks for name in ask.bundle}
        found = Table("node", "address", "total", "free", "held by", title="Found", title_justify="left")
        for node in self.nodes:
            holders = [
                f"{holder.name or 'unnamed'} {holder.placement_group_id[:8]} (job {holder.job_id}): "
                + ", ".join(f"{count} x {what}" for what, count in _tally(holder.bundles[node.node_id]).items())
                for holder in self.holders
                if node.node_id in holder.bundles
            ]
            # What nobody asked for says nothing about why it does not fit.
            total = {name: node.total.get(name, 0.0) for name in wanted}
            free = {name: node.free.get(name, 0.0) for name in wanted}
            # As Text: what looks like markup in somebody's name is not.
            cells = (node.node_id[:8], node.ip, _amounts(total), _amounts(free), "\n".join(holders))
            found.add_row(*map(Text, cells))
        if not self.nodes:
            return Group(asked, Text("Found no node that is alive."))
        return Group(asked, found)

    def __str__(self) -> str:
        return as_text(self)


def _runs(asks: tuple[Ask, ...]) -> list[tuple[int, int, Ask]]:
    """Neighbouring asks of one shape as one row: (first, last, one of them)."""
    rows: list[tuple[int, int, Ask]] = []
    for ask in asks:
        if rows and rows[-1][2].shape == ask.shape and rows[-1][1] == ask.node_idx - 1:
            rows[-1] = (rows[-1][0], ask.node_idx, rows[-1][2])
        else:
            rows.append((ask.node_idx, ask.node_idx, ask))
    return rows


def _tally(bundles: tuple[Mapping[str, float], ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for bundle in bundles:
        counts[_amounts(bundle)] = counts.get(_amounts(bundle), 0) + 1
    return counts


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"

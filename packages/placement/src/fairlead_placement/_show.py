# SPDX-License-Identifier: Apache-2.0
"""Shows clusters, reservations and refusals to people."""

import io
import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._model import Ask, Node, Verdict, group_pairs
from ._slot import Slot

# How many holders an error names before its table, which has all of them.
NAMED = 3
# States that need attention. Others are not shown: a row of eight has to fit a terminal.
_STYLES = {"dead": "bold red", "stuck": "bold magenta", "restarting": "yellow", "starting": "yellow"}


def draw(
    counts: Sequence[int], slots: Sequence[Slot], held: Mapping[str, float], groups: Sequence[Any], title: str | None
) -> RenderableType:
    """Return a table with a headline and a legend. `held` is what a slot holds; `slots` is empty until reserved."""
    if not sum(counts):
        return Text("Empty Ray Cluster")
    kind = _kind(held)
    each = name_amounts(held) if kind == "slot" else f"one {kind}"
    lines = [f"n.s: slot s of logical node n ({each} each){'' if slots else ', not reserved yet'}"]
    rows = group_pairs((slot.node_idx, slot) for slot in slots)
    # A row's cells are in physical order.
    cells = {(row, slot.bundle_index): (row, cell) for row, line in rows.items() for cell, slot in enumerate(line)}
    inside: dict[tuple[int, int], list[Text]] = {}
    for number, group in enumerate(groups):
        worker = "W " if len(groups) == 1 else f"G{number}:W"
        name = group.name_prefix or "an unnamed group"
        lines.append(f"{worker.strip()} r: worker of rank r of {name} ({count_noun(group.world_size, 'worker')})")
        for member in group.worker_metadata:
            label = f"{worker}{member['global_rank']}"
            state, key = member.get("state", ""), (member["node_idx"], member["bundle_index"])
            text = Text(f"{label}\n{state}" if state in _STYLES else label, style=_STYLES.get(state, "green"))
            inside.setdefault(cells.get(key, key), []).append(text)

    table = Table(show_header=False, show_lines=True)
    table.add_column("node", style="cyan", no_wrap=True)
    for _ in range(max(counts)):
        table.add_column(justify="center", no_wrap=True)
    for node_idx, count in enumerate(counts):
        nodes = {slot.node_id: slot.node_ip for slot in rows.get(node_idx, ())}
        notes = [*(["not used"] if count == 0 else []), *(f"{ip} ({node_id[:6]})" for node_id, ip in nodes.items())]
        head = Text(f"node {node_idx}").append("".join(f"\n{note}" for note in notes), style="dim")
        names = [Text(f"{node_idx}.{cell}", style="" if slots else "dim") for cell in range(count)]
        table.add_row(head, *(Group(name, *inside.get((node_idx, cell), [])) for cell, name in enumerate(names)))
    headline = Text(title or f"Ray Cluster: {count_bundles(counts, held)}", style="bold")
    return Group(headline, table, Text("\n".join(lines), style="dim"))


def count_bundles(counts: Sequence[int], held: Mapping[str, float]) -> str:
    """Return how many logical nodes are in use, and how many bundles they have, which hold this each."""
    return f"{count_noun(sum(count > 0 for count in counts), 'node')}, {count_noun(sum(counts), _kind(held))}"


def _kind(held: Mapping[str, float]) -> str:
    return "CPU" if not held else "slot" if list(held.values()) != [1.0] else next(iter(held))


def count_noun(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


_VERDICTS: dict[Verdict, str] = {
    "fits": "It fits now.",
    "taken": "It would fit, but others hold what it needs.",
    "impossible": "It does not fit on the present nodes, even when nothing else runs.",
}


@dataclass(frozen=True)
class ResourceHolder:
    """A holder of resources: a placement group, or an actor outside of any group.

    Attributes:
        kind: "placement group" or "actor".
        name: its name; an actor's class if it has none.
        holder_id: Ray's id of it, hexadecimal.
        job_id: the job that made it, hexadecimal.
        bundles: node id -> what it holds there, one entry per bundle.
    """

    kind: Literal["placement group", "actor"]
    name: str
    holder_id: str
    job_id: str
    bundles: Mapping[str, tuple[Mapping[str, float], ...]]


@dataclass(frozen=True)
class ReservationReport:
    """A request and what was found, as a value that prints as tables.

    Attributes:
        asks: the requests, one per logical node in use.
        nodes: the nodes that were alive, in physical order.
        holders: the placement groups and actors that held resources on them.
        verdict: "fits"; "taken" (it would fit, but others hold what it needs); or "impossible" (the planner, which
            revises no choice, finds no arrangement even when the nodes are idle).
        plan: if it fits, the node ids on which `reserve` would place the bundles of each logical node; empty if the
            strategy lets Ray choose the nodes.
    """

    asks: tuple[Ask, ...]
    nodes: tuple[Node, ...]
    holders: tuple[ResourceHolder, ...] = ()
    verdict: Verdict = "impossible"
    plan: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def __rich__(self) -> RenderableType:
        # Resources that were not requested do not explain why it does not fit.
        wanted = sorted({name for ask in self.asks for name in ask.bundle})
        return Group(self._draw_request(), _draw_nodes(self.nodes, self.holders, wanted), Text(_VERDICTS[self.verdict]))

    def __str__(self) -> str:
        # Without colours and control codes, for messages and logs.
        console = Console(file=io.StringIO(), width=110, record=True, force_terminal=False, color_system=None)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())

    def _draw_request(self) -> Table:
        columns = ["logical node", "bundles", "each", "strategy", *(["planned on"] if self.plan else [])]
        asked = Table(*columns, title="Requested", title_justify="left")
        # A row for each run of neighbouring asks that are alike.
        numbered = [(replace(ask, node_idx=0), ask.node_idx - row, ask) for row, ask in enumerate(self.asks)]
        for _, run in itertools.groupby(numbered, operator.itemgetter(0, 1)):
            asks = [ask for *_, ask in run]
            ask, first, last = asks[0], asks[0].node_idx, asks[-1].node_idx
            number = str(first) if first == last else f"{first} to {last}"
            labels = "".join(f"\non {key}: {value}" for key, value in ask.labels.items())
            nodes = dict.fromkeys(node_id for ask in asks for node_id in self.plan.get(ask.node_idx, ()))
            cells = [number, str(ask.count), name_amounts(ask.bundle) + labels, ask.strategy]
            cells += [", ".join(node_id[:8] for node_id in nodes)] if self.plan else []
            asked.add_row(*map(Text, cells))
        return asked


def _draw_nodes(nodes: Sequence[Node], holders: Sequence[ResourceHolder], wanted: Sequence[str]) -> RenderableType:
    """Return a table of nodes with the amounts of some resources, and who holds them."""
    if not nodes:
        return Text("Found no node that is alive.")
    table = Table("node", "address", "total", "free", "held by", title="Found", title_justify="left")
    for node in nodes:
        total, free = ({name: amounts.get(name, 0.0) for name in wanted} for amounts in (node.total, node.free))
        rest = {name: total[name] - free[name] for name in wanted}
        held_by = []
        for holder in holders:
            if not (bundles := holder.bundles.get(node.node_id)):
                continue
            counted = Counter(map(name_amounts, bundles)).items()
            held_by.append(
                f"{holder.kind} {holder.name or 'without a name'} {holder.holder_id[:8]} (job {holder.job_id}): "
                + ", ".join(f"{count} x {what}" for what, count in counted)
            )
            rest = {name: amount - sum(bundle.get(name, 0.0) for bundle in bundles) for name, amount in rest.items()}
        if others := {name: amount for name, amount in rest.items() if amount > 1e-4}:
            held_by.append(f"tasks, or actors that are starting: {name_amounts(others)}")
        # Text, so that a name is not parsed as markup.
        cells = (node.node_id[:8], node.ip, name_amounts(total), name_amounts(free), "\n".join(held_by))
        table.add_row(*map(Text, cells))
    return table


def name_holders(nodes: Sequence[Node], holders: Sequence[ResourceHolder], names: AbstractSet[str]) -> str:
    """Return who holds some of these resources on the nodes, the first few by name."""
    here = {node.node_id for node in nodes}
    named = [
        f"{holder.kind} {holder.name or 'without a name'} {holder.holder_id[:8]}"
        for holder in holders
        if any(names & held.keys() for node_id in here & holder.bundles.keys() for held in holder.bundles[node_id])
    ]
    rest = [f"{len(named) - NAMED} more"] if len(named) > NAMED else []
    return ", ".join([*named[:NAMED], *rest]) or "tasks, or actors that are starting"


def name_amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


def describe_asks(asks: Sequence[Ask]) -> str:
    """Return the bundles of a request as text, such as "2 x 1 CPU, 1 GPU"."""
    counts = Counter[str]()
    for ask in asks:
        counts[name_amounts(ask.bundle)] += ask.count
    return "; ".join(f"{count} x {bundle}" for bundle, count in counts.items())

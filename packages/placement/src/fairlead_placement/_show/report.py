# SPDX-License-Identifier: Apache-2.0
"""The table under every refusal: what was requested, what the nodes have, and who holds it."""

import io
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._model import Ask, Node

Verdict = Literal["fits", "taken", "impossible", "reserved"]
_VERDICTS: dict[Verdict, str] = {
    "fits": "It fits now.",
    "taken": "It would fit, but others hold what it needs.",
    "impossible": "It does not fit, even when nothing else runs.",
}


@dataclass(frozen=True)
class Holder:
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
class Report:
    """A request and what was found, as a value that prints as tables.

    Attributes:
        asks: the requests, one per logical node in use.
        nodes: the nodes that were alive, in physical order.
        holders: the placement groups and actors that held resources on them.
        verdict: "fits"; "taken" (it would fit, but others hold what it needs); "impossible" (it does not fit even when
            the nodes are idle); or "reserved" (the cluster holds it already).
        plan: if it fits, the node ids on which `reserve` would place the bundles of each logical node. If it is
            reserved, the node ids of the slots of each logical node.
        reserved_at: when it was reserved, in seconds since the epoch; None if it is not.
        lost: if it is reserved, the ids of its nodes that are gone.
    """

    asks: tuple[Ask, ...]
    nodes: tuple[Node, ...]
    holders: tuple[Holder, ...] = ()
    verdict: Verdict = "impossible"
    plan: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    reserved_at: float | None = None
    lost: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        return Group(self._draw_request(), self._draw_nodes(), Text(self._summary()))

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def _summary(self) -> str:
        if self.verdict != "reserved":
            return _VERDICTS[self.verdict]
        nodes = [node_id for nodes in self.plan.values() for node_id in nodes]
        since = "" if self.reserved_at is None else f" since {time.strftime('%F %T', time.localtime(self.reserved_at))}"
        text = f"It is reserved{since}: {len(nodes)} slot(s) on {len(set(nodes))} node(s)."
        if self.lost:
            gone = ", ".join(node_id[:8] for node_id in self.lost)
            text += f" Node(s) {gone} are gone: replace_lost_nodes() reserves their slots on other nodes."
        return text

    def _draw_request(self) -> Table:
        place = "reserved on" if self.verdict == "reserved" else "planned on"
        columns = ["logical node", "bundles", "each", "strategy", *([place] if self.plan else [])]
        asked = Table(*columns, title="Asked", title_justify="left")
        for first, last, ask in self._runs():
            number = str(first) if first == last else f"{first} to {last}"
            labels = "".join(f"\non {key}: {condition}" for key, condition in ask.labels.items())
            cells = [number, str(ask.count), _amounts(ask.bundle) + labels, ask.strategy]
            nodes = [n for at in range(first, last + 1) for n in self.plan.get(at, ())]
            if self.plan:
                cells.append(", ".join(node_id[:8] for node_id in dict.fromkeys(nodes)))
            asked.add_row(*map(Text, cells))
        return asked

    def _draw_nodes(self) -> RenderableType:
        if not self.nodes:
            return Text("Found no node that is alive.")
        # Resources that were not requested do not explain why it does not fit.
        wanted = sorted({name for ask in self.asks for name in ask.bundle})
        found = Table("node", "address", "total", "free", "held by", title="Found", title_justify="left")
        for node in self.nodes:
            there = [holder for holder in self.holders if node.node_id in holder.bundles]
            total = {name: node.total.get(name, 0.0) for name in wanted}
            free = {name: node.free.get(name, 0.0) for name in wanted}
            holders = [
                f"{holder.kind} {holder.name or 'without a name'} {holder.holder_id[:8]} (job {holder.job_id}): "
                + ", ".join(
                    f"{count} x {what}" for what, count in Counter(map(_amounts, holder.bundles[node.node_id])).items()
                )
                for holder in there
            ]
            others = _others(node, there, wanted)
            if others:
                holders.append(f"tasks, or actors that are starting: {_amounts(others)}")
            # Text, so that a name is not parsed as markup.
            cells = (node.node_id[:8], node.ip, _amounts(total), _amounts(free), "\n".join(holders))
            found.add_row(*map(Text, cells))
        return found

    def _runs(self) -> list[tuple[int, int, Ask]]:
        """Return a row for each run of neighbouring asks of one shape: (first, last, one of them)."""
        rows: list[tuple[int, int, Ask]] = []
        for ask in self.asks:
            if rows and rows[-1][2].shape == ask.shape and rows[-1][1] == ask.node_idx - 1:
                rows[-1] = (rows[-1][0], ask.node_idx, rows[-1][2])
            else:
                rows.append((ask.node_idx, ask.node_idx, ask))
        return rows


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


def _others(node: Node, holders: Sequence[Holder], wanted: Sequence[str]) -> dict[str, float]:
    """Return what is neither free nor held by a holder that has a name."""
    bundles = [bundle for holder in holders for bundle in holder.bundles[node.node_id]]
    named = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in wanted}
    rest = {name: node.total.get(name, 0.0) - node.free.get(name, 0.0) - named[name] for name in wanted}
    return {name: amount for name, amount in rest.items() if amount > 1e-4}


def as_text(renderable: RenderableType, *, width: int = 110) -> str:
    """Render without colours and control codes, for messages and logs."""
    text = _record(renderable, width).export_text()
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def as_html(renderable: RenderableType, *, width: int = 110) -> str:
    """Render as a `<pre>` with inline styles, for `_repr_html_`."""
    code_format = '<pre style="line-height:1.2">{code}</pre>'
    return _record(renderable, width).export_html(inline_styles=True, code_format=code_format)


def _record(renderable: RenderableType, width: int) -> Console:
    console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
    console.print(renderable)
    return console

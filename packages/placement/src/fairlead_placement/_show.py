# SPDX-License-Identifier: Apache-2.0
"""Shows clusters, reservations, refusals and waits to people."""

import io
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._model import Ask, Node, group_pairs
from ._slot import Slot

_STYLES = {"dead": "bold red", "stuck": "bold magenta", "restarting": "yellow", "starting": "yellow"}


def draw(
    counts: Sequence[int], slots: Sequence[Slot], held: Mapping[str, float], groups: Sequence[Any], title: str | None
) -> RenderableType:
    """Return a table with a headline and a legend. `held` is what a slot holds; `slots` is empty until reserved."""
    if not sum(counts):
        return Text("Empty Ray Cluster")
    headline = Text(title or f"Ray Cluster: {count_bundles(counts, held)}", style="bold")
    table = Table(show_header=False, show_lines=True)
    table.add_column("node", style="cyan", no_wrap=True)
    for _ in range(max(counts)):
        table.add_column(justify="center", no_wrap=True)

    cell_of, place = _cells(slots)
    workers: dict[tuple[int, int], list[Text]] = {}
    for number, group in enumerate(groups):
        for worker in group.worker_metadata:
            key = (worker["node_idx"], worker["bundle_index"])
            label = f"W {worker['global_rank']}" if len(groups) == 1 else f"G{number}:W{worker['global_rank']}"
            state = worker.get("state", "")
            # Only states that need attention are shown: a row of eight has to fit a terminal.
            text = Text(f"{label}\n{state}" if state in _STYLES else label, style=_STYLES.get(state, "green"))
            workers.setdefault(cell_of.get(key, key), []).append(text)

        for standby in getattr(group, "standby_metadata", ()):
            key = (standby["node_idx"], standby["bundle_index"])
            label = "standby" if len(groups) == 1 else f"G{number}:standby"
            text = Text(label if standby["state"] == "warm" else f"{label}\n{standby['state']}", style="dim green")
            workers.setdefault(cell_of.get(key, key), []).append(text)

    for node_idx, count in enumerate(counts):
        head = Text(f"node {node_idx}")
        if count == 0:
            head.append("\nnot used", style="dim")
        for node_id, ip in place.get(node_idx, {}).items():
            head.append(f"\n{ip} ({node_id[:6]})", style="dim")
        cells: list[RenderableType] = [
            Group(Text(f"{node_idx}.{at}", style="dim" if slots == () else ""), *workers.get((node_idx, at), []))
            for at in range(count)
        ]
        table.add_row(head, *cells)
    return Group(headline, table, _legend(held, slots, groups))


def count_bundles(counts: Sequence[int], held: Mapping[str, float]) -> str:
    """Return how many logical nodes are in use, and how many bundles they have, which hold this each."""
    nodes = count_noun(sum(count > 0 for count in counts), "node")
    return f"{nodes}, {count_noun(sum(counts), _kind(held))}"


def _kind(held: Mapping[str, float]) -> str:
    return "CPU" if not held else "slot" if list(held.values()) != [1.0] else next(iter(held))


def count_noun(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _cells(slots: Sequence[Slot]) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[int, dict[str, str]]]:
    """Return the cell of each bundle (a row's cells are in physical order), and the nodes of each logical node."""
    rows = group_pairs((slot.node_idx, slot) for slot in slots)
    cell_of = {(row, slot.bundle_index): (row, at) for row, there in rows.items() for at, slot in enumerate(there)}
    return cell_of, {row: {slot.node_id: slot.node_ip for slot in there} for row, there in rows.items()}


def _legend(held: Mapping[str, float], slots: Sequence[Slot], groups: Sequence[Any]) -> Text:
    each = _amounts(held) if (kind := _kind(held)) == "slot" else f"one {kind}"
    lines = [f"n.s: slot s of logical node n ({each} each)" + ("" if slots else ", not reserved yet")]
    if len(groups) == 1:
        lines.append(f"W r: worker of rank r of {_name(groups[0])}")
    else:
        lines += [f"G{number}:W r: worker of rank r of {_name(group)}" for number, group in enumerate(groups)]
    return Text("\n".join(lines), style="dim")


def _name(group: Any) -> str:
    return f"{group.name_prefix or 'an unnamed group'} ({count_noun(group.world_size, 'worker')})"


Verdict = Literal["fits", "taken", "impossible", "reserved"]
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
        verdict: "fits"; "taken" (it would fit, but others hold what it needs); "impossible" (it does not fit even when
            the nodes are idle); or "reserved" (the cluster holds it already).
        plan: if it fits, the node ids on which `reserve` would place the bundles of each logical node. If it is
            reserved, the node ids of the slots of each logical node.
        reserved_at: when it was reserved, in seconds since the epoch; None if it is not.
        lost: if it is reserved, the ids of its nodes that are gone.
    """

    asks: tuple[Ask, ...]
    nodes: tuple[Node, ...]
    holders: tuple[ResourceHolder, ...] = ()
    verdict: Verdict = "impossible"
    plan: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    reserved_at: float | None = None
    lost: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        # Resources that were not requested do not explain why it does not fit.
        wanted = sorted({name for ask in self.asks for name in ask.bundle})
        return Group(self._draw_request(), draw_nodes(self.nodes, self.holders, wanted), Text(self._summary()))

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
        # A row for each run of neighbouring asks of one shape.
        runs = itertools.groupby(enumerate(self.asks), lambda entry: (entry[1].shape, entry[1].node_idx - entry[0]))
        for _, run in runs:
            asks = [ask for _, ask in run]
            ask, first, last = asks[0], asks[0].node_idx, asks[-1].node_idx
            number = str(first) if first == last else f"{first} to {last}"
            labels = "".join(f"\non {key}: {condition}" for key, condition in ask.labels.items())
            cells = [number, str(ask.count), _amounts(ask.bundle) + labels, ask.strategy]
            nodes = [n for at in range(first, last + 1) for n in self.plan.get(at, ())]
            if self.plan:
                cells.append(", ".join(node_id[:8] for node_id in dict.fromkeys(nodes)))
            asked.add_row(*map(Text, cells))
        return asked


def draw_nodes(
    nodes: Sequence[Node], holders: Sequence[ResourceHolder], wanted: Sequence[str], *, title: str = "Found"
) -> RenderableType:
    """Return a table of nodes with the amounts of some resources, and who holds them."""
    if not nodes:
        return Text("Found no node that is alive.")
    found = Table("node", "address", "total", "free", "held by", title=title, title_justify="left")
    for node in nodes:
        there = [holder for holder in holders if node.node_id in holder.bundles]
        total = {name: node.total.get(name, 0.0) for name in wanted}
        free = {name: node.free.get(name, 0.0) for name in wanted}
        held_by = [
            f"{holder.kind} {holder.name or 'without a name'} {holder.holder_id[:8]} (job {holder.job_id}): "
            + ", ".join(
                f"{count} x {what}" for what, count in Counter(map(_amounts, holder.bundles[node.node_id])).items()
            )
            for holder in there
        ]
        others = _others(node, there, wanted)
        if others:
            held_by.append(f"tasks, or actors that are starting: {_amounts(others)}")
        # Text, so that a name is not parsed as markup.
        cells = (node.node_id[:8], node.ip, _amounts(total), _amounts(free), "\n".join(held_by))
        found.add_row(*map(Text, cells))
    return found


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


def _others(node: Node, holders: Sequence[ResourceHolder], wanted: Sequence[str]) -> dict[str, float]:
    """Return what is neither free nor held by a holder that has a name."""
    bundles = [bundle for holder in holders for bundle in holder.bundles[node.node_id]]
    named = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in wanted}
    rest = {name: node.total.get(name, 0.0) - node.free.get(name, 0.0) - named[name] for name in wanted}
    return {name: amount for name, amount in rest.items() if amount > 1e-4}


def as_text(renderable: RenderableType) -> str:
    """Render without colours and control codes, for messages and logs."""
    text = _record(renderable, force_terminal=False, color_system=None).export_text()
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def as_html(renderable: RenderableType) -> str:
    """Render as a `<pre>` with inline styles, for `_repr_html_`."""
    code_format = '<pre style="line-height:1.2">{code}</pre>'
    return _record(renderable).export_html(inline_styles=True, code_format=code_format)


def _record(renderable: RenderableType, **options: Any) -> Console:
    console = Console(file=io.StringIO(), width=110, record=True, force_jupyter=False, **options)
    console.print(renderable)
    return console


QUIET_S = 1.0


class Waiting(AbstractContextManager["Waiting"]):
    """Shows why and for how long the program waits. Writes nothing if standard error is not a terminal.

    Args:
        doing: the current activity, as a participle ("Waiting for 2 slices").

    >>> with Waiting("reserving") as waiting:
    ...     waiting.show("for nodes", limit_s=60.0)
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._status = self._console.status("")

    def show(self, what: str, limit_s: float) -> None:
        """Show the current reason for waiting, and the limit in seconds."""
        waited = time.monotonic() - self._began
        if waited < QUIET_S or not self._console.is_terminal:
            return
        # Text, so that a name is not parsed as markup.
        self._status.update(Text(f"{self._doing}: {what}, {waited:.0f} of {limit_s:g} s"))
        self._status.start()

    def __exit__(self, *_: object) -> None:
        self._status.stop()

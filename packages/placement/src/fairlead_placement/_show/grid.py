# SPDX-License-Identifier: Apache-2.0
"""Draws a virtual cluster: a row per logical node, a cell per slot, and the workers in it."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._slot import Slot

_STYLES = {"dead": "bold red", "stuck": "bold magenta", "restarting": "yellow", "starting": "yellow"}


def draw(
    counts: Sequence[int], slots: Sequence[Slot], use_gpus: bool, groups: Sequence[Any], title: str | None
) -> RenderableType:
    """Return a table with a headline and a legend. `slots` is empty until the cluster is reserved."""
    kind = "GPU" if use_gpus else "CPU"
    nodes, total = sum(count > 0 for count in counts), sum(counts)
    if not total:
        return Text("Empty Ray Cluster")
    headline = Text(title or f"Ray Cluster: {count_noun(nodes, 'node')}, {count_noun(total, kind)}", style="bold")
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
    return Group(headline, table, _legend(kind, slots, groups))


def count_noun(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _cells(slots: Sequence[Slot]) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[int, dict[str, str]]]:
    """Return the cell of each bundle (a row's cells are in physical order), and the nodes of each logical node."""
    cell_of: dict[tuple[int, int], tuple[int, int]] = {}
    place: dict[int, dict[str, str]] = {}
    filled: dict[int, int] = {}
    for slot in slots:
        at = filled.get(slot.node_idx, 0)
        filled[slot.node_idx] = at + 1
        cell_of[slot.node_idx, slot.bundle_index] = (slot.node_idx, at)
        place.setdefault(slot.node_idx, {})[slot.node_id] = slot.node_ip
    return cell_of, place


def _legend(kind: str, slots: Sequence[Slot], groups: Sequence[Any]) -> Text:
    lines = [f"n.s: slot s of logical node n (one {kind} each)" + ("" if slots else ", not reserved yet")]
    if len(groups) == 1:
        lines.append(f"W r: worker of rank r of {_name(groups[0])}")
    else:
        lines += [f"G{number}:W r: worker of rank r of {_name(group)}" for number, group in enumerate(groups)]
    return Text("\n".join(lines), style="dim")


def _name(group: Any) -> str:
    return f"{group.name_prefix or 'an unnamed group'} ({count_noun(group.world_size, 'worker')})"

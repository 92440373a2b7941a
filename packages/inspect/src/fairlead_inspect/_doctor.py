# SPDX-License-Identifier: Apache-2.0
"""The abilities of a look on each node, and the reasons why it cannot read more."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from fairlead_placement.spi import group_pairs

from ._model import Node, Process, Snapshot
from ._node.pyspy import LATE, MISSING
from ._show import PTRACE, clean, is_refused, make_table


@dataclass(frozen=True)
class NodeAbilities:
    """The abilities of a look on one node.

    Attributes:
        node: its address.
        answer: "answered", "silent", "lost", or "unasked" if it holds no process of a job.
        processes: how many processes of jobs it has.
        stacks: of how many of them the stacks were read.
        clocks: of how many it is known since when they stand.
        faults: what was not read, and why.
        remedy: what to do; empty if nothing is missing.
    """

    node: str
    answer: str
    processes: int
    stacks: int
    clocks: int
    faults: tuple[str, ...]
    remedy: str


def assess(snapshot: Snapshot) -> list[NodeAbilities]:
    """Return what the look could read on each node. Pure."""
    there = group_pairs((one.node_id, one) for one in snapshot.processes)
    return [_assess_node(node, there.get(node.node_id, []), snapshot.notes) for node in snapshot.nodes]


def _assess_node(node: Node, processes: Sequence[Process], notes: Sequence[str]) -> NodeAbilities:
    faults = sorted({one.note for one in processes if one.note})
    faults += [note.removeprefix(f"{node.address}: ") for note in notes if note.startswith(f"{node.address}: ")]
    remedy = ""
    if node.answer in ("silent", "lost"):
        faults.append(node.note)
        remedy = "Look at its raylet, or log in there and run the command with --here."
    elif any(map(is_refused, faults)):
        remedy = PTRACE
    elif MISSING in faults:
        remedy = "Install fairlead-inspect, which brings py-spy, in the Python of Ray on this node."
    elif LATE in faults:
        remedy = "The node is busy, or has many processes. Run the command again with a longer --timeout."
    return NodeAbilities(
        node.address,
        node.answer,
        len(processes),
        sum(any(thread.stack for thread in one.threads) for one in processes),
        sum(any(thread.last_ran_s is not None for thread in one.threads) for one in processes),
        tuple(faults),
        remedy,
    )


def draw_abilities(nodes: Sequence[NodeAbilities], notes: Sequence[str]) -> RenderableType:
    """Return a table with a line for each node, and the remedies below it."""
    table = make_table("node", "answer", "processes", "stacks", "since when", flexible=["why not"])
    for one in nodes:
        counts = [str(one.processes), f"{one.stacks} of {one.processes}", f"{one.clocks} of {one.processes}"]
        cells = [one.node, one.answer, *counts, "; ".join(one.faults[:3])]
        style = "yellow" if one.faults else ""
        table.add_row(*(Text(clean(cell), style=style) for cell in cells))
    addresses = group_pairs((one.remedy, one.node) for one in nodes if one.remedy)
    remedies = [Text(clean(f"{', '.join(there[:8])}: {remedy}")) for remedy, there in addresses.items()]
    own = tuple(f"{one.node}: " for one in nodes)
    return Group(table, *remedies, *(Text(clean(note), style="yellow") for note in notes if not note.startswith(own)))

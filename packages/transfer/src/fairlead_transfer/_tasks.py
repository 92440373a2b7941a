# SPDX-License-Identifier: Apache-2.0
"""From a plan to tasks: what each source rank stages, and what each target rank fetches from whom.

Tasks are plain data, because a worker may lack numpy.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ._descriptions import Tensors
from ._layout import Layout
from ._plan import TransferPlan

# Blocks begin at multiples of this.
ALIGNED = 64
# In the order of their channels.
KINDS = "shared_memory", "tcp", "object_store"


class CommitOptions(NamedTuple):
    """How targets commit, as the arguments of a link say."""

    first: str | None  # a method that is called before the wait for the methods that run, which it may end
    before: str | None  # a method that is called instead of such a wait
    after: str | None
    apply: str | None
    chunk_bytes: int


@dataclass(frozen=True)
class Tasks:
    """The tasks for the workers of both sides."""

    number: int
    source: dict[int, dict[str, Any]]  # for each source rank
    target: dict[int, dict[str, Any]]  # for each target rank
    transports: dict[tuple[int, int], str]  # of each pair of ranks that exchange pieces

    def find_reads(self, ranks: Collection[int], nodes: Sequence[str]) -> dict[int, list[tuple[int, int]]]:
        """Return the target ranks that read over the network, one of each node, and what: source ranks and channels."""
        readers: dict[str, int] = {}
        reads: dict[int, set[tuple[int, int]]] = {}
        for rank in sorted(ranks):
            for source, channels in self.target[rank]["sources"].items():
                kinds = self.source[source]["channels"]
                if places := {(source, number) for number in channels if kinds[number]["kind"] == "tcp"}:
                    reads.setdefault(readers.setdefault(nodes[rank], rank), set()).update(places)
        return {reader: sorted(places) for reader, places in reads.items()}


class _Piece(NamedTuple):
    """A piece that a source rank stages."""

    kind: str  # the transport
    sender: int  # the rank
    tensor: int  # its number
    start: tuple[int, ...]  # where it begins in the tensor
    size: tuple[int, ...]  # in each dim


@dataclass
class _Flows:
    """Which pieces each rank stages, and which it fetches."""

    transports: dict[tuple[int, int], str] = field(default_factory=dict)
    readers: dict[_Piece, set[int]] = field(default_factory=dict)
    # By target rank, with where the piece begins in its box.
    fetches: dict[int, list[tuple[_Piece, tuple[int, ...]]]] = field(default_factory=dict)


def make_tasks(
    number: int,
    plan: TransferPlan,
    source: Tensors,
    target: Tensors,
    dtypes: Mapping[str, str],
    transport: Callable[[int, int], str],
) -> Tasks:
    """Return the tasks that carry a plan out."""
    names = list(plan.names)
    numbers = {name: index for index, name in enumerate(names)}
    flows = _find_flows(plan, numbers, transport)
    channels, blocks = _lay_out(flows, plan, [source.layouts[name] for name in names])
    common = {"id": number, "dtypes": [dtypes[name] for name in names]}
    source_tasks = {
        rank: {
            **common,
            "library": source.library,
            "names": [source.own_names[name] for name in names],
            "channels": channels.get(rank, []),
            "held": [],
        }
        for rank in range(len(plan.source_nodes))
    }
    _add_replicas(source_tasks, plan, numbers)
    itemsizes = [target.layouts[name].itemsize for name in names]
    target_tasks = {
        rank: {
            **common,
            "library": target.library,
            "names": [target.own_names[name] for name in names],
            "shapes": [target.layouts[name].shape for name in names],
            "sources": _order_sources(flows.fetches.get(rank, ()), blocks, rank, len(plan.source_nodes)),
            "bytes": sum(math.prod(piece.size) * itemsizes[piece.tensor] for piece, _ in flows.fetches.get(rank, ())),
        }
        for rank in range(len(plan.target_nodes))
    }
    return Tasks(number, source_tasks, target_tasks, flows.transports)


def _find_flows(plan: TransferPlan, numbers: Mapping[str, int], transport: Callable[[int, int], str]) -> _Flows:
    """Return the pieces of a plan by the ranks that stage and fetch them."""
    flows = _Flows()
    for same in plan.tensor_sets:
        pieces = same.pieces
        receivers = pieces.receivers.tolist()
        starts, sizes = list(map(tuple, pieces.starts.tolist())), list(map(tuple, pieces.sizes.tolist()))
        inside = list(map(tuple, (pieces.starts - same.target.offsets[pieces.receivers]).tolist()))
        for name, senders in zip(same.names, pieces.senders.tolist(), strict=True):
            index = numbers[name]
            for row, pair in enumerate(zip(senders, receivers, strict=True)):
                if pair not in flows.transports:
                    flows.transports[pair] = transport(*pair)
                piece = _Piece(flows.transports[pair], pair[0], index, starts[row], sizes[row])
                flows.readers.setdefault(piece, set()).add(pair[1])
                flows.fetches.setdefault(pair[1], []).append((piece, inside[row]))
    return flows


def _lay_out(
    flows: _Flows, plan: TransferPlan, layouts: Sequence[Layout]
) -> tuple[dict[int, list[dict[str, Any]]], dict[_Piece, tuple[int, int]]]:
    """Return the channels of each source rank; and for each piece the number of its channel, and where it is there.

    Ranks of one node share one channel in memory. What goes elsewhere has a channel for each set of nodes that want it.
    """
    channels: dict[int, list[dict[str, Any]]] = {}
    blocks: dict[_Piece, tuple[int, int]] = {}
    numbers: dict[tuple[int, str, frozenset[int]], int] = {}
    for piece, readers in sorted(flows.readers.items(), key=lambda item: KINDS.index(item[0].kind)):
        kind, sender, index, start, size = piece
        mine, layout = channels.setdefault(sender, []), layouts[index]
        nodes = plan.target_nodes[list(readers)].tolist() if kind != "shared_memory" else ()
        number = numbers.setdefault((sender, kind, frozenset(nodes)), len(mine))
        if number == len(mine):
            mine.append({"kind": kind, "blocks": [], "size": 0})
        channel = mine[number]
        begin = [first - int(offset) for first, offset in zip(start, layout.offsets[sender], strict=True)]
        channel["blocks"].append((index, _box(begin, size), size, channel["size"]))
        blocks[piece] = number, channel["size"]
        channel["size"] += -(-math.prod(size) * layout.itemsize // ALIGNED) * ALIGNED
    return channels, blocks


def _order_sources(
    fetches: Iterable[tuple[_Piece, tuple[int, ...]]], blocks: Mapping[_Piece, tuple[int, int]], rank: int, ranks: int
) -> dict[int, dict[int, list[Any]]]:
    """Return what a target rank fetches, by source rank and channel: tensors, boxes there, sizes and places."""
    sources: dict[int, dict[int, list[Any]]] = {}
    for piece, begin in fetches:
        number, place = blocks[piece]
        entry = piece.tensor, _box(begin, piece.size), piece.size, place
        sources.setdefault(piece.sender, {}).setdefault(number, []).append(entry)
    # Each rank begins with another source, so that not all read from the first one at once.
    return {sender: sources[sender] for sender in sorted(sources, key=lambda sender: (sender - rank) % ranks)}


def _box(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box, made here once and not in each send."""
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _add_replicas(tasks: Mapping[int, dict[str, Any]], plan: TransferPlan, numbers: Mapping[str, int]) -> None:
    """Add what several source ranks hold, of which each computes the digest when they are compared."""
    for same in plan.tensor_sets:
        boxes = {
            tuple(start): tuple(size)
            for start, size in zip(same.pieces.starts.tolist(), same.pieces.sizes.tolist(), strict=True)
        }
        offsets, ends = same.source.offsets, same.source.offsets + same.source.sizes
        for start, size in boxes.items():
            end = [begin + length for begin, length in zip(start, size, strict=True)]
            holders = np.flatnonzero(((offsets <= start) & (ends >= end)).all(axis=1)).tolist()
            for rank in holders if len(holders) > 1 else ():
                begin = tuple(first - int(offset) for first, offset in zip(start, offsets[rank], strict=True))
                tasks[rank]["held"] += [((name, start), numbers[name], _box(begin, size)) for name in same.names]

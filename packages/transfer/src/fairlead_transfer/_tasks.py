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

    before: str | None
    pauses: bool
    after: str | None
    apply: str | None
    chunk_bytes: int

    @property
    def prepares(self) -> bool:
        """Whether `before` runs before the wait for the methods that run, which it may end."""
        return self.before is not None and not self.pauses

    def as_arguments(self) -> tuple[Any, ...]:
        """Return them for the commit of an end."""
        return None if self.prepares else self.before, self.after, self.apply, self.chunk_bytes


@dataclass(frozen=True)
class Tasks:
    """The tasks for the workers of both sides.

    Attributes:
        number: of these tasks.
        source: for each source rank.
        target: for each target rank.
        transports: the transport of each pair of ranks that exchange pieces.
    """

    number: int
    source: dict[int, dict[str, Any]]
    target: dict[int, dict[str, Any]]
    transports: dict[tuple[int, int], str] = field(default_factory=dict)

    def find_reads(self, ranks: Collection[int], nodes: Sequence[str]) -> dict[int, set[tuple[int, int]]]:
        """Return the target ranks that read over the network, one of each node, and what they read for all of it.

        Args:
            ranks: the target ranks that fetch.
            nodes: the node of each target rank.

        Returns:
            By rank: pairs of a source rank and the number of its channel.
        """
        if "tcp" not in self.transports.values():
            return {}
        reader_of: dict[str, int] = {}
        reads: dict[int, set[tuple[int, int]]] = {}
        for rank in sorted(ranks):
            for source, channels in self.target[rank]["sources"].items():
                kinds = self.source[source]["channels"]
                places = {(source, number) for number in channels if kinds[number]["kind"] == "tcp"}
                if places:
                    reads.setdefault(reader_of.setdefault(nodes[rank], rank), set()).update(places)
        return reads

    @staticmethod
    def find_reader(rank: int, reads: Collection[int], nodes: Sequence[str]) -> int | None:
        """Return the rank that reads over the network for the node of a rank; None if none does."""
        return next((reader for reader in reads if nodes[reader] == nodes[rank]), None)


class _Piece(NamedTuple):
    """A piece that a source rank stages."""

    kind: str  # the transport
    sender: int  # the rank
    at: int  # the number of the tensor
    start: tuple[int, ...]  # where it begins in the tensor
    size: tuple[int, ...]  # in each dim


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
    at_of = {name: at for at, name in enumerate(names)}
    transports: dict[tuple[int, int], str] = {}
    readers: dict[_Piece, set[int]] = {}
    fetches: dict[int, list[tuple[_Piece, tuple[int, ...]]]] = {}
    local: dict[int, list[Any]] = {}
    for same in plan.tensor_sets:
        pieces = same.pieces
        receivers = pieces.receivers.tolist()
        starts = list(map(tuple, pieces.starts.tolist()))
        sizes = list(map(tuple, pieces.sizes.tolist()))
        inside = list(map(tuple, (pieces.starts - same.target.offsets[pieces.receivers]).tolist()))
        own = pieces.local.tolist()
        for name, senders in zip(same.names, pieces.senders.tolist(), strict=True):
            at = at_of[name]
            for row, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
                if own[row]:
                    begin = tuple((pieces.starts[row] - same.source.offsets[receiver]).tolist())
                    boxes = _box(inside[row], sizes[row]), _box(begin, sizes[row])
                    local.setdefault(receiver, []).append((at, *boxes, sizes[row]))
                    continue
                if (sender, receiver) not in transports:
                    transports[sender, receiver] = transport(sender, receiver)
                piece = _Piece(transports[sender, receiver], sender, at, starts[row], sizes[row])
                readers.setdefault(piece, set()).add(receiver)
                fetches.setdefault(receiver, []).append((piece, inside[row]))

    channels: dict[int, list[dict[str, Any]]] = {}
    place: dict[_Piece, tuple[int, _Block]] = {}
    current: dict[tuple[int, str, frozenset[int]], int] = {}
    whole = _find_whole(readers, [source.layouts[name] for name in names])
    whole_blocks: dict[tuple[int, int], tuple[int, int, tuple[int, ...]]] = {}

    for piece in sorted(readers, key=lambda piece: KINDS.index(piece.kind)):
        kind, sender, at, start, size = piece
        mine, layout = channels.setdefault(sender, []), source.layouts[names[at]]
        nodes = plan.target_nodes[list(readers[piece])].tolist() if kind != "shared_memory" else ()
        key = sender, kind, frozenset(nodes)
        last = current.get(key)
        if last is None:
            last = current[key] = len(mine)
            mine.append({"kind": kind, "blocks": [], "size": 0})
        channel = mine[last]
        box = _box([begin - int(offset) for begin, offset in zip(start, layout.offsets[sender], strict=True)], size)
        if kind == "shared_memory" and (sender, at) in whole:
            all_of_it = tuple(layout.sizes[sender].tolist())
            if (sender, at) not in whole_blocks:
                whole_box = _box((0,) * len(all_of_it), all_of_it)
                whole_blocks[sender, at] = _add_block(channel, at, whole_box, all_of_it, layout)
            block = *whole_blocks[sender, at], box if all_of_it != size else None
        else:
            block = *_add_block(channel, at, box, size, layout), None
        place[piece] = last, block

    source_tasks = {
        rank: {
            "id": number,
            "library": source.library,
            "names": [source.own_names[name] for name in names],
            "dtypes": [dtypes[name] for name in names],
            "channels": channels.get(rank, []),
            "held": [],
        }
        for rank in range(len(plan.source_nodes))
    }
    _add_replicas(source_tasks, plan, at_of)
    target_tasks = {}
    for rank in range(len(plan.target_nodes)):
        sources: dict[int, dict[int, list[Any]]] = {}
        length = 0
        for piece, begin in fetches.get(rank, ()):
            channel_at, block = place[piece]
            ordered = sources.setdefault(piece.sender, {}).setdefault(channel_at, [])
            ordered.append((piece.at, _box(begin, piece.size), block))
            length += math.prod(piece.size) * target.layouts[names[piece.at]].itemsize
        # Each rank begins with another source, so that not all read from the first one at once.
        order = sorted(sources, key=lambda sender: (sender - rank) % len(plan.source_nodes))
        target_tasks[rank] = {
            "id": number,
            "library": target.library,
            "names": [target.own_names[name] for name in names],
            "source_names": [source.own_names[name] for name in names],
            "dtypes": [dtypes[name] for name in names],
            "shapes": [target.layouts[name].shape for name in names],
            "sources": {sender: sources[sender] for sender in order},
            "local": local.get(rank, []),
            "bytes": length,
        }
    return Tasks(number, source_tasks, target_tasks, transports)


# The number of a block in its channel, where it begins, its sizes, and the part of it that is meant.
_Block = tuple[int, int, tuple[int, ...], tuple[slice, ...] | None]


def _find_whole(pieces: Iterable[_Piece], layouts: Sequence[Layout]) -> set[tuple[int, int]]:
    """Return the senders and tensors of which all is wanted in shared memory: one copy is less work than many."""
    wanted: dict[tuple[int, int], int] = {}
    for kind, sender, at, _, size in pieces:
        wanted[sender, at] = wanted.get((sender, at), 0) + math.prod(size) * (kind == "shared_memory")
    return {(sender, at) for (sender, at), size in wanted.items() if size >= layouts[at].sizes[sender].prod()}


def _add_block(
    channel: dict[str, Any], at: int, box: tuple[slice, ...], size: tuple[int, ...], layout: Layout
) -> tuple[int, int, tuple[int, ...]]:
    """Add a block to a channel; return its number, offset and sizes."""
    added = len(channel["blocks"]), channel["size"], size
    channel["blocks"].append((at, box, size, channel["size"]))
    channel["size"] += -(-math.prod(size) * layout.itemsize // ALIGNED) * ALIGNED
    return added


def _box(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box, made here once and not in each send."""
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))


def _add_replicas(tasks: Mapping[int, dict[str, Any]], plan: TransferPlan, at_of: Mapping[str, int]) -> None:
    """Add what several source ranks hold, of which each computes the digest when they are compared."""
    for same in plan.tensor_sets:
        boxes = {
            tuple(start): tuple(size)
            for start, size in zip(same.pieces.starts.tolist(), same.pieces.sizes.tolist(), strict=True)
        }
        offsets, ends = same.source.offsets, same.source.offsets + same.source.sizes
        for start, size in boxes.items():
            end = [at + length for at, length in zip(start, size, strict=True)]
            holders = np.flatnonzero(((offsets <= start) & (ends >= end)).all(axis=1)).tolist()
            for rank in holders if len(holders) > 1 else ():
                begin = tuple(at - int(offset) for at, offset in zip(start, offsets[rank], strict=True))
                tasks[rank]["held"] += [((name, start), at_of[name], _box(begin, size), size) for name in same.names]

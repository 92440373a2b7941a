# SPDX-License-Identifier: Apache-2.0
"""From a plan to orders: what each source rank stages, and what each target rank fetches from whom.

Orders are plain data, because a worker may lack numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._descriptions import Tensors
from ._plan import TransferPlan

ALIGNED = 64


@dataclass(frozen=True)
class Orders:
    """The orders for the workers of both sides.

    Attributes:
        number: of these orders.
        source: for each source rank.
        target: for each target rank.
        transports: the transport of each pair of ranks that exchange pieces.
    """

    number: int
    source: dict[int, dict[str, Any]]
    target: dict[int, dict[str, Any]]
    transports: dict[tuple[int, int], str] = field(default_factory=dict)


def make_orders(
    number: int,
    plan: TransferPlan,
    source: Tensors,
    target: Tensors,
    dtypes: Mapping[str, str],
    transport: Callable[[int, int], str],
) -> Orders:
    """Return the orders that carry a plan out.

    Args:
        number: of these orders.
        plan: who sends which piece to whom.
        source: the tensors of the source.
        target: the tensors of the target.
        dtypes: in which dtype each tensor travels.
        transport: returns the transport of a pair of ranks.
    """
    names = list(plan.names)
    at_of = {name: at for at, name in enumerate(names)}
    transports: dict[tuple[int, int], str] = {}
    fetches: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]]] = {}
    local: dict[int, list[Any]] = {}
    nodes_of_piece: dict[tuple[int, int, tuple[int, ...]], set[int]] = {}
    shared: dict[tuple[int, int, tuple[int, ...]], None] = {}
    sizes_of: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    for family in plan.families:
        pieces = family.pieces
        receivers = pieces.receivers.tolist()
        starts = list(map(tuple, pieces.starts.tolist()))
        sizes = list(map(tuple, pieces.sizes.tolist()))
        offsets = family.target.offsets[pieces.receivers]
        inside = list(map(tuple, (pieces.starts - offsets).tolist()))
        own = pieces.local.tolist()
        for name, senders in zip(family.names, pieces.senders.tolist(), strict=True):
            at = at_of[name]
            for row, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
                if own[row]:
                    begin = tuple((pieces.starts[row] - family.source.offsets[receiver]).tolist())
                    boxes = _box(inside[row], sizes[row]), _box(begin, sizes[row])
                    local.setdefault(receiver, []).append((at, *boxes, sizes[row]))
                    continue
                kind = transports.get((sender, receiver))
                if kind is None:
                    kind = transports[sender, receiver] = transport(sender, receiver)
                key = sender, at, starts[row]
                sizes_of[at, starts[row]] = sizes[row]
                if kind == "shared_memory":
                    shared[key] = None
                else:
                    nodes_of_piece.setdefault(key, set()).add(int(plan.target_nodes[receiver]))
                fetches.setdefault(receiver, []).append((at, inside[row], sizes[row], starts[row], sender))

    made: dict[int, dict[str, Any]] = {}
    place: dict[tuple[int, str, int, tuple[int, ...]], tuple[int, int, int]] = {}
    channels: dict[tuple[int, str, frozenset[int]], int] = {}
    groups = [(key, "shared_memory", frozenset[int]()) for key in shared]
    groups += [(key, "object_store", frozenset(nodes)) for key, nodes in nodes_of_piece.items()]
    for (sender, at, start), kind, nodes in groups:
        orders = made.setdefault(sender, {"channels": []})
        channel_key = sender, kind, nodes
        if channel_key not in channels:
            channels[channel_key] = len(orders["channels"])
            orders["channels"].append({"kind": kind, "pieces": [], "size": 0})
        channel = orders["channels"][channels[channel_key]]
        name, size = names[at], sizes_of[at, start]
        layout = source.layouts[name]
        begin = tuple(one - int(offset) for one, offset in zip(start, layout.offsets[sender], strict=True))
        place[sender, kind, at, start] = channels[channel_key], len(channel["pieces"]), channel["size"]
        channel["pieces"].append((at, _box(begin, size), size, channel["size"]))
        length = layout.itemsize
        for one in size:
            length *= one
        channel["size"] += -(-length // ALIGNED) * ALIGNED

    source_orders = {
        rank: {
            "id": number,
            "library": source.library,
            "names": [source.own_names[name] for name in names],
            "dtypes": [dtypes[name] for name in names],
            "channels": made.get(rank, {"channels": []})["channels"],
            "held": [],
        }
        for rank in range(len(plan.source_nodes))
    }
    _add_replicas(source_orders, plan, at_of)
    target_orders = {}
    for rank in range(len(plan.target_nodes)):
        sources: dict[int, dict[int, list[Any]]] = {}
        for at, begin, size, start, sender in fetches.get(rank, ()):
            channel, piece, offset = place[sender, transports[sender, rank], at, start]
            sources.setdefault(sender, {}).setdefault(channel, []).append((at, _box(begin, size), size, piece, offset))
        # Each rank begins with another source, so that not all read from the first one at once.
        order = sorted(sources, key=lambda sender: (sender - rank) % len(plan.source_nodes))
        target_orders[rank] = {
            "id": number,
            "library": target.library,
            "names": [target.own_names[name] for name in names],
            "source_names": [source.own_names[name] for name in names],
            "dtypes": [dtypes[name] for name in names],
            "shapes": [target.layouts[name].shape for name in names],
            "sources": {sender: sources[sender] for sender in order},
            "local": local.get(rank, []),
        }
    return Orders(number, source_orders, target_orders, transports)


def _box(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box, made here once and not in each send."""
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))


def _add_replicas(orders: Mapping[int, dict[str, Any]], plan: TransferPlan, at_of: Mapping[str, int]) -> None:
    """Add what several source ranks hold, of which each computes the digest when the plan is verified."""
    for family in plan.families:
        boxes = {
            tuple(start): tuple(size)
            for start, size in zip(family.pieces.starts.tolist(), family.pieces.sizes.tolist(), strict=True)
        }
        offsets, ends = family.source.offsets, family.source.offsets + family.source.sizes
        for start, size in boxes.items():
            end = [at + length for at, length in zip(start, size, strict=True)]
            holders = np.flatnonzero(((offsets <= start) & (ends >= end)).all(axis=1)).tolist()
            for rank in holders if len(holders) > 1 else ():
                begin = tuple(at - int(offset) for at, offset in zip(start, offsets[rank], strict=True))
                orders[rank]["held"] += [((name, start), at_of[name], _box(begin, size), size) for name in family.names]

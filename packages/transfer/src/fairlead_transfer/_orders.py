# SPDX-License-Identifier: Apache-2.0
"""From a plan to orders: what each source rank stages, and what each target rank fetches from whom.

Orders are plain data, because a worker may lack numpy.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ._buckets import ALIGNED, bucket_bytes, split_pieces
from ._descriptions import Tensors
from ._layout import Layout
from ._plan import TransferPlan


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
class Orders:
    """The orders for the workers of both sides.

    Attributes:
        number: of these orders.
        source: for each source rank.
        target: for each target rank.
        transports: the transport of each pair of ranks that exchange pieces.
        bytes_between_nodes: what they move from one node to another.
    """

    number: int
    source: dict[int, dict[str, Any]]
    target: dict[int, dict[str, Any]]
    transports: dict[tuple[int, int], str] = field(default_factory=dict)
    bytes_between_nodes: int = 0


def make_orders(
    number: int,
    plan: TransferPlan,
    source: Tensors,
    target: Tensors,
    dtypes: Mapping[str, str],
    transport: Callable[[int, int], str],
    *,
    relays: bool = True,
    most: int | None = None,
) -> Orders:
    """Return the orders that carry a plan out.

    `relays` says whether a rank may relay what other ranks of its node read by NIXL from another node. With `most`,
    each channel is a bucket of at most so many bytes, and a source rank stages them one after the other.
    """
    names = list(plan.names)
    at_of = {name: at for at, name in enumerate(names)}
    transports: dict[tuple[int, int], str] = {}
    fetches: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]]] = {}
    local: dict[int, list[Any]] = {}
    nodes_of_piece: dict[tuple[int, int, tuple[int, ...]], set[int]] = {}
    shared: dict[tuple[int, int, tuple[int, ...]], None] = {}
    nixl: dict[tuple[int, int, tuple[int, ...]], set[int]] = {}
    sizes_of: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    for same in plan.tensor_sets:
        pieces = same.pieces if most is None else split_pieces(same.pieces, same.source.itemsize, most)
        receivers = pieces.receivers.tolist()
        starts = list(map(tuple, pieces.starts.tolist()))
        sizes = list(map(tuple, pieces.sizes.tolist()))
        offsets = same.target.offsets[pieces.receivers]
        inside = list(map(tuple, (pieces.starts - offsets).tolist()))
        own = pieces.local.tolist()
        for name, senders in zip(same.names, pieces.senders.tolist(), strict=True):
            at = at_of[name]
            for row, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
                if own[row]:
                    begin = tuple((pieces.starts[row] - same.source.offsets[receiver]).tolist())
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
                elif kind == "nixl":
                    nixl.setdefault(key, set()).add(receiver)
                else:
                    nodes_of_piece.setdefault(key, set()).add(int(plan.target_nodes[receiver]))
                fetches.setdefault(receiver, []).append((at, inside[row], sizes[row], starts[row], sender))

    made: dict[int, dict[str, Any]] = {}
    place: dict[tuple[int, str, int, tuple[int, ...]], tuple[int, int, _Block]] = {}
    channels: dict[tuple[int, str, frozenset[int]], int] = {}
    # What the same ranks read is next to each other, so that it is one read where it is packed.
    read = sorted(nixl, key=lambda key: sorted(nixl[key])) if most is None else nixl
    groups = [
        (key, kind, frozenset[int]()) for kind, keys in (("shared_memory", shared), ("nixl", read)) for key in keys
    ]
    groups += [(key, "object_store", frozenset(nodes)) for key, nodes in nodes_of_piece.items()]
    whole = _find_whole(shared if most is None else (), sizes_of, [source.layouts[name] for name in names])
    for (sender, at, start), kind, nodes in groups:
        orders = made.setdefault(sender, {"channels": []})
        channel_key = sender, kind, nodes
        layout, size = source.layouts[names[at]], sizes_of[at, start]
        if channel_key in channels and most is not None:
            reached = orders["channels"][channels[channel_key]]["size"] + _aligned(size, layout)
            if reached > bucket_bytes(kind, most):
                del channels[channel_key]
        if channel_key not in channels:
            channels[channel_key] = len(orders["channels"])
            orders["channels"].append({"kind": kind, "blocks": [], "pieces": [], "size": 0, "whole": {}})
        channel = orders["channels"][channels[channel_key]]
        begin = tuple(one - int(offset) for one, offset in zip(start, layout.offsets[sender], strict=True))
        box = _box(begin, size)
        if kind == "shared_memory" and (sender, at) in whole:
            all_of_it = tuple(layout.sizes[sender].tolist())
            if at not in channel["whole"]:
                channel["whole"][at] = _add_block(
                    channel, at, _box((0,) * len(all_of_it), all_of_it), all_of_it, layout
                )
            block = *channel["whole"][at], box if all_of_it != size else None
        else:
            block = *_add_block(channel, at, box, size, layout), None
        place[sender, kind, at, start] = channels[channel_key], len(channel["pieces"]), block
        channel["pieces"].append((at, box))
    for orders in made.values():
        largest = max(channel["size"] for channel in orders["channels"])
        for channel in orders["channels"]:
            del channel["whole"]
            if most is not None:  # they share the memory of the largest
                channel.update(size=largest, readers=[])

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
        length = 0
        for at, begin, size, start, sender in fetches.get(rank, ()):
            channel, piece, block = place[sender, transports[sender, rank], at, start]
            ordered = sources.setdefault(sender, {}).setdefault(channel, [])
            if most is not None and not ordered:
                made[sender]["channels"][channel]["readers"].append(rank)
            ordered.append((at, _box(begin, size), piece, block))
            length += math.prod(size) * target.layouts[names[at]].itemsize
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
            "bytes": length,
            "device": target.devices.get(rank, "cpu"),
            "relays": [],
        }
    crossing = plan.bytes_between_nodes
    if relays:
        _add_relays(target_orders, plan, transports)
    else:
        crossing = sum(
            math.prod(size) * target.layouts[names[at]].itemsize
            for rank, wanted in fetches.items()
            for at, _, size, _, sender in wanted
            if plan.source_nodes[sender] != plan.target_nodes[rank]
        )
    return Orders(number, source_orders, target_orders, transports, crossing)


def _add_relays(
    orders: Mapping[int, dict[str, Any]], plan: TransferPlan, transports: Mapping[tuple[int, int], str]
) -> None:
    """Have what several ranks of a node read by NIXL from another node cross once: the lowest of them relays it.

    A rank waits only for lower ranks. In its orders, the relaying rank `r` is source `-1 - r`, and has one channel.
    """
    first: dict[tuple[int, int, int, Any], tuple[int, int]] = {}
    relayed: dict[tuple[int, int, int, Any], int] = {}
    for rank, mine in sorted(orders.items()):
        node = plan.target_nodes[rank]
        for sender, channels in list(mine["sources"].items()):
            if transports[sender, rank] != "nixl" or plan.source_nodes[sender] == node:
                continue
            for number, ordered in list(channels.items()):
                kept: list[Any] = []
                for one in ordered:
                    at, box, piece, (_, _, sizes, _) = one
                    key = sender, number, piece, node
                    if key not in first:
                        first[key] = rank, len(kept)
                        kept.append(one)
                        continue
                    relay, position = first[key]
                    if key not in relayed:
                        relayed[key] = len(orders[relay]["relays"])
                        orders[relay]["relays"].append((sender, number, position))
                    index = relayed[key]
                    mine["sources"].setdefault(-1 - relay, {}).setdefault(0, []).append(
                        (at, box, index, (index, 0, sizes, None))
                    )
                channels[number] = kept
                if not kept:
                    del channels[number]
            if not channels:
                del mine["sources"][sender]


# The number of a block in its channel, where it begins, its sizes, and the part of it that is meant.
_Block = tuple[int, int, tuple[int, ...], tuple[slice, ...] | None]


def _find_whole(
    keys: Iterable[tuple[int, int, tuple[int, ...]]],
    sizes_of: Mapping[tuple[int, tuple[int, ...]], tuple[int, ...]],
    layouts: Sequence[Layout],
) -> set[tuple[int, int]]:
    """Return the senders and tensors of which all is wanted: one copy is less work than many."""
    wanted: dict[tuple[int, int], int] = {}
    for sender, at, start in keys:
        wanted[sender, at] = wanted.get((sender, at), 0) + math.prod(sizes_of[at, start])
    return {(sender, at) for (sender, at), size in wanted.items() if size >= layouts[at].sizes[sender].prod()}


def _add_block(
    channel: dict[str, Any], at: int, box: tuple[slice, ...], size: tuple[int, ...], layout: Layout
) -> tuple[int, int, tuple[int, ...]]:
    """Add a block to a channel; return its number, offset and sizes."""
    added = len(channel["blocks"]), channel["size"], size
    channel["blocks"].append((at, box, size, channel["size"]))
    channel["size"] += _aligned(size, layout)
    return added


def _aligned(size: tuple[int, ...], layout: Layout) -> int:
    """Return the bytes that a block takes in a channel."""
    return -(-math.prod(size) * layout.itemsize // ALIGNED) * ALIGNED


def _box(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box, made here once and not in each send."""
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))


def _add_replicas(orders: Mapping[int, dict[str, Any]], plan: TransferPlan, at_of: Mapping[str, int]) -> None:
    """Add what several source ranks hold, of which each computes the digest when the plan is verified."""
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
                orders[rank]["held"] += [((name, start), at_of[name], _box(begin, size), size) for name in same.names]

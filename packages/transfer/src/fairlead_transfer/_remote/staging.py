# SPDX-License-Identifier: Apache-2.0
"""How a source rank makes whole tensors available to those that need them."""

from collections.abc import Mapping, Sequence
from typing import Any

from .tensors import digest, part
from .transport import Block, Blocked, Transport


def stage_whole(
    tools: Any,
    orders: Mapping[str, Any],
    tensors: Sequence[Any],
    transports: Mapping[str, Transport],
    verify: bool,
    fresh: bool,
) -> list[dict[str, Any]]:
    """Stage each channel by its transport; return where it is, or why it cannot be, and digests if they are wanted."""
    return [
        stage_channel(tools, orders, tensors, transports, number, channel, orders["id"], verify, fresh)
        for number, channel in enumerate(orders["channels"])
    ]


def stage_channel(
    tools: Any,
    orders: Mapping[str, Any],
    tensors: Sequence[Any],
    transports: Mapping[str, Transport],
    number: int,
    channel: Mapping[str, Any],
    order: Any,
    verify: bool,
    fresh: bool,
) -> dict[str, Any]:
    """Stage one channel, under a number of its transport; see `stage_whole`."""
    blocks = [
        Block(tensors[at], box, orders["dtypes"][at], sizes, offset) for at, box, sizes, offset in channel["blocks"]
    ]
    try:
        staged = transports[channel["kind"]].stage(tools, number, channel, blocks, order, fresh)
    except Blocked as error:
        return {"kind": channel["kind"], "blocked": str(error), "digests": []}
    found = {"kind": channel["kind"], "staged": staged}
    if verify:
        found["digests"] = [find_digest(tools, orders, tensors, at, box) for at, box in channel["pieces"]]
    return found


def find_digest(tools: Any, orders: Mapping[str, Any], tensors: Sequence[Any], at: int, box: Any) -> int:
    """Return the digest of a piece, by the number of its tensor in the orders."""
    return digest(tools, part(tensors[at], box), orders["dtypes"][at])

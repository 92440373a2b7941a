# SPDX-License-Identifier: Apache-2.0
"""How a target rank gets a channel of a source rank, and what it says if that fails."""

from collections.abc import Mapping, Sequence
from typing import Any

from .faults import commit_fault
from .staging import Context
from .tensors import digest
from .transport import Blocked, Late, Lost, Read, Wanted


def fetch_channel(
    context: Context,
    source: int,
    number: int,
    channel: Mapping[str, Any],
    wanted: Sequence[Wanted],
    deadline: float,
    into: Sequence[Any] | None,
) -> list[Any]:
    """Return the wanted parts of a channel, by NIXL in tensors of the target if these are given; see `Transport`."""
    if "blocked" in channel:
        raise Blocked(channel["blocked"])
    transport = context.transports[channel["kind"]]
    order = context.orders["id"], number, len(wanted)
    return transport.fetch(Read(context.tools, source, number, channel["staged"], wanted, order, deadline, into))


def find_differing(
    context: Context, source: int, channel: Mapping[str, Any], ordered: Sequence[Any], pieces: Sequence[Any]
) -> list[tuple[str, int]]:
    """Return the name and the source of each piece whose bytes are not those that were sent."""
    commit_fault("target", "verify")
    orders = context.orders
    return [
        (orders["names"][at], source)
        for (at, _, piece, _), value in zip(ordered, pieces, strict=True)
        if digest(context.tools, value, orders["dtypes"][at]) != channel["digests"][piece]
    ]


def explain(source: int, channel: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """Return the reply to the driver about an error of a transport."""
    if isinstance(error, Blocked):
        return {"blocked": {source: (channel["kind"], str(error))}}
    if isinstance(error, Lost):
        return {"lost": source, "reason": str(error)}
    return {"waiting": [source]} if isinstance(error, Late) else {"overwritten": source}

# SPDX-License-Identifier: Apache-2.0
"""How a target rank gets a channel of a source rank, and what it says if that fails."""

from collections.abc import Mapping, Sequence
from typing import Any

from .delta import Change
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


def find_clashing(
    context: Context, pieces: Sequence[tuple[int, Any, Any]], changes: Sequence[Change]
) -> list[tuple[str, str]]:
    """Return the name of each tensor that shares its memory with another and gets something else, with the reason."""
    orders, places = context.orders, dict[Any, list[tuple[int, str]]]()
    ordered = [piece for channels in orders["sources"].values() for all in channels.values() for piece in all]
    for at, box, *_ in (*ordered, *orders["local"]):
        if (local := context.tensors[at]) is not None:  # else a method of the user's takes it
            place = *context.tools.memory(local), tuple(local.shape), orders["dtypes"][at], str(box)
            places.setdefault(place, []).append((at, str(box)))
    tied = [keys for keys in places.values() if len(keys) > 1]
    if not tied:
        return []
    shared, gets = {key for keys in tied for key in keys}, dict[tuple[int, str], object]()
    for at, box, where, values, _ in changes:
        gets[at, str(box)] = where.tobytes(), bytes(values)
    for at, box, value in pieces:
        if (at, str(box)) in shared:
            gets[at, str(box)] = digest(context.tools, value, orders["dtypes"][at])
    names = {key[0]: keys[0][0] for keys in tied for key in keys[1:] if gets.get(key) != gets.get(keys[0])}
    why = "the target keeps it in the memory of {!r}, and they differ in the source: exclude one of them"
    return [(orders["names"][at], why.format(orders["names"][first])) for at, first in names.items()]


def explain(source: int, channel: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """Return the reply to the driver about an error of a transport."""
    if isinstance(error, Blocked):
        return {"blocked": {source: (channel["kind"], str(error))}}
    if isinstance(error, Lost):
        return {"lost": source, "reason": str(error)}
    return {"waiting": [source]} if isinstance(error, Late) else {"overwritten": source}

# SPDX-License-Identifier: Apache-2.0
"""How a target rank gets a channel of a source rank, and what it says if that fails."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .sockets import Late
from .staging import Context
from .tensors import digest
from .transport import Blocked, Lost, Read, Wanted

# The number of a tensor in the tasks, and a box of it as text.
_Key = tuple[int, str]


def fetch_channel(
    context: Context,
    source: int,
    number: int,
    channel: Mapping[str, Any],
    wanted: Sequence[Wanted],
    deadline: float,
) -> list[Any]:
    """Return the wanted parts of a channel; see `Transport`."""
    if "blocked" in channel:
        raise Blocked(channel["blocked"])
    transport = context.transports[channel["kind"]]
    order = context.tasks["id"], number, len(wanted)
    return transport.fetch(Read(context.tools, source, number, channel["staged"], wanted, order, deadline))


class Ties:
    """The pieces of a target that share their memory with others; what they get has to be the same."""

    def __init__(self, context: Context) -> None:
        self._context = context
        tasks, places = context.tasks, dict[Any, list[_Key]]()
        ordered = [piece for channels in tasks["sources"].values() for all in channels.values() for piece in all]
        for at, box, *_ in (*ordered, *tasks["local"]):
            if (local := context.tensors[at]) is not None:  # else a method of the user's takes it
                place = *context.tools.memory(local), tuple(local.shape), tasks["dtypes"][at], str(box)
                places.setdefault(place, []).append((at, str(box)))
        # Of each piece that shares its memory, the first one there.
        self._first = {key: keys[0] for keys in places.values() if len(keys) > 1 for key in keys}
        self._gets: dict[_Key, object] = {}

    def note(self, pieces: Iterable[tuple[int, Any, Any]]) -> None:
        """Note the values that pieces get."""
        for at, box, value in pieces:
            if (at, str(box)) in self._first:
                dtype = self._context.tasks["dtypes"][at]
                self._gets[at, str(box)] = digest(self._context.tools, value, dtype)

    def find_clashing(self) -> list[tuple[str, str]]:
        """Return the name of each tensor that gets something else than the one whose memory it shares, and why."""
        tasks, gets = self._context.tasks, self._gets
        names = {key[0]: first[0] for key, first in self._first.items() if gets.get(key) != gets.get(first)}
        why = "the target keeps it in the memory of {!r}, and they differ in the source: exclude one of them"
        return [(tasks["names"][at], why.format(tasks["names"][first])) for at, first in names.items()]


def explain(source: int, channel: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """Return the reply to the driver about an error of a transport."""
    if isinstance(error, Blocked):
        return {"blocked": {source: (channel["kind"], str(error))}}
    if isinstance(error, Lost):
        return {"lost": source, "reason": str(error)}
    return {"waiting": [source]} if isinstance(error, Late) else {"overwritten": source}

# SPDX-License-Identifier: Apache-2.0
"""The tensors of an end as its tasks number them, and how a source rank makes them available."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .tensors import digest, part
from .transport import Block, Blocked, Transport, Write


class Context(NamedTuple):
    """What all steps of an attempt work with in one process."""

    tools: Any  # the library of the tensors
    tasks: Mapping[str, Any]  # of this end
    tensors: Sequence[Any]  # all that this process holds, by the numbers in the tasks
    transports: Mapping[str, Transport]  # by name

    def part(self, at: int, box: tuple[slice, ...]) -> Any:
        """Return a piece of a tensor."""
        return part(self.tensors[at], box)

    def digest(self, at: int, box: tuple[slice, ...]) -> int:
        """Return the digest of a piece."""
        return digest(self.tools, self.part(at, box), self.tasks["dtypes"][at])


def stage_channel(context: Context, number: int, channel: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
    """Stage a channel by its transport, under a number there; return where it is, or why it cannot be."""
    dtypes = context.tasks["dtypes"]
    blocks = [
        Block(context.tensors[at], box, dtypes[at], sizes, offset) for at, box, sizes, offset in channel["blocks"]
    ]
    try:
        write = Write(context.tools, number, channel["size"], blocks, context.tasks["id"], fresh)
        staged = context.transports[channel["kind"]].stage(write)
    except Blocked as error:
        return {"kind": channel["kind"], "blocked": str(error)}
    return {"kind": channel["kind"], "staged": staged}

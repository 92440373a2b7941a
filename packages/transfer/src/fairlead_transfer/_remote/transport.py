# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport to the ends of a link, and its errors."""

import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from .sockets import Late


class Block(NamedTuple):
    """A part of a tensor that a source rank stages."""

    tensor: Any  # all that this rank holds of the tensor
    box: tuple[slice, ...]  # the part of it
    dtype: str  # in which it travels
    sizes: tuple[int, ...]  # of the box
    offset: int  # where it begins in the channel, in bytes


class Write(NamedTuple):
    """What a source rank makes available in a channel."""

    tools: Any  # the library of the tensors
    number: int  # of the channel
    size: int  # of all blocks with what is between them, in bytes
    blocks: Sequence[Block]
    order: Any  # what identifies the tasks; blocks of the same ones have the same sizes and offsets
    fresh: bool  # whether a target may still use what was staged before, whose memory is then kept for it


class Wanted(NamedTuple):
    """A part of a block that a target rank fetches."""

    block: int  # the number of the block in its channel
    offset: int  # where the block begins in the channel, in bytes
    sizes: tuple[int, ...]  # of the block
    dtype: str  # in which it travels
    inside: tuple[slice, ...] | None  # the part of the block; None for all of it


class Blocked(Exception):
    """These two processes cannot use this transport; says why."""


class Lost(Exception):
    """The staged data of a source rank is gone, as after its death; says why."""


class Overwritten(Exception):
    """The memory of a source rank was written since it was staged."""


class Read(NamedTuple):
    """What a target rank wants of a channel of a source rank."""

    tools: Any  # the library of the tensors
    source: int  # the source rank
    number: int  # of the channel
    staged: Any  # what `stage` returned there
    wanted: Sequence[Wanted]  # the parts
    order: Any  # what identifies the tasks and the channel; with the same, the same is wanted
    deadline: float  # when to give up, in `time.monotonic`


class Transport:
    """One way between processes, for one side of a link in one worker."""

    def stage(self, write: Write) -> Any:
        """Make the blocks of a channel available; return what a target rank needs to find them.

        Raises:
            Blocked: this process cannot use the transport.
        """
        raise NotImplementedError

    def fetch(self, read: Read) -> list[Any]:
        """Return a tensor for each wanted part of a channel; they are valid until the next `stage` or `release`.

        Raises:
            Blocked, Lost, Overwritten, Late: it did not work.
        """
        raise NotImplementedError

    def is_unchanged(self) -> bool:
        """Return whether all that was fetched since the last `release` still is what was staged."""
        return True

    def release(self) -> None:
        """Forget what was fetched."""

    def keep_only(self, numbers: Collection[int]) -> None:
        """Give back what is kept of other channels than these, which this source rank stages."""

    def forget_others(self, places: Collection[tuple[int, int]]) -> None:
        """Give back what is kept of other channels than these, each given by its source rank and its number."""

    def close(self) -> None:
        """Give everything back."""


def fetch_value(ref: ray.ObjectRef[Any], deadline: float) -> Any:
    """Return the value of a reference, or raise Late; Ray warns of `ray.get` on every thread of an asyncio actor."""
    future = ref.future()
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        if future.done():  # it came at the last moment, or this is the task's own error
            return future.result()
        raise Late from error


def fetch_stored(ref: ray.ObjectRef[Any], deadline: float) -> Any:
    """Return a value that a source rank has stored, or raise Late or Lost."""
    try:
        return fetch_value(ref, deadline)
    except ray.exceptions.RayError as error:
        raise Lost(" ".join(str(error).split())[:200]) from error


def await_replies(
    staged: Mapping[int, Any], sources: Iterable[int], deadline: float, key: str = "staged"
) -> tuple[dict[int, Any], dict[str, Any] | None]:
    """Return the replies of some source ranks, and what to answer if one does not come or lacks a key."""
    replies: dict[int, Any] = {}
    for source in sources:
        reply = staged[source]
        if not isinstance(reply, ray.ObjectRef):
            replies[source] = reply
            continue
        try:
            replies[source] = fetch_value(reply, deadline)
        except Late:
            return replies, {"waiting": [source]}
        except Exception as error:  # noqa: BLE001  the driver sees the same error of the source itself
            return replies, {"lost": source, "reason": " ".join(str(error).split())[:200]}
    unstaged = next((source for source, reply in replies.items() if key not in reply), None)
    return replies, None if unstaged is None else {"unstaged": unstaged}


def explain_failure(reply: Mapping[str, Any]) -> str:
    """Return why a target rank has not fetched its tensors, for people."""
    if "waiting" in reply:
        return f"what source rank {reply['waiting'][0]} holds did not arrive by the deadline"
    if "lost" in reply:
        return f"source rank {reply['lost']} was lost: {reply['reason']}"
    if "refused" in reply:
        name, why = reply["refused"][0]
        return f"{name!r}: {why}"
    if "unrelayed" in reply:
        return f"the rank that reads over the network for its node did not: {reply['unrelayed']}"
    return f"it could not be read: {reply}"


def describe_error(error: Exception) -> dict[str, Any]:
    """Return the part of a reply that reports an exception of a method of the user's."""
    text = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}", "traceback": text}

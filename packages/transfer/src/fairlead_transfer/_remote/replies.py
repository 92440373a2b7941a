# SPDX-License-Identifier: Apache-2.0
"""What an end replies. Replies travel as plain tuples, because a worker may lack this package."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

# A channel that a source rank has staged: the transport, and what it says of where the channel is.
Channel = tuple[str, Any]
# A source rank and the number of its channel.
Place = tuple[int, int]
# Names of tensors, and why they cannot travel.
Refused = Sequence[tuple[str, str]]

Unreadable = Literal["late", "lost", "overwritten"]


class Described(NamedTuple):
    """The reply of a rank that was asked for its tensors, or to stage them; "superseded" by a later attempt."""

    outcome: Literal["done", "superseded"] = "done"
    number: int = 0  # of the description
    tensors: list[Any] | None = None  # the description; None if the driver has it
    refused: Refused = ()
    collect_s: float = 0.0
    channels: Sequence[Channel] | None = None  # None if nothing was staged
    digests: Mapping[Any, int] | None = None  # of the boxes that several source ranks hold, if they are compared
    stage_s: float = 0.0


class Fetched(NamedTuple):
    """The reply of a target rank that was asked to fetch."""

    # "unplanned": it lacks the tasks, as after a restart.
    outcome: Literal["done", "superseded", "unplanned", "refused"] | Unreadable = "done"
    refused: Refused = ()
    source: int = -1  # the source rank that could not be read
    reason: str = ""  # why
    relays: Mapping[Place, Any] | None = None  # where other ranks of the node find what this one has read
    length: int = 0  # bytes
    move_s: float = 0.0


class Committed(NamedTuple):
    """The reply of a target rank that was asked to commit; "missing": it has staged nothing of the version."""

    outcome: Literal["done", "superseded", "missing", "failed"] = "done"
    version: int = -1  # which it holds
    error: str = ""  # of a method of the user's, with its traceback
    inconsistent: bool = False  # whether some tensors are of the new version and others are not
    commit_s: float = 0.0

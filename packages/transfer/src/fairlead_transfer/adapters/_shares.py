# SPDX-License-Identifier: Apache-2.0
"""The memory of a bucket: the share that a sender offers, and how a receiver gets all shares.

Both have two of everything, so that senders fill one bucket while receivers copy the one before it. After `close`
nothing is opened any more: a thread whose caller has given up may still run.
"""

import threading
from collections.abc import Mapping
from typing import Any

from .._remote.segment import Mapping as Mapped
from .._remote.segment import Segment
from .._remote.server import Reader, Server, Wish
from .._remote.tensors import library
from ._buckets import BucketShape
from ._members import Membership

# What `Segment.end` returns.
Description = tuple[Any, ...]
ENDED = "The transfer has ended: the engine was finalized, or its caller has given up."


class Segments:
    """The segments of the last two buckets, made when they are needed."""

    def __init__(self, size: int, server: Server | None = None) -> None:
        self._size = size
        self._server = server
        self._segments: dict[int, Segment] | None = {}
        self._lock = threading.Lock()

    def begin(self, bucket: int) -> memoryview:
        """Return the memory of a bucket; what it held, two buckets ago, is invalid from now on."""
        with self._lock:
            if self._segments is None:
                raise ValueError(ENDED)
            segment = self._segments.get(bucket % 2)
            if segment is None:
                segment = self._segments[bucket % 2] = Segment(self._size)
                if self._server is not None:
                    self._server.offer(segment)
        return segment.begin()

    def end(self, bucket: int) -> Description:
        """Return where others find a bucket, which is filled."""
        return (self._segments or {})[bucket % 2].end()

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            segments, self._segments = self._segments or {}, None
        for segment in segments.values():
            if self._server is not None:
                self._server.withdraw(segment)
            segment.close()


class Intake:
    """How a receiver gets buckets: from senders on its node, from those elsewhere, or from the reader of its node."""

    def __init__(self, shape: BucketShape, membership: Membership) -> None:
        self._shape = shape
        self._me = membership
        self._reader = Reader()
        self._mapped: dict[bytes, Mapped] | None = {}
        self._relays = Segments(shape.capacity)
        self._lock = threading.Lock()

    def map_whole(self, description: Description, filled: int, memory: Any) -> None:
        """Copy a bucket that the reader of this node has read; BufferError if it is another one."""
        self._copy(description, [(0, filled)], memory)

    def read(
        self,
        bucket: int,
        staged: Mapping[int, Description],
        filled: int,
        memory: Any,
        *,
        relays: bool,
        deadline: float,
    ) -> Description | None:
        """Get all shares of a bucket.

        Args:
            bucket: its number.
            staged: where the share of each sender is.
            filled: the bytes in the bucket.
            memory: where they go.
            relays: whether others on this node get the bucket from this process.
            deadline: when to give up.

        Returns:
            Where the others find the bucket.

        Raises:
            OSError: the memory of a sender on this node cannot be opened.
            BufferError: a sender on this node has filled the share again.
            Unread: a sender elsewhere is late or lost, or has filled the share again.
        """
        place = self._relays.begin(bucket) if relays else memory
        wishes: dict[int, list[Wish]] = {}
        for sender, description in staged.items():
            stripes = self._shape.find_stripes(sender, filled)
            if self._me.nodes[sender] == self._me.nodes[self._me.number]:
                self._copy(description, stripes, place)
            elif stripes:
                parts = [memoryview(place)[begin : begin + length] for begin, length in stripes]
                token, generation = description[3:]
                wishes[sender] = [Wish(self._me.addresses[sender], self._me.secret, token, generation, 0, parts)]
        self._reader.read(wishes, deadline)
        if not relays:
            return None
        _view(memory, filled).copy_(_view(place, filled))
        return self._relays.end(bucket)

    def _copy(self, description: Description, stripes: list[tuple[int, int]], place: Any) -> None:
        with self._lock:
            if self._mapped is None:
                raise ValueError(ENDED)
            token = description[3]
            mapped = self._mapped[token] = self._mapped.get(token) or Mapped(description)
        content, to, done = _view(mapped.content(), description[2]), _view(place, self._shape.capacity), 0
        for begin, length in stripes:
            to[begin : begin + length].copy_(content[done : done + length])
            done += length
        if not mapped.holds(description[4]):
            raise BufferError("the share of a sender was overwritten before it was copied")

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._mapped = None
        self._reader.close()
        self._relays.close()


def _view(memory: Any, length: int) -> Any:
    return library("torch").view(memory, "uint8", 0, (length,))

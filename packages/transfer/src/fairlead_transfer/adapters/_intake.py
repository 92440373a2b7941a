# SPDX-License-Identifier: Apache-2.0
"""How a receiver gets buckets: from senders on its node, from those elsewhere, or from the reader of its node."""

import threading
from typing import Any

from .._remote.segment import ENDED, Description, Segments, Unread
from .._remote.segment import Mapping as Mapped
from .._remote.server import Reader, Wish
from .._remote.tensors import library
from ._buckets import BucketShape
from ._members import Membership
from ._transfer import Bucket


class Intake:
    """The memory that a receiver has of others. After `close` nothing is opened any more: a thread may still run."""

    def __init__(self, shape: BucketShape, membership: Membership) -> None:
        self._shape = shape
        self._me = membership
        self._mapped: dict[bytes, Mapped] | None = {}
        self._relays = Segments()
        self._reader = Reader()
        self._lock = threading.Lock()

    def map_whole(self, description: Description, filled: int, memory: Any) -> None:
        """Copy a bucket that the reader of this node has read; Unread if that fails."""
        reader = next(reader for reader, others in self._me.find_readers().items() if self._me.number in others)
        self._copy(reader, description, [(0, filled)], memory)

    def read(self, bucket: Bucket, memory: Any, deadline: float) -> Description | None:
        """Put all shares of a bucket into this memory; return where others on this node find it, if it `relays`.

        Unread if a sender is late or lost, or has filled its share again.
        """
        place = self._relays.begin(bucket.number % 2, self._shape.capacity) if bucket.relays else memory
        wishes: dict[int, list[Wish]] = {}
        for sender, description in bucket.staged.items():
            stripes = self._shape.find_stripes(sender, bucket.filled)
            if self._me.nodes[sender] == self._me.nodes[self._me.number]:
                self._copy(sender, description, stripes, place)
            elif stripes:
                parts = [memoryview(place)[begin : begin + length] for begin, length in stripes]
                token, generation = description[3:]
                wishes[sender] = [Wish(self._me.addresses[sender], self._me.secret, token, generation, parts)]
        self._reader.read(wishes, deadline)
        if not bucket.relays:
            return None
        _view(memory, bucket.filled).copy_(_view(place, bucket.filled))
        return self._relays.end(bucket.number % 2)

    def _copy(self, owner: int, description: Description, stripes: list[tuple[int, int]], place: Any) -> None:
        with self._lock:
            if self._mapped is None:
                raise ValueError(ENDED)
            token = description[3]
            try:
                mapped = self._mapped[token] = self._mapped.get(token) or Mapped(description)
            except (OSError, ValueError) as error:
                why = f"its memory cannot be opened, {error}: processes of one node have to run as one user"
                raise Unread("lost", owner, why) from error
        content, to, done = _view(mapped.content(), description[2]), _view(place, self._shape.capacity), 0
        for begin, length in stripes:
            to[begin : begin + length].copy_(content[done : done + length])
            done += length
        if not mapped.holds(description[4]):
            raise Unread("overwritten", owner, "what it had staged was overwritten before it was copied")

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._mapped = None
        self._reader.close()
        self._relays.close()


def _view(memory: Any, length: int) -> Any:
    return library("torch").view(memory, "uint8", 0, (length,))

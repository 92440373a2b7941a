# SPDX-License-Identifier: Apache-2.0
"""The memory of a bucket: the share that a sender offers, and how a receiver gets all shares.

Both have two of everything, so that senders fill one bucket while receivers copy the one before it.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any

from .._remote.segment import Mapping as Mapped
from .._remote.segment import Segment
from .._remote.server import READER, Reader, Server, Wish
from .._remote.sockets import Listener
from .._remote.tensors import library
from .._remote.transport import Overwritten
from ._buckets import BucketShape
from ._members import Membership

# What `Segment.end` returns.
Description = tuple[Any, ...]


class Offer:
    """The shares of a sender in its last two buckets.

    Args:
        share: the bytes of a share.
        membership: of this process.
        listener_socket: a socket that others connect to; None if no other process has to.
        greet: what takes the connections of other members than readers.
    """

    def __init__(
        self,
        share: int,
        membership: Membership,
        listener_socket: socket.socket | None,
        greet: Callable[[int, socket.socket], None],
    ) -> None:
        self._share = share
        self._server = server = Server()
        self._segments: dict[int, Segment] = {}

        def take(number: int, connection: socket.socket) -> None:
            if number == READER:
                server.serve(connection)
            else:
                greet(number, connection)

        self._listener = None if listener_socket is None else Listener(listener_socket, membership.secret, take)

    def begin(self, bucket: int) -> memoryview:
        """Return the memory of the share in a bucket; what it held, two buckets ago, is invalid from now on."""
        segment = self._segments.get(bucket % 2)
        if segment is None:
            segment = self._segments[bucket % 2] = Segment(self._share)
            self._server.offer(segment)
        return segment.begin()

    def end(self, bucket: int) -> Description:
        """Return where others find the share, which is filled."""
        return self._segments[bucket % 2].end()

    def drop(self) -> None:
        """Give the memory back; the next bucket has other segments, so that nobody takes one for another."""
        segments, self._segments = self._segments, {}
        for segment in segments.values():
            self._server.withdraw(segment)
            segment.close()

    def close(self) -> None:
        """Give everything back."""
        if self._listener is not None:
            self._listener.close()
        self._server.close()
        self.drop()


class Intake:
    """How a receiver gets buckets: from senders on its node, from those elsewhere, or from the reader of its node."""

    def __init__(self, shape: BucketShape, membership: Membership) -> None:
        self._shape = shape
        self._me = membership
        self._reader = Reader()
        self._mapped: dict[bytes, Mapped] = {}
        self._relays: dict[int, Segment] = {}

    def map_whole(self, description: Description, filled: int, memory: Any) -> None:
        """Copy a bucket that the reader of this node has read; Overwritten if it is another one."""
        mapped = self._map(description)
        self._copy(mapped, description, [(0, filled)], memory)

    def read(
        self,
        bucket: int,
        staged: Mapping[int, Description],
        filled: int,
        memory: Any,
        *,
        relays: bool,
        deadline: float,
        is_over: Callable[[int], bool],
    ) -> Description | None:
        """Get all shares of a bucket.

        Args:
            bucket: its number.
            staged: where the share of each sender is.
            filled: the bytes in the bucket.
            memory: where they go.
            relays: whether others on this node get the bucket from this process.
            deadline: when to give up.
            is_over: whether a sender that does not listen never will.

        Returns:
            Where the others find the bucket.

        Raises:
            OSError: the memory of a sender on this node cannot be opened.
            Overwritten: a sender on this node has filled the share again.
            ReadError: a sender elsewhere is late or gone.
        """
        relay = None
        place = memory
        if relays:
            relay = self._relays.get(bucket % 2)
            if relay is None:
                relay = self._relays[bucket % 2] = Segment(self._shape.capacity)
            place = relay.begin()
        wishes: dict[int, list[Wish]] = {}
        for sender, description in staged.items():
            stripes = self._shape.find_stripes(sender, filled)
            if self._me.nodes[sender] == self._me.nodes[self._me.number]:
                self._copy(self._map(description), description, stripes, place)
            elif stripes:
                parts = [memoryview(place)[begin : begin + length] for begin, length in stripes]
                token, generation = description[3:]
                address = self._me.addresses[sender]
                wishes[sender] = [Wish(address, self._me.secret, token, generation, 0, parts)]
        if wishes:
            # The senders fill these segments again when this process has copied them.
            self._reader.read(wishes, deadline, is_over, checks=False)
        if relay is None:
            return None
        self._view(memory, filled).copy_(self._view(place, filled))
        return relay.end()

    def _map(self, description: Description) -> Mapped:
        token = description[3]
        if token not in self._mapped:
            self._mapped[token] = Mapped(description)
        return self._mapped[token]

    def _copy(self, mapped: Mapped, description: Description, stripes: list[tuple[int, int]], place: Any) -> None:
        content, done = self._view(mapped.content(), description[2]), 0
        to = self._view(place, self._shape.capacity)
        for begin, length in stripes:
            to[begin : begin + length].copy_(content[done : done + length])
            done += length
        if not mapped.holds(description[4]):
            raise Overwritten("the share of a sender was overwritten before it was copied")

    def _view(self, memory: Any, length: int) -> Any:
        return library("torch").view(memory, "uint8", 0, (length,))

    def drop(self) -> None:
        """Give everything back; the next bucket connects and maps again."""
        self._reader.close()
        self._mapped = {}
        relays, self._relays = self._relays, {}
        for relay in relays.values():
            relay.close()

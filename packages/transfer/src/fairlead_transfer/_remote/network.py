# SPDX-License-Identifier: Apache-2.0
"""The transport between nodes: segments of source ranks, which one target rank of each other node reads over TCP.

That rank puts what it has read into segments of its own, which the other ranks of its node map. So every byte enters a
node once, however many of its ranks want it.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

import ray

from .segment import Segment, SharedMemory
from .server import Reader, ReadError, Server, Wish
from .sockets import Late, Listener, reserve
from .transport import Blocked, Lost, Overwritten, Write

# A source rank and the number of its channel.
Place = tuple[int, int]


class Network(SharedMemory):
    """The transport of one end. `stage` says where a channel can be read, and `relay` reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._secret = os.urandom(32)
        self._server: Server | None = None
        self._listener: Listener | None = None
        self._address: tuple[str, int] = ("", 0)
        self._reader = Reader()
        self._relays: dict[Place, Segment] = {}

    def stage(self, write: Write) -> Any:
        """Copy the blocks into a segment, and offer it to readers on other nodes."""
        if self._server is None:
            self._listen()
        size, token, generation = super().stage(write)[2:]
        place = {"address": self._address, "secret": self._secret, "token": token, "generation": generation}
        return {**place, "size": size}

    def _listen(self) -> None:
        host = ray.util.get_node_ip_address()
        try:
            reserved = reserve(host)
        except OSError as error:
            raise Blocked(f"it cannot listen on {host}: {error}") from error
        server = self._server = Server()
        self._address = reserved.getsockname()
        self._listener = Listener(reserved, self._secret, lambda number, connection: server.serve(connection))

    def _make(self, size: int) -> Segment:
        segment = super()._make(size)
        if self._server is not None:
            self._server.offer(segment)
        return segment

    def _discard(self, segment: Segment) -> None:
        if self._server is not None:
            self._server.withdraw(segment)
        super()._discard(segment)

    def relay(self, staged: Mapping[Place, Mapping[str, Any]], fresh: bool, deadline: float) -> dict[Place, Any]:
        """Read channels of source ranks into segments of this process; return where other ranks find them.

        Args:
            staged: what `stage` has returned for each channel.
            fresh: whether a rank may still use what was read before, whose memory is then kept for it.
            deadline: when to give up, in `time.monotonic`.

        Raises:
            Blocked, Lost, Overwritten, Late: it did not work. The first three have a `source`, the rank.
        """
        for place in set(self._relays).difference(staged):
            self._relays.pop(place).close()
        wishes: dict[int, list[Wish]] = {}
        for place, channel in staged.items():
            relay = self._relays.get(place)
            if relay is None or relay.size != channel["size"] or fresh:
                if relay is not None:
                    relay.close()
                relay = self._relays[place] = Segment(channel["size"])
            wish = Wish(
                tuple(channel["address"]),
                channel["secret"],
                channel["token"],
                channel["generation"],
                0,
                [relay.begin()],
            )
            wishes.setdefault(place[0], []).append(wish)
        try:
            self._reader.read(wishes, deadline)
        except ReadError as error:
            raise self._explain(error) from error
        return {place: self._relays[place].end() for place in staged}

    def _explain(self, error: ReadError) -> Exception:
        cause, source = error.__cause__, error.source
        if not error.is_connected:
            raised: Any = Blocked(f"no connection to source rank {source}: {error.args[1]}")
        elif isinstance(cause, Late):
            raised = Late(str(cause))
        elif isinstance(cause, Overwritten):
            raised = Overwritten()
        else:
            raised = Lost(f"its connection was lost: {error.args[1]}")
        raised.source = source
        result: Exception = raised
        return result

    def forget_others(self, places: Collection[Place]) -> None:
        """Close the connections to source ranks that send no more, and unmap their memory."""
        super().forget_others(places)
        if not places and not self._relays:
            self._reader.close()

    def close(self) -> None:
        """Give everything back."""
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            self._server.close()
        self._reader.close()
        for relay in self._relays.values():
            relay.close()
        self._relays = {}
        super().close()

# SPDX-License-Identifier: Apache-2.0
"""Segments of shared memory, sent to processes on other hosts over TCP.

A reader asks for a part of a segment by its token and generation. The server sends the part out of the segment's file
(`sendfile`). The kernel may send pages some time after that call, so the reader asks for the generation once more when
it has all bytes: if it is still the same, no byte is of a later one.
"""

import functools
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .segment import HEAD, Segment
from .sockets import LOOK_S, Gone, Late, close, connect, run
from .transport import Overwritten

# Token, generation, the first byte and the number of bytes.
REQUEST = "!16sQQQ"
# The generation that is sent; 0 if the segment has another one, or is not offered.
REPLY = "!Q"
# The number of a process that connects to read segments.
READER = (1 << 32) - 1


class Server:
    """Sends the segments that are offered to it to readers that have proved that they belong to the transfer."""

    def __init__(self) -> None:
        self._segments: dict[bytes, Segment] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()

    def offer(self, segment: Segment) -> None:
        """Have readers get this segment from now on."""
        with self._lock:
            self._segments[segment.token] = segment

    def withdraw(self, segment: Segment) -> None:
        """Offer a segment no longer. Its file may be closed after that."""
        with self._lock:
            self._segments.pop(segment.token, None)

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of a reader until it closes the connection."""
        with self._lock:
            self._connections.add(connection)
            is_late = self._closed
        try:
            connection.settimeout(None)
            while not is_late and (request := _receive(connection, struct.calcsize(REQUEST))) is not None:
                self._send(connection, *struct.unpack(REQUEST, request))
        except OSError:  # the reader is gone, or `close` was called
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            close(connection)

    def _send(self, connection: socket.socket, token: bytes, generation: int, begin: int, length: int) -> None:
        with self._lock:
            segment = self._segments.get(token)
            is_there = segment is not None and segment.generation == generation and begin + length <= segment.size
            # A descriptor of its own: the segment may be closed while its content is sent.
            file = os.dup(segment.file) if segment is not None and is_there and length else None
        connection.sendall(struct.pack(REPLY, generation if is_there else 0))
        if file is None:
            return
        try:
            position, end = HEAD + begin, HEAD + begin + length
            while position < end:
                position += os.sendfile(connection.fileno(), file, position, end - position)
        finally:
            os.close(file)

    def close(self) -> None:
        """Offer nothing any more, and close all connections."""
        with self._lock:
            self._closed = True
            self._segments = {}
            connections = list(self._connections)
        for connection in connections:
            close(connection)


def _receive(connection: socket.socket, length: int) -> bytes | None:
    """Return the next bytes of a connection, or None if the other process has closed it."""
    content = b""
    while len(content) < length:
        received = connection.recv(length - len(content))
        if not received:
            return None
        content += received
    return content


class Wish(NamedTuple):
    """A part of a segment of another host, and where it goes."""

    address: tuple[str, int]  # where its server listens
    secret: bytes  # the secret of the transfer
    token: bytes  # of the segment
    generation: int  # of its content
    begin: int  # the first byte of the part
    places: Sequence[memoryview]  # where its bytes go, in order


class ReadError(Exception):
    """A part of a segment could not be read. Its cause is Late, Gone or Overwritten.

    Attributes:
        source: the key of the process that did not send it.
        is_connected: whether there was a connection to it.
    """

    def __init__(self, source: Any, reason: str, *, is_connected: bool = True) -> None:
        super().__init__(source, reason)
        self.source = source
        self.is_connected = is_connected


class Reader:
    """Reads segments of other hosts, from all of them at the same time, and keeps the connections."""

    def __init__(self) -> None:
        self._connections: dict[Hashable, tuple[tuple[str, int], socket.socket]] = {}

    def read(
        self,
        wishes: Mapping[Any, Sequence[Wish]],
        deadline: float,
        is_over: Callable[[Any], bool] | None = None,
        *,
        checks: bool = True,
    ) -> None:
        """Read parts of segments into their places.

        Args:
            wishes: the parts, by a key of the process that sends them.
            deadline: when to give up, in `time.monotonic`.
            is_over: whether a process that does not listen never will; None if all of them listen.
            checks: whether to ask at the end if the segments still have these generations. Without it, their owners
                must not write them before they know that they have been read.

        Raises:
            ReadError: a process is late or gone, or has overwritten the segment.
        """
        steps: dict[Any, Iterator[memoryview]] = {}
        for source, parts in wishes.items():
            steps[source] = self._steps(self._connect(source, parts[0], deadline, is_over), parts, deadline, checks)
        places = {source: self._advance(source, remaining, memoryview(b"")) for source, remaining in steps.items()}
        pending = {source: place for source, place in places.items() if place is not None}
        with selectors.DefaultSelector() as selector:
            for source in pending:
                selector.register(self._connections[source][1], selectors.EVENT_READ, source)
            while pending:
                ready = selector.select(min(LOOK_S, max(0.0, deadline - time.monotonic())))
                if not ready and time.monotonic() >= deadline:
                    source = next(iter(pending))
                    raise self._failed(source, Late("it did not send its share by the deadline"))
                for key, _ in ready:
                    source = key.data
                    place = self._advance(source, steps[source], self._fill(source, pending[source], deadline))
                    if place is None:
                        selector.unregister(key.fileobj)
                        del pending[source]
                    else:
                        pending[source] = place

    def _connect(
        self, source: Any, wish: Wish, deadline: float, is_over: Callable[[Any], bool] | None
    ) -> socket.socket:
        known = self._connections.get(source)
        if known is not None and known[0] == wish.address:
            return known[1]
        self.forget([source])
        try:
            ends = None if is_over is None else functools.partial(is_over, source)
            made = connect(wish.address, wish.secret, READER, deadline, ends)
        except (Late, Gone) as error:
            self.close()
            raise ReadError(source, str(error), is_connected=False) from error
        self._connections[source] = wish.address, made
        return made

    def _steps(
        self, connection: socket.socket, wishes: Sequence[Wish], deadline: float, checks: bool
    ) -> Iterator[memoryview]:
        """Yield the places of a connection's bytes, each of which is full when the next one is taken."""
        reply = bytearray(struct.calcsize(REPLY))

        def ask(requests: list[bytes]) -> None:
            run(connection, deadline, lambda: connection.sendall(b"".join(requests)))

        ask(
            [
                struct.pack(REQUEST, wish.token, wish.generation, wish.begin, sum(map(len, wish.places)))
                for wish in wishes
            ]
        )
        for wish in wishes:
            yield memoryview(reply)
            if struct.unpack(REPLY, reply)[0] != wish.generation:
                raise Overwritten
            yield from wish.places
        if not checks:
            return
        ask([struct.pack(REQUEST, wish.token, wish.generation, 0, 0) for wish in wishes])
        for wish in wishes:
            yield memoryview(reply)
            if struct.unpack(REPLY, reply)[0] != wish.generation:
                raise Overwritten

    def _fill(self, source: Any, place: memoryview, deadline: float) -> memoryview:
        """Receive what is there; return the rest of the place."""
        connection = self._connections[source][1]
        try:
            received = run(connection, deadline, lambda: connection.recv_into(place))
        except (Late, Gone) as error:
            raise self._failed(source, error) from error
        if not received:
            raise self._failed(source, Gone("the connection was closed"))
        return place[received:]

    def _advance(self, source: Any, steps: Iterator[memoryview], place: memoryview) -> memoryview | None:
        """Return the next place that is not full; None if there is none."""
        try:
            while not len(place):
                place = next(steps)
        except StopIteration:
            return None
        except (Late, Gone, Overwritten) as error:
            raise self._failed(source, error) from error
        return place

    def _failed(self, source: Any, error: Exception) -> ReadError:
        """Close all connections, on which answers may be on their way; return the error."""
        self.close()
        failed = ReadError(source, str(error))
        failed.__cause__ = error
        return failed

    def forget(self, sources: Sequence[Any]) -> None:
        """Close the connections to some processes."""
        for source in sources:
            if source in self._connections:
                close(self._connections.pop(source)[1])

    def close(self) -> None:
        """Close all connections."""
        self.forget(list(self._connections))

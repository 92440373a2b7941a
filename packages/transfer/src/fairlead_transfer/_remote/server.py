# SPDX-License-Identifier: Apache-2.0
"""Segments of shared memory, sent to processes on other hosts over TCP.

A reader asks for a part of a segment by its token and generation. The server sends the part out of the segment's file
(`sendfile`). The kernel may send pages some time after that call, so the reader asks for the generation once more when
it has all bytes: if it is still the same, no byte is of a later one.
"""

import math
import os
import socket
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from .segment import HEAD, Segment, Unread
from .sockets import Gone, Late, close, connect, fill, introduce, read, run

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
            while not is_late:
                request = read(connection, struct.calcsize(REQUEST), math.inf)
                self._send(connection, *struct.unpack(REQUEST, request))
        except (Gone, OSError):  # the reader is gone, or `close` was called
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


class Wish(NamedTuple):
    """A part of a segment of another host, and where it goes."""

    address: tuple[str, int]  # where its server listens
    secret: bytes  # the secret of the transfer
    token: bytes  # of the segment
    generation: int  # of its content
    begin: int  # the first byte of the part
    places: Sequence[memoryview]  # where its bytes go, in order


class Reader:
    """Reads segments of other hosts, from all of them at the same time, and keeps the connections."""

    def __init__(self) -> None:
        self._connections: dict[Any, tuple[tuple[str, int], socket.socket]] = {}

    def read(self, wishes: Mapping[Any, Sequence[Wish]], deadline: float) -> None:
        """Read parts of segments into their places.

        Args:
            wishes: the parts, by a key of the process that sends them.
            deadline: when to give up, in `time.monotonic`.

        Raises:
            Unread: a process is late or lost, or has overwritten the segment.
        """
        if not wishes:
            return
        with ThreadPoolExecutor(len(wishes), "fairlead-transfer-read") as threads:
            reads = [threads.submit(self._read_from, source, parts, deadline) for source, parts in wishes.items()]
            done, _ = wait(reads, return_when=FIRST_EXCEPTION)
            failed = [error for read in done if (error := read.exception()) is not None]
            if failed:
                self.close()  # answers may be on their way, and other threads wait for some
        if failed:
            raise failed[0]

    def _read_from(self, source: Any, wishes: Sequence[Wish], deadline: float) -> None:
        """Read what one process sends."""
        try:
            connection = self._connect(source, wishes[0], deadline)
            _ask(connection, wishes, deadline, with_content=True)
            _ask(connection, wishes, deadline, with_content=False)
        except Late as error:
            raise Unread("late", source, "it did not send what it has staged by the deadline") from error
        except Gone as error:
            raise Unread("lost", source, str(error)) from error
        except _Other as error:
            raise Unread("overwritten", source, "what it had staged was overwritten before it was read") from error

    def _connect(self, source: Any, wish: Wish, deadline: float) -> socket.socket:
        known = self._connections.get(source)
        if known is not None and known[0] == wish.address:
            return known[1]
        if known is not None:
            close(known[1])
        made = connect(wish.address, deadline)
        self._connections[source] = wish.address, made  # `close` ends what follows
        introduce(made, wish.secret, READER, deadline)
        return made

    def keep_only(self, sources: Collection[Any]) -> None:
        """Close the connections to other processes than these."""
        for source in set(self._connections).difference(sources):
            close(self._connections.pop(source)[1])

    def close(self) -> None:
        """Close all connections."""
        self.keep_only(())


class _Other(Exception):
    """The segment has the content of another generation."""


def _ask(connection: socket.socket, wishes: Sequence[Wish], deadline: float, *, with_content: bool) -> None:
    """Ask for the generations of segments, and read their content if it is wanted."""
    requests = [
        struct.pack(REQUEST, wish.token, wish.generation, wish.begin, sum(map(len, wish.places)) * with_content)
        for wish in wishes
    ]
    run(connection, deadline, lambda: connection.sendall(b"".join(requests)))
    for wish in wishes:
        (generation,) = struct.unpack(REPLY, read(connection, struct.calcsize(REPLY), deadline))
        if generation != wish.generation:
            raise _Other
        for place in wish.places if with_content else ():
            fill(connection, place, deadline)

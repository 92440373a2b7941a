# SPDX-License-Identifier: Apache-2.0
"""Segments of shared memory, sent to processes on other hosts over TCP.

A reader asks for the content of a segment by its token and generation. The server sends it out of the segment's file
(`sendfile`). The kernel may send pages some time after that call, so the reader asks for the generation once more when
it has all bytes: if it is still the same, no byte is of a later one.
"""

import math
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from .segment import HEAD, Segment, Unread
from .sockets import Gone, Late, close, connect, fill, introduce, read, run

# Token, generation, and how many bytes of the content.
REQUEST = "!16sQQ"
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

    def _send(self, connection: socket.socket, token: bytes, generation: int, length: int) -> None:
        with self._lock:
            segment = self._segments.get(token)
            is_there = segment is not None and segment.generation == generation and length <= segment.size
            # A descriptor of its own: the segment may be closed while its content is sent.
            file = os.dup(segment.file) if segment is not None and is_there and length else None
        connection.sendall(struct.pack(REPLY, generation if is_there else 0))
        if file is None:
            return
        try:
            sent = 0
            while sent < length:
                sent += os.sendfile(connection.fileno(), file, HEAD + sent, length - sent)
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
    """The content of a segment of another host, or its beginning, and where it goes."""

    address: tuple[str, int]  # where its server listens
    secret: bytes  # the secret of the transfer
    token: bytes  # of the segment
    generation: int  # of its content
    places: Sequence[memoryview]  # where its bytes go, in order


def read_segments(wishes: Mapping[Any, Sequence[Wish]], deadline: float) -> None:
    """Read segments of other hosts into their places, by a key of the process that sends them; Unread if that fails."""
    connections: dict[Any, socket.socket] = {}
    with ThreadPoolExecutor(max(1, len(wishes)), "fairlead-transfer-read") as threads:
        reads = [threads.submit(_read_from, connections, key, parts, deadline) for key, parts in wishes.items()]
        done, _ = wait(reads, return_when=FIRST_EXCEPTION)
        for connection in list(connections.values()):  # after an error, other threads wait for some
            close(connection)
    for ended in done:
        ended.result()


def _read_from(connections: dict[Any, socket.socket], key: Any, wishes: Sequence[Wish], deadline: float) -> None:
    """Read what one process sends."""
    try:
        connection = connections[key] = connect(wishes[0].address, deadline)
        introduce(connection, wishes[0].secret, READER, deadline)
        for with_content in (True, False):
            requests = [
                struct.pack(REQUEST, wish.token, wish.generation, sum(map(len, wish.places)) * with_content)
                for wish in wishes
            ]
            run(connection, deadline, lambda requests=requests: connection.sendall(b"".join(requests)))
            for wish in wishes:
                if struct.unpack(REPLY, read(connection, struct.calcsize(REPLY), deadline)) != (wish.generation,):
                    raise Unread("overwritten", key, "what it had staged was overwritten before it was read")
                for place in wish.places if with_content else ():
                    fill(connection, place, deadline)
    except Late as error:
        raise Unread("late", key, "it did not send what it has staged by the deadline") from error
    except Gone as error:
        raise Unread("lost", key, str(error)) from error

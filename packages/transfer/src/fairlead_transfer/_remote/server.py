# SPDX-License-Identifier: Apache-2.0
"""Segments of shared memory, sent to processes on other hosts over TCP.

A reader asks for the content of a segment by its token and generation. The server sends it out of the segment's file
(`sendfile`). The kernel may send pages some time after that call, so the reader asks for the generation once more when
it has all bytes: if it is still the same, no byte is of a later one.
"""

import functools
import math
import os
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from .segment import ENDED, HEAD, Segments, Unread
from .sockets import Gone, Late, close, fill, join, read, run

# Token, generation, and how many bytes of the content.
REQUEST = "!16sQQ"
# The generation that is sent; 0 if the segment has another one, or is not there.
REPLY = "!Q"
# A process that connects to read segments, for any transfer.
READER = (1 << 32) - 1, 0


def serve(connection: socket.socket, segments: Segments) -> None:
    """Send segments to a reader that has proved that it belongs to the transfer, until it closes the connection."""
    try:
        while True:
            request = read(connection, struct.calcsize(REQUEST), math.inf)
            _send(connection, segments, *struct.unpack(REQUEST, request))
    except (Gone, OSError):  # the reader is gone, or the listener was closed
        close(connection)


def _send(connection: socket.socket, segments: Segments, token: bytes, generation: int, length: int) -> None:
    file = segments.open(token, generation, length)
    if file is None:
        connection.sendall(struct.pack(REPLY, 0))
        return
    try:
        connection.sendall(struct.pack(REPLY, generation))
        sent = 0
        while sent < length:
            sent += os.sendfile(connection.fileno(), file, HEAD + sent, length - sent)
    finally:
        os.close(file)


class Wish(NamedTuple):
    """The content of a segment of another host, or its beginning, and where it goes."""

    address: tuple[str, int]  # where its server listens
    secret: bytes  # the secret of the transfer
    token: bytes  # of the segment
    generation: int  # of its content
    places: Sequence[memoryview]  # where its bytes go, in order


class Reader:
    """Reads segments of other hosts, from all of them at the same time, and keeps the connections."""

    def __init__(self) -> None:
        # With the address and the secret: a process that was started again has others.
        self._connections: dict[Any, tuple[Any, Any]] = {}
        self._closed = False

    def read(self, wishes: Mapping[Any, Sequence[Wish]], deadline: float) -> None:
        """Read segments into their places, by a key of the process that sends them; Unread if that fails."""
        if len(wishes) < 2:  # a thread more for each read would take longer
            for key, parts in wishes.items():
                self._read_from(key, parts, deadline)
            return
        with ThreadPoolExecutor(len(wishes), "fairlead-transfer-read") as threads:
            reads = [threads.submit(self._read_from, key, parts, deadline) for key, parts in wishes.items()]
            done, _ = wait(reads, return_when=FIRST_EXCEPTION)
            if any(read.exception() for read in done):
                self.keep_only(())  # other threads wait for some
        for ended in done:
            ended.result()

    def _read_from(self, key: Any, wishes: Sequence[Wish], deadline: float) -> None:
        """Read what one process sends; if the kept connection to it is gone, over a new one."""
        peer = wishes[0].address, wishes[0].secret
        known, connection = self._connections.get(key, (None, None))
        try:
            if known != peer:
                connection = join(*peer, READER, deadline, functools.partial(self._keep, key, peer))
            _ask(key, connection, wishes, deadline, with_content=True)
            _ask(key, connection, wishes, deadline, with_content=False)
        except BaseException as error:
            was_open = self._forget(key)  # an answer may be on its way
            if isinstance(error, Late):
                raise Unread("late", key, "it did not send what it has staged by the deadline") from error
            if not isinstance(error, Gone):
                raise
            if known != peer or not was_open:
                raise Unread("lost", key, str(error)) from error
            self._read_from(key, wishes, deadline)

    def _keep(self, key: Any, peer: Any, connection: socket.socket) -> None:
        """Keep a new connection; Gone if the reader was closed meanwhile."""
        self._forget(key)
        self._connections[key] = peer, connection
        if self._closed:
            self._forget(key)
            raise Gone(ENDED)

    def keep_only(self, keys: Collection[Any]) -> None:
        """Close the connections to other processes than these."""
        for key in set(self._connections).difference(keys):
            self._forget(key)

    def close(self) -> None:
        """Close all connections for good: a thread that still runs gets Unread."""
        self._closed = True
        self.keep_only(())

    def _forget(self, key: Any) -> bool:
        """Close a connection; return whether it was kept until now: another thread may have been faster."""
        if (entry := self._connections.pop(key, None)) is not None:
            close(entry[1])
        return entry is not None


def _ask(key: Any, connection: socket.socket, wishes: Sequence[Wish], deadline: float, *, with_content: bool) -> None:
    """Ask for the generations of segments, and read their content if it is wanted."""
    requests = [
        struct.pack(REQUEST, wish.token, wish.generation, sum(map(len, wish.places)) * with_content) for wish in wishes
    ]
    run(connection, deadline, lambda: connection.sendall(b"".join(requests)))
    for wish in wishes:
        if struct.unpack(REPLY, read(connection, struct.calcsize(REPLY), deadline)) != (wish.generation,):
            raise Unread("overwritten", key, "what it had staged was overwritten before it was read")
        for place in wish.places if with_content else ():
            fill(connection, place, deadline)

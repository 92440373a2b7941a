# SPDX-License-Identifier: Apache-2.0
"""Pickled messages over connections whose two processes have proved that they belong to one transfer."""

import multiprocessing.connection
import pickle
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

from .._remote.sockets import LOOK_S, close, read

HEAD = struct.Struct("!Q")


class Channel:
    """One connection, on which both processes have proved who they are."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the file descriptor, to wait for a message."""
        return self._connection.fileno()

    def receive(self, deadline: float) -> Any:
        """Return the next message; Late or Gone if there is none."""
        (length,) = HEAD.unpack(read(self._connection, HEAD.size, deadline))
        return pickle.loads(read(self._connection, length, deadline))

    def is_closed(self) -> bool:
        """Return whether the other process has closed the connection."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send_some(self, content: memoryview) -> memoryview:
        """Send what the connection takes now; return the rest. OSError if it takes nothing any more."""
        self._connection.settimeout(0)
        try:
            return content[self._connection.send(content) :]
        except BlockingIOError:
            return content

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets Gone."""
        close(self._connection)


def send_all(
    channels: Mapping[int, Channel], numbers: Iterable[int], message: Any, deadline: float
) -> tuple[set[int], dict[int, str]]:
    """Send a message to several members, none of which waits for another one that does not read.

    Returned are the members that have not taken it by the deadline, and why those were lost that are gone.
    """
    content = pickle.dumps(message)
    whole = memoryview(HEAD.pack(len(content)) + content)
    rest = dict.fromkeys(numbers, whole)
    gone: dict[int, str] = {}
    while rest:
        for number, left in list(rest.items()):
            try:
                rest[number] = channels[number].send_some(left)
            except (OSError, KeyError) as error:
                gone[number] = f"{type(error).__name__}: {error}"
            if number in gone or not rest[number]:
                del rest[number]
        wait_s = min(LOOK_S, deadline - time.monotonic())
        if not rest or wait_s < 0:
            break
        writable = select.poll()
        for number in rest:
            writable.register(channels[number], select.POLLOUT)
        writable.poll(wait_s * 1000)
    return set(rest), gone


def wait_for_any(channels: Mapping[int, Channel], seconds: float) -> list[int]:
    """Return the members of which there is something to read, as soon as there is."""
    waiting: Any = list(channels.values())
    ready: list[Any] = multiprocessing.connection.wait(waiting, max(0.0, seconds))
    return [number for number, channel in channels.items() if channel in ready]

# SPDX-License-Identifier: Apache-2.0
"""Pickled messages over connections whose two processes have proved that they belong to one transfer."""

import pickle
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

from .._remote.sockets import LOOK_S, read

HEAD = struct.Struct("!Q")


def receive(connection: socket.socket, deadline: float) -> Any:
    """Return the next message; Late or Gone if there is none."""
    (length,) = HEAD.unpack(read(connection, HEAD.size, deadline))
    return pickle.loads(read(connection, length, deadline))


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other process has closed a connection."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def send_all(
    connections: Mapping[int, socket.socket], numbers: Iterable[int], message: Any, deadline: float
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
                connections[number].settimeout(0)
                rest[number] = left[connections[number].send(left) :]
            except BlockingIOError:
                continue
            except (OSError, KeyError) as error:
                gone[number] = f"{type(error).__name__}: {error}"
            if number in gone or not rest[number]:
                del rest[number]
        wait_s = min(LOOK_S, deadline - time.monotonic())
        if not rest or wait_s < 0:
            break
        writable = select.poll()
        for number in rest:
            writable.register(connections[number], select.POLLOUT)
        writable.poll(wait_s * 1000)
    return set(rest), gone

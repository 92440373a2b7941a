# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes of a transfer, each with a deadline.

Both prove that they know the secret of the transfer before either reads a message, because messages are pickled.
"""

import contextlib
import functools
import hmac
import multiprocessing.connection
import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from .._endpoint import prove

NONCE = 32
# A stranger may connect and say nothing.
PROOF_S = 5.0
# Seconds between two looks for processes that have exited, or a caller that has given up.
LOOK_S = 0.2
HEAD = struct.Struct("!Q")
NUMBER = struct.Struct("!I")


class Late(Exception):
    """The other process did not answer by the deadline."""


class Gone(Exception):
    """The other process has closed the connection, or has exited."""


class Channel:
    """One connection, after both processes have proved who they are."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the file descriptor, to wait for a message."""
        return self._connection.fileno()

    def send(self, message: Any, deadline: float) -> None:
        """Send a message; Late or Gone if that fails."""
        content = pickle.dumps(message)
        _run(self._connection, deadline, lambda: self._connection.sendall(HEAD.pack(len(content)) + content))

    def receive(self, deadline: float) -> Any:
        """Return the next message; Late or Gone if there is none."""
        (length,) = HEAD.unpack(_read(self._connection, HEAD.size, deadline))
        return pickle.loads(_read(self._connection, length, deadline))

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets Gone."""
        _close(self._connection)


def reserve() -> socket.socket:
    """Return a socket with a port of the loopback address, which refuses connections until `listen`."""
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    return reserved


def has_exited(pid: int) -> bool:
    """Return whether a process of this namespace has exited; False also where that cannot be known."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # the kernel is too old, or a sandbox forbids it
        return False
    try:
        return bool(multiprocessing.connection.wait([process], 0))
    finally:
        os.close(process)


def connect(
    address: tuple[str, int], secret: bytes, number: int, deadline: float, is_over: Callable[[], bool]
) -> Channel:
    """Connect as the member with this number to the one that listens; wait until it does, or it never will."""
    while True:
        try:
            connection = socket.create_connection(address, max(0.01, deadline - time.monotonic()))
            break
        except OSError as error:
            if is_over():
                raise Gone("it does not listen") from error
            if time.monotonic() > deadline - 0.05:
                raise Late(f"{type(error).__name__}: {error}") from error
            time.sleep(0.05)
    try:
        while not multiprocessing.connection.wait([connection], LOOK_S):
            if is_over():
                raise Gone("it does not answer")
            if time.monotonic() > deadline:
                raise Late("no answer by the deadline")
        theirs = _read(connection, NONCE, deadline)
        mine = secrets.token_bytes(NONCE) + NUMBER.pack(number)
        _run(connection, deadline, lambda: connection.sendall(mine + prove(secret, b"member" + theirs + mine)))
        expected = prove(secret, b"listener" + theirs + mine)
        if not hmac.compare_digest(_read(connection, len(expected), deadline), expected):
            raise Gone("the process at this address is not of this transfer")
    except BaseException:
        _close(connection)
        raise
    return Channel(connection)


def accept(listener: socket.socket, secret: bytes, deadline: float) -> tuple[int, Channel] | None:
    """Return the next member that connects and its number; None for a stranger, who is turned away. Late if none."""
    connection: socket.socket = _run(listener, deadline, lambda: listener.accept()[0])
    until = min(deadline, time.monotonic() + PROOF_S)
    mine = secrets.token_bytes(NONCE)
    try:
        _run(connection, until, lambda: connection.sendall(mine))
        theirs = _read(connection, NONCE + NUMBER.size, until)
        expected = prove(secret, b"member" + mine + theirs)
        if hmac.compare_digest(_read(connection, len(expected), until), expected):
            _run(connection, until, lambda: connection.sendall(prove(secret, b"listener" + mine + theirs)))
            return NUMBER.unpack(theirs[NONCE:])[0], Channel(connection)
    except (Late, Gone):
        pass
    _close(connection)
    return None


def _run(connection: socket.socket, deadline: float, operation: Any) -> Any:
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        return operation()
    except TimeoutError as error:
        raise Late("no answer by the deadline") from error
    except OSError as error:
        raise Gone(f"{type(error).__name__}: {error}") from error


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        received = _run(connection, deadline, functools.partial(connection.recv_into, rest))
        if not received:
            raise Gone("the connection was closed")
        rest = rest[received:]
    return bytes(content)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not connected
        connection.shutdown(socket.SHUT_RDWR)  # a thread may wait on it
    connection.close()

# SPDX-License-Identifier: Apache-2.0
"""Connections between processes of a transfer.

Both processes prove that they know the secret of the transfer before either reads more, because messages are pickled
and weights are not for strangers. The proofs cover the address to which the connection was made, so that a stranger
cannot relay them from another one. A stranger holds up nobody: each connection is answered in a thread of its own.
"""

import contextlib
import functools
import hashlib
import hmac
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

NONCE = 32
# A stranger may connect and say nothing.
PROOF_S = 5.0
# Seconds after which an attempt to connect has failed.
CONNECT_S = 10.0
# Connections that have proved nothing yet; of more, the oldest is closed.
MOST_UNPROVEN = 64
# Seconds between two looks at what may have ended a wait.
LOOK_S = 0.2
# Bytes for which a thread that needs more is woken: for each few, both ends would do little but wake each other.
BATCH = 1 << 19
CALLER = "!II"
# Who has connected: the number of a process, and that of the transfer for which it comes.
Caller = tuple[int, int]


class Late(Exception):
    """The other process did not answer by the deadline."""


class Gone(Exception):
    """The other process has closed the connection, or has exited."""


def prove(secret: bytes, content: bytes) -> bytes:
    """Return the proof that its sender knows a secret."""
    return hmac.new(secret, content, hashlib.sha256).digest()


def derive_key(secret: bytes, address: tuple[Any, ...]) -> bytes:
    """Return the key for connections to an address, so that a proof at one address is none at another."""
    return prove(secret, f"{address[0]} {address[1]}".encode())


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a port of an address of this host; a `Listener` answers its connections."""
    return socket.create_server((host, 0), backlog=1024)


def connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """Return a connection to a process that listens; Gone if it does not, Late if it is not made by the deadline."""
    try:
        return socket.create_connection(address, max(0.01, min(CONNECT_S, deadline - time.monotonic())))
    except OSError as error:
        if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
            raise Late(f"no connection to {address} by the deadline") from error
        raise Gone(f"it does not listen at {address}: {error}") from error


def introduce(connection: socket.socket, secret: bytes, caller: Caller, deadline: float) -> None:
    """Prove to the process that listens, and have it prove, that both know the secret; Late or Gone if it does not."""
    key = derive_key(secret, run(connection, deadline, connection.getpeername))
    theirs = read(connection, NONCE, deadline)
    mine = secrets.token_bytes(NONCE) + struct.pack(CALLER, *caller)
    run(connection, deadline, lambda: connection.sendall(mine + prove(key, b"member" + theirs + mine)))
    expected = prove(key, b"listener" + theirs + mine)
    if not hmac.compare_digest(read(connection, len(expected), deadline), expected):
        raise Gone("the process at this address is not of this transfer")
    _tune(connection)


def join(
    address: tuple[str, int], secret: bytes, caller: Caller, deadline: float, add: Callable[[socket.socket], None]
) -> socket.socket:
    """Return a connection to a process that listens, and that has proved to know the secret; Late or Gone if it fails.

    A listener that has turned this process away, as one of too many at a time, is asked again. `add` takes each
    connection before the proof, and may end this with Gone.
    """
    while True:
        connection = connect(address, deadline)
        add(connection)
        try:
            introduce(connection, secret, caller, deadline)
            return connection
        except Gone:
            close(connection)
            if time.monotonic() + LOOK_S > deadline:
                raise
        time.sleep(LOOK_S)


def answer(connection: socket.socket, secret: bytes, deadline: float, admit: Callable[[], None]) -> Caller:
    """Return the member that has connected; Late or Gone for a stranger, or from `admit`."""
    key = derive_key(secret, run(connection, deadline, connection.getsockname))
    mine = secrets.token_bytes(NONCE)
    run(connection, deadline, lambda: connection.sendall(mine))
    theirs = read(connection, NONCE + struct.calcsize(CALLER), deadline)
    expected = prove(key, b"member" + mine + theirs)
    if not hmac.compare_digest(read(connection, len(expected), deadline), expected):
        raise Gone("the process that has connected is not of this transfer")
    admit()
    run(connection, deadline, lambda: connection.sendall(prove(key, b"listener" + mine + theirs)))
    _tune(connection)
    number, transfer = struct.unpack(CALLER, theirs[NONCE:])
    return number, transfer


class Listener:
    """Accepts connections to a socket until it is closed.

    `take` is called with each member that knows the secret and its connection, in a thread of its own.
    """

    def __init__(self, listening: socket.socket, secret: bytes, take: Callable[[Caller, socket.socket], None]) -> None:
        self._socket = listening
        self._secret = secret
        self._take = take
        self._unproven: dict[int, socket.socket] = {}
        self._taken: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="fairlead-transfer-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it was closed, or this process has no descriptors left for now
                time.sleep(0.0 if self._closed else LOOK_S)
                continue
            with self._lock:
                self._unproven[id(connection)] = connection
                if len(self._unproven) > MOST_UNPROVEN:
                    shut(self._unproven.pop(next(iter(self._unproven))))  # its thread closes it
            thread = threading.Thread(target=self._answer, args=(connection,), name="fairlead-transfer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process may start no more threads for now; a member comes again
                with self._lock:
                    self._unproven.pop(id(connection), None)
                close(connection)
                time.sleep(LOOK_S)

    def _answer(self, connection: socket.socket) -> None:
        admit = functools.partial(self._admit, connection)
        try:
            caller = answer(connection, self._secret, time.monotonic() + PROOF_S, admit)
        except (Late, Gone):
            close(connection)
        else:
            self._take(caller, connection)
        with self._lock:
            self._unproven.pop(id(connection), None)
            self._taken.pop(id(connection), None)

    def _admit(self, connection: socket.socket) -> None:
        """Count a connection as that of a member; Gone if it was turned away meanwhile."""
        with self._lock:
            if self._closed or self._unproven.pop(id(connection), None) is None:
                raise Gone("it was turned away")
            self._taken[id(connection)] = connection

    def close(self) -> None:
        """Stop listening, and end the connections that have proved nothing, or that are still being taken."""
        self._closed = True
        close(self._socket)
        with self._lock:
            connections = [*self._unproven.values(), *self._taken.values()]
        for connection in connections:
            shut(connection)
        self._thread.join(LOOK_S * 5)


def run(connection: socket.socket, deadline: float, operation: Any) -> Any:
    """Return the result of a socket's operation; Late or Gone if it fails."""
    try:
        connection.settimeout(None if deadline == math.inf else max(0.001, deadline - time.monotonic()))
        return operation()
    except TimeoutError as error:
        raise Late("no answer by the deadline") from error
    except OSError as error:
        raise Gone(f"{type(error).__name__}: {error}") from error


def read(connection: socket.socket, length: int, deadline: float) -> bytes:
    """Return the next bytes of a connection; Late or Gone if they do not come."""
    content = bytearray(length)
    fill(connection, memoryview(content), deadline)
    return bytes(content)


def fill(connection: socket.socket, place: memoryview, deadline: float) -> None:
    """Put the next bytes of a connection into a place until it is full; Late or Gone if they do not come."""
    # Without a deadline `recv` itself waits, and may go on waiting when all bytes have come.
    is_large = len(place) > BATCH and deadline < math.inf
    wake_at = functools.partial(connection.setsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    while place:
        if is_large:
            run(connection, deadline, functools.partial(wake_at, min(BATCH, len(place))))
        received = run(connection, deadline, functools.partial(connection.recv_into, place))
        if not received:
            raise Gone("the connection was closed")
        place = place[received:]
    if is_large:
        run(connection, deadline, functools.partial(wake_at, 1))


def _tune(connection: socket.socket) -> None:
    """Send messages without delay, and notice a host that is gone within about ten seconds while nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shut(connection: socket.socket) -> None:
    """End a connection; a thread that waits on it notices."""
    with contextlib.suppress(OSError):  # it was not connected
        connection.shutdown(socket.SHUT_RDWR)


def close(connection: socket.socket) -> None:
    """Close a connection; a thread that waits on it notices."""
    shut(connection)
    connection.close()

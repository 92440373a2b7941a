# SPDX-License-Identifier: Apache-2.0
"""The sockets of a lane: Unix sockets on the driver's node, and ZeroMQ between nodes. Shipped by value.

A message is a list of frames, the first of which begins with its kind and with whether frames follow.
"""

import contextlib
import importlib
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

POLL_MS = 250
HEARTBEAT_MS, DEAD_LINK_MS, RECONNECT_MS = 5_000, 20_000, 50
# Of ZeroMQ, as numbers: its enumerations make a message take half as long again.
NO_BLOCK, SEND_MORE, RECEIVES_MORE = 1, 2, 13
# The bytes of a packet of a Unix socket, far below those that a socket takes at a time.
PACKET_BYTES = 50_000
# The bytes of a frame of ZeroMQ, encrypted. A socket cuts off a peer that announces a larger one, before it has a key.
FRAME_BYTES = 200_000
# What a frame can hold: encryption adds less than the rest. `split` makes several of a larger one.
CONTENT_BYTES = FRAME_BYTES - 1_000
# The first byte of a packet that is one of several of a message, and of the last one. Kinds of messages are smaller.
PART, LAST_PART = 254, 255


class LaneConfig(NamedTuple):
    """Everything that a worker needs to connect: by ZeroMQ, or by the Unix socket, if it is on the driver's node."""

    address: str
    identity: bytes
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    local_address: str = ""
    local_key: bytes = b""


class DriverLostError(ConnectionError):
    """The driver of a lane cannot be reached any more."""


class Packets:
    """Messages over a Unix socket that keeps the bounds of packets; Linux delivers each whole and in order."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._send, self._receive = connected.send, connected.recv
        self._parts: list[bytes] = []
        self._unsent: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def is_behind(self) -> bool:
        """Whether packets wait because the other side has not received the packets before."""
        return bool(self._unsent)

    def send(self, message: Sequence[bytes]) -> None:
        """Send a message without blocking, as far as the other side receives; `flush` sends the rest."""
        if len(message) == 1 and len(message[0]) <= PACKET_BYTES and not self._unsent:
            try:
                self._send(message[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._unsent.append(message[0])
        else:
            self._unsent.extend(_split(message))
            self.flush()

    def flush(self) -> None:
        """Send the packets that wait, as far as the other side receives."""
        while self._unsent:
            try:
                self._send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._unsent.popleft()

    def receive(self, flags: int = 0) -> list[bytes] | None:
        """Receive a packet; return the message that it completes, and None if more packets of it follow."""
        packet = self._receive(PACKET_BYTES + 1, flags)
        if not packet:
            raise ConnectionResetError("the other side has closed the connection")
        if packet[0] < PART:
            return [packet]
        self._parts.append(packet[1:])
        if packet[0] == PART:
            return None
        content, self._parts = b"".join(self._parts), []
        message: list[bytes] = pickle.loads(content)
        return message


def _split(message: Sequence[bytes]) -> Iterator[bytes]:
    content = pickle.dumps([bytes(frame) for frame in message], 5)
    for at in range(0, len(content), PACKET_BYTES):
        kind = PART if at + PACKET_BYTES < len(content) else LAST_PART
        yield bytes([kind]) + content[at : at + PACKET_BYTES]


def split(message: Sequence[Any]) -> Sequence[Any]:
    """Return the frames of a message, each small enough for ZeroMQ; `_join` restores those of the message."""
    if max(map(len, message)) <= CONTENT_BYTES:
        return message
    content = bytes([PART, True]) + pickle.dumps([bytes(frame) for frame in message], 5)
    return [content[at : at + CONTENT_BYTES] for at in range(0, len(content), CONTENT_BYTES)]


def _join(frames: list[bytes]) -> list[bytes]:
    if frames[0][0] != PART:
        return frames
    message: list[bytes] = pickle.loads(memoryview(b"".join(frames))[2:])
    return message


class LocalLink:
    """A Unix socket, whose connection ends with the driver. If `send` does not wait, a thread sends the rest."""

    lost_at: float | None = None  # by `time.monotonic`; None while there is a connection
    is_new: bool = True  # whether the worker has not said anything on it

    def __init__(self, config: LaneConfig, *, waits: bool = True) -> None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Not `settimeout`, with which Python asks the system before each message whether there is one.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, POLL_MS * 1000))
            if connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= PACKET_BYTES:
                raise OSError("the buffers of Unix sockets are too small here")
            connected.connect(config.local_address)
            connected.send(config.local_key + config.identity)
        except BaseException:
            connected.close()
            raise
        self._packets = Packets(connected)
        self._waits = waits
        self._sending = threading.Lock()
        self._is_flushing = False

    def close(self) -> None:
        self._packets.close()

    def files(self) -> list[int]:
        return [self._packets.fileno()]

    def send(self, message: Sequence[bytes]) -> None:
        """Send a message so that it arrives whatever this thread does next."""
        try:
            with self._sending:
                self._packets.send(message)
                begins = self._packets.is_behind and not self._is_flushing
                self._is_flushing = self._is_flushing or begins
            if begins and self._waits:
                self._flush()
            elif begins:
                threading.Thread(target=self._flush_quietly, name="fairlead-lane-send", daemon=True).start()
        except OSError as error:
            raise _lost(error) from error

    def _flush(self) -> None:
        poller = select.poll()  # unlike `select.select` for a process with any number of open files
        poller.register(self._packets.fileno(), select.POLLOUT)
        while self._is_flushing:
            poller.poll(POLL_MS)
            with self._sending:
                self._packets.flush()
                self._is_flushing = self._packets.is_behind

    def _flush_quietly(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the connection has ended, which `receive` reports
            self._flush()

    def receive(self, *, waits: bool) -> list[bytes] | None:
        """Return a message; None if there is none, after at most `POLL_MS` if it `waits`."""
        try:
            message = None
            while message is None:
                message = self._packets.receive(0 if waits else socket.MSG_DONTWAIT)
            return message
        except BlockingIOError:
            return None
        except OSError as error:
            raise _lost(error) from error


def _lost(error: OSError) -> DriverLostError:
    return DriverLostError(f"the driver has closed its connection of the lane, or has ended: {error}")


def make_socket(zmq: Any, context: Any, kind: int, address: str, options: dict[int, Any]) -> tuple[Any, Any, Any]:
    """Return a ZeroMQ socket, and what receives and sends a frame: pyzmq's own wrappers double their time."""
    made = context.socket(kind)
    common = {
        zmq.LINGER: 0,
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: FRAME_BYTES,
        zmq.IPV6: "[" in address,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: DEAD_LINK_MS,
    }
    for option, value in {**common, **options}.items():
        made.setsockopt(option, value)
    plain: Any = super(zmq.Socket, made)
    return made, plain.recv, plain.send


class NetworkLink:
    """A ZeroMQ socket, which connects again by itself; without pyzmq a ModuleNotFoundError."""

    is_new: bool = False

    def __init__(self, config: LaneConfig) -> None:
        try:
            zmq: Any = importlib.import_module("zmq")
            monitor: Any = importlib.import_module("zmq.utils.monitor")
        except ImportError as error:
            raise ModuleNotFoundError(
                "a lane needs pyzmq in the Python of the workers, and it is not installed there"
            ) from error
        self.lost_at: float | None = time.monotonic()
        self._zmq = zmq
        self._read_event = monitor.recv_monitor_message
        self._context = zmq.Context()
        options: dict[int, Any] = {
            zmq.ROUTING_ID: config.identity,
            zmq.CURVE_SERVERKEY: config.server_key,
            zmq.CURVE_PUBLICKEY: config.public_key,
            zmq.CURVE_SECRETKEY: config.secret_key,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RCVTIMEO: POLL_MS,
        }
        made = make_socket(zmq, self._context, zmq.DEALER, config.address, options)
        self._socket, self._receive_frame, self._send_frame = made
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(config.address)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def files(self) -> list[int]:
        """Return the files that become readable once when something happens."""
        return [self._socket.getsockopt(self._zmq.FD), self._monitor.getsockopt(self._zmq.FD)]

    def send(self, message: Sequence[bytes]) -> None:
        """Send a message; a thread of the library does that."""
        *others, last = message
        for frame in others:
            self._send_frame(frame, SEND_MORE)
        self._send_frame(last)

    def receive(self, *, waits: bool) -> list[bytes] | None:
        """Return a message; None if there is none, or if the connection was lost or made while it waited."""
        if waits and self.lost_at is None:
            # Waiting for the monitor at the same time would double the time of a message.
            try:
                return self._receive_message()
            except self._zmq.Again:
                waits = False
        ready = dict(self._poller.poll(POLL_MS if waits else 0))
        if self._monitor in ready:
            self._read_events()
        return self._receive_message() if self._socket in ready else None

    def _receive_message(self) -> list[bytes]:
        message = [self._receive_frame()]
        # The second byte says whether frames follow.
        has_more = message[0][1]
        while has_more:
            message.append(self._receive_frame())
            has_more = self._socket.getsockopt(RECEIVES_MORE)
        return _join(message)

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            if self._read_event(self._monitor)["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.lost_at, self.is_new = None, True
            else:
                self.lost_at = self.lost_at or time.monotonic()


def connect(config: LaneConfig, *, waits: bool = True) -> LocalLink | NetworkLink:
    """Connect with the driver of a lane: by its Unix socket if it is on this node and can be reached so."""
    if config.local_address:
        with contextlib.suppress(OSError):  # such as in a network namespace of its own
            return LocalLink(config, waits=waits)
    return NetworkLink(config)

# SPDX-License-Identifier: Apache-2.0
"""The driver's socket of a lane, which lets only holders of the lane's keys connect."""

import contextlib
import importlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._remote.lane import (
    ANSWER_BYTES,
    DEAD_LINK_MS,
    HEARTBEAT_MS,
    NO_BLOCK,
    RECEIVES_MORE,
    SEND_MORE,
    LaneConfig,
    make_socket,
)
from ..exceptions import LaneError

# Of ZeroMQ, as numbers, as those of the worker's end.
EVENTS, POLL_IN = 15, 1
ZAP_ADDRESS = "inproc://zeromq.zap.01"


class Router:
    """A socket that many workers connect to, each under its own name. The caller serialises its use.

    Workers of this node connect by a Unix socket, which takes a quarter less CPU time than TCP. It has no file.

    Args:
        address: the address of this node, as in a URL.
        port: a port that is leased here.

    Attributes:
        address: the address for workers of other nodes.
        local_address: the address for workers of this node.

    Raises:
        LaneError: the port cannot be bound.
    """

    def __init__(self, address: str, port: int) -> None:
        zmq: Any = importlib.import_module("zmq")
        self._zmq = zmq
        self._server = zmq.curve_keypair()
        self._client = zmq.curve_keypair()
        self._allowed: bytes = importlib.import_module("zmq.utils.z85").decode(self._client[0])
        self._context = zmq.Context()
        # Asked by the library about every connection, before the socket receives anything from it.
        self._gatekeeper = self._context.socket(zmq.REP)
        self._gatekeeper.bind(ZAP_ADDRESS)
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.IPV6: ":" in address,
            zmq.ROUTER_MANDATORY: 1,
            # A worker that reconnects before the old connection has timed out takes its place.
            zmq.ROUTER_HANDOVER: 1,
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self._server[1],
            zmq.ZAP_DOMAIN: b"fairlead",
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: DEAD_LINK_MS,
        }
        self._socket, self._receive_frame, self._send_frame = make_socket(zmq, self._context, zmq.ROUTER, options)
        host = f"[{address}]" if ":" in address else address
        self.address: str = f"tcp://{host}:{port}"
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise LaneError(
                f"The lane cannot listen at {self.address}: {error}. Another process of this node may have taken the "
                "port since it was found free. Open the lane again, or give the cluster ports that other processes do "
                "not use, with its `port_range_low` and `port_range_high`."
            ) from error
        # An abstract socket, which ends with the process.
        self.local_address: str = f"ipc://@fairlead-lane-{uuid.uuid4().hex}"
        try:
            self._socket.bind(self.local_address)
        except zmq.ZMQError:  # a sandbox may forbid such sockets
            self.local_address = self.address
        self._batch: list[tuple[bytes, Sequence[Any]]] | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._socket, self._gatekeeper, self._wake):
            self._poller.register(source, zmq.POLLIN)

    def config(self, identity: bytes, *, is_local: bool = False) -> LaneConfig:
        """Return what a worker needs to connect under a name; `is_local` says that it is on this node."""
        address = self.local_address if is_local else self.address
        return LaneConfig(address, identity, self._server[0], *self._client)

    def interrupt(self) -> None:
        """End the `wait` of another thread."""
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for messages or an interruption, and let workers connect meanwhile.

        Returns:
            Whether messages are there; False after an interruption, so that the caller lets the thread that caused it
            use the socket.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._gatekeeper in ready:
            self._let_in()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return False
        return self._socket in ready

    def receive(self) -> Iterator[tuple[bytes, bytes, list[bytes]]]:
        """Yield the messages that have arrived: the name of the sender, the first frame, and the other frames."""
        receive, get_option = self._receive_frame, self._socket.getsockopt
        # Asking whether there is one takes less time than the exception of a socket that has none.
        while get_option(EVENTS) & POLL_IN:
            identity, first, others = receive(NO_BLOCK), receive(), []
            # The header says whether frames follow.
            has_more = first[1] if len(first) >= ANSWER_BYTES else get_option(RECEIVES_MORE)
            while has_more:
                others.append(receive())
                has_more = get_option(RECEIVES_MORE)
            yield identity, first, others

    @contextlib.contextmanager
    def batch(self, lost: Callable[[bytes], object]) -> Iterator[None]:
        """Send the messages of a block together at its end.

        The library's own thread takes messages that follow each other at once without going to sleep in between, which
        saves a switch of threads for each of them.

        Args:
            lost: called with each name of which there is no connection.
        """
        batch: list[tuple[bytes, Sequence[Any]]] = []
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None
            for identity, message in batch:
                if not self.send(identity, message):
                    lost(identity)

    def send(self, identity: bytes, message: Sequence[Any]) -> bool:
        """Send a message; return whether there is a connection of this name, as far as it is known."""
        if self._batch is not None:
            self._batch.append((identity, message))
            return True
        try:
            *others, last = identity, *message
            for frame in others:
                self._send_frame(frame, NO_BLOCK | SEND_MORE)
            self._send_frame(last, NO_BLOCK)
        except self._zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._close_sockets()
        os.close(self._wake)

    def _close_sockets(self) -> None:
        self._socket.close(0)
        self._gatekeeper.close(0)
        self._context.term()

    def _let_in(self) -> None:
        while self._gatekeeper.poll(0):
            version, request, _, _, _, mechanism, *credentials = self._gatekeeper.recv_multipart()
            is_known = mechanism == b"CURVE" and credentials == [self._allowed]
            verdict = (b"200", b"") if is_known else (b"400", b"not a worker of this lane")
            self._gatekeeper.send_multipart([version, request, *verdict, b"", b""])

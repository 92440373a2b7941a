# SPDX-License-Identifier: Apache-2.0
"""The driver's sockets of a lane, which let only holders of the lane's keys connect."""

import contextlib
import importlib
import os
import resource
import select
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairlead_workergroup.exceptions import LaneError

from ._local import LocalSocket
from ._worker.links import NO_BLOCK, RECEIVES_MORE, SEND_MORE, LaneConfig, make_socket, split
from ._worker.serve import ANSWER_BYTES

# Of ZeroMQ, as numbers, as those of the worker's end.
EVENTS, POLL_IN = 15, 1
ZAP_ADDRESS = "inproc://zeromq.zap.01"
# Files that the process needs besides one for each connection.
SPARE_FILES = 512


class Router:
    """The sockets of a lane: Unix on this node, ZeroMQ over TCP between nodes. One thread uses them."""

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
            zmq.ROUTER_MANDATORY: 1,
            # A worker that reconnects before the old connection has timed out takes its place.
            zmq.ROUTER_HANDOVER: 1,
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self._server[1],
            zmq.ZAP_DOMAIN: b"fairlead",
        }
        host = f"[{address}]" if ":" in address else address
        self.address: str = f"tcp://{host}:{port}"
        made = make_socket(zmq, self._context, zmq.ROUTER, self.address, options)
        self._socket, self._receive_frame, self._send_frame = made
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise LaneError(
                f"The lane cannot listen at {self.address}: {error}. Another process of this node may have taken the "
                "port since it was found free. Open the lane again, or give the cluster ports that other processes do "
                "not use, with its `port_range_low` and `port_range_high`."
            ) from error
        self._batch: list[tuple[bytes, Sequence[Any]]] | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not with the sockets: another thread may be about to write to it.
        weakref.finalize(self, os.close, self._wake)
        self._guard = self._gatekeeper.getsockopt(zmq.FD)
        # Whether messages of the network may be there that its file does not announce: it announces changes only.
        self._may_have_more = True
        self._poller = select.epoll()
        self._option = self._socket.getsockopt
        self._file = self._option(zmq.FD)
        for file in (self._wake, self._guard, self._file):
            self._poller.register(file, select.EPOLLIN)
        self._local = LocalSocket(self._poller)

    def config(self, identity: bytes, *, is_local: bool = False) -> LaneConfig:
        """Return what a worker needs to connect under a name; `is_local` says that it is on this node."""
        config = LaneConfig(self.address, identity, self._server[0], *self._client)
        return self._local.complete(config) if is_local else config

    def interrupt(self) -> None:
        """End the `wait`; any thread may call this."""
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened, and let workers connect."""
        note = self._local.note
        happened = self._poller.poll(0 if self._has_message() else timeout_s)
        if any(file in self._local for file, _ in happened):
            # The workers of a call answer at about the same time. Those of this node do so first, and so their answers
            # are taken together: with more workers than cores this halves the number of turns.
            os.sched_yield()
            happened = self._poller.poll(0)
        # A look at the socket that takes its announcement, such as one by another thread, costs one wait at most.
        self._may_have_more = self._may_have_more or not happened
        for file, events in happened:
            if file == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(file)
            elif file == self._guard:
                self._let_in()
            elif file == self._file:
                self._may_have_more = True
            else:
                note(file, events)

    def receive(self, *, drains: bool = False) -> Iterator[tuple[bytes, Sequence[bytes]]]:
        """Yield messages, as `LocalSocket.receive` does; without `drains`, `wait` says whether there are more."""
        yield from self._local.receive(drains=drains)
        receive = self._receive_frame
        # Asking whether there is one takes less time than the exception of a socket that has none.
        while self._has_message():
            identity, message = receive(NO_BLOCK), [receive()]
            # The header says whether frames follow.
            has_more = message[0][1] if len(message[0]) >= ANSWER_BYTES else self._option(RECEIVES_MORE)
            while has_more:
                message.append(receive())
                has_more = self._option(RECEIVES_MORE)
            yield identity, message

    def _has_message(self) -> bool:
        """Whether a message has arrived by the network."""
        self._may_have_more = self._may_have_more and bool(self._option(EVENTS) & POLL_IN)
        return self._may_have_more

    @contextlib.contextmanager
    def batch(self, lost: Callable[[bytes], object]) -> Iterator[None]:
        """Send the messages of a block together, which saves thread switches; call `lost` without a connection."""
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
        if (sent := self._local.send(identity, message)) is not None:
            return sent
        if self._batch is not None:
            self._batch.append((identity, message))
            return True
        self._may_have_more = True
        try:
            *others, last = identity, *split(message)
            for frame in others:
                self._send_frame(frame, NO_BLOCK | SEND_MORE)
            self._send_frame(last, NO_BLOCK)
        except self._zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._close_sockets()
        self._local.close()
        self._poller.close()

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


def raise_file_limit(count: int) -> None:
    """Raise the soft limit of open files, if the connections with so many workers need that and it is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(hard, count + SPARE_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

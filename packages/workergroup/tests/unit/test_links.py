# SPDX-License-Identifier: Apache-2.0
"""Tests of the Unix sockets of a lane, at both ends, without Ray."""

import os
import socket
import threading
import time

import pytest

pytest.importorskip("zmq")

from fairlead_workergroup import _futures as futures_of
from fairlead_workergroup._remote.links import (
    PACKET_BYTES,
    DriverLostError,
    LaneConfig,
    LocalLink,
    NetworkLink,
    Packets,
    connect,
)


@pytest.fixture
def pair():
    """Yield the two ends of a connection."""
    ends = [Packets(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends
    for end in ends:
        end.close()


def take(end: Packets, count: int) -> list:
    """Return so many messages."""
    messages: list = []
    while len(messages) < count:
        if (message := end.receive()) is not None:
            messages.append(message)
    return messages


@pytest.fixture
def driver():
    """Yield the listening socket of a driver, and what a worker needs to connect to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(20)
        listener.bind(f"\0fairlead-test-{os.getpid()}")
        listener.listen()
        yield listener, LaneConfig("", b"name", b"", b"", b"", listener.getsockname().decode(), b"key")


class TestPackets:
    @pytest.mark.parametrize(
        "message",
        [
            [b"\0" * 30],
            [b"\0" * PACKET_BYTES],
            [b"\0" * (PACKET_BYTES + 1)],
            [b"\0\1", b""],
            [b"\0\1" * 30, os.urandom(3 * PACKET_BYTES), b"end"],
        ],
        ids=["small", "one packet", "two packets", "two frames", "large"],
    )
    def test_messages(self, pair, message):
        """The frames of a message arrive as they were sent, whatever their number and size."""
        one, other = pair
        threads = [threading.Thread(target=self.send_all, args=(one, [message, [b"\0next"]]))]
        threads[0].start()
        assert take(other, 2) == [message, [b"\0next"]]
        threads[0].join(20)
        assert not one.is_behind

    @staticmethod
    def send_all(end: Packets, messages: list) -> None:
        for message in messages:
            end.send(message)
        deadline = time.monotonic() + 20
        while end.is_behind and time.monotonic() < deadline:
            end.flush()

    def test_nobody_receives(self, pair):
        """A sender does not wait for the other side; what that does not receive waits, in order."""
        one, other = pair
        messages = [[b"\0" + bytes([i]) * 20_000] for i in range(100)]
        for message in messages:
            one.send(message)
        assert one.is_behind
        received: list = []
        while one.is_behind:
            received += take(other, 1)
            one.flush()
        assert received + take(other, len(messages) - len(received)) == messages

    def test_end(self, pair):
        """What was sent before the end arrives, and then the end."""
        one, other = pair
        one.send([b"\0last"])
        one.close()
        assert take(other, 1) == [[b"\0last"]]
        with pytest.raises(ConnectionResetError):
            other.receive()
        with pytest.raises(OSError, match="Broken pipe"):
            other.send([b"\0"])


class TestLocalLink:
    def test_end_of_the_driver(self, driver):
        """A worker notices at once that the driver has ended, while it waits and when it sends."""
        listener, config = driver
        link = connect(config)
        assert isinstance(link, LocalLink)
        accepted, _ = listener.accept()
        assert accepted.recv(100) == b"keyname"
        assert link.receive(waits=True) is None
        accepted.close()
        for _ in range(2):
            with pytest.raises(DriverLostError, match="has closed its connection of the lane"):
                link.receive(waits=True)
        with pytest.raises(DriverLostError):
            link.send([b"\0"])
        link.close()

    def test_driver_does_not_receive(self, driver):
        """The answers that a stopped driver does not receive are sent when it goes on, in order."""
        listener, config = driver
        link = LocalLink(config)
        accepted, _ = listener.accept()
        end = Packets(accepted)
        assert take(end, 1) == [[b"keyname"]]
        messages = [[b"\0" + bytes([i]) * 20_000, b"more"] for i in range(100)]
        for message in messages:
            link.send(message)
        assert link.is_behind
        assert link.receive(waits=True) is None
        received: list = []
        receiver = threading.Thread(target=lambda: received.extend(take(end, len(messages))))
        receiver.start()
        deadline = time.monotonic() + 20
        while link.is_behind and time.monotonic() < deadline:
            link.receive(waits=True)
        receiver.join(20)
        assert received == messages
        end.close()
        link.close()

    @pytest.mark.parametrize("why", ["nobody listens", "small buffers"])
    def test_no_unix_socket(self, driver, monkeypatch, why):
        """Where the Unix socket cannot be used, the worker connects by the network."""
        config = driver[1]._replace(address="tcp://127.0.0.1:9", server_key=bytes(32), public_key=bytes(32))
        config = config._replace(secret_key=bytes(32))
        if why == "nobody listens":
            config = config._replace(local_address="\0fairlead-nowhere")
        else:
            # Not a constant of the module: a class that was shipped by value in this process has its own copy of it.
            monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: PACKET_BYTES)
        link = connect(config)
        assert isinstance(link, NetworkLink)
        link.close()


class TestLane:
    """Messages of a lane that are too large for a packet, or that a worker does not receive."""

    def test_large_messages(self, group):
        """Arguments and answers of several packets arrive whole, in order, by both kinds of sockets."""
        values = [os.urandom(80_000), "x" * 9_000]
        sent = [group.send("echo", i, *values) for i in range(50)]
        assert [futures_of.get(futures, 60) for futures in sent] == [[((i, *values), {})] * 2 for i in range(50)]

    def test_worker_that_receives_nothing(self, group):
        """The driver does not wait for a worker that runs a method, and sends the rest when it goes on."""
        group.gate.clear()
        block = "x" * 20_000
        sent = [group.send("add", [i, block]) for i in range(60)]
        assert group.ran == [[], []]
        assert not futures_of.wait(sent[-1], timeout=0.1)[0]
        group.gate.set()
        assert [futures_of.get(futures, 60) for futures in sent] == [[[i, block]] * 2 for i in range(60)]

    def test_worker_without_connection(self, group, eventually):
        """A worker whose connection is closed ends its serve call at once, with the reason."""
        session = group.lane._sessions[0]
        ((identity, packets),) = group.router._local._links.values()
        assert identity == session.identity
        with group.lane._hold():
            group.router._local._drop(identity, packets)
        assert isinstance(session.items.ended.exception(20), DriverLostError)
        assert eventually(lambda: session.over)
        assert futures_of.get(group.send("add", 1), 20) == [1, 1]  # by a connection of its own

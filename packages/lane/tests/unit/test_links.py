# SPDX-License-Identifier: Apache-2.0
"""Tests of the Unix sockets of a lane, at both ends, without Ray."""

import asyncio
import contextlib
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("zmq")

from fairlead_lane import _local as local_of
from fairlead_lane._worker.links import (
    CONTENT_BYTES,
    PACKET_BYTES,
    DriverLostError,
    LaneConfig,
    LocalLink,
    NetworkLink,
    Packets,
    connect,
)
from fairlead_lane._worker.overlap import serve_overlapping
from fairlead_lane._worker.serve import (
    ACK,
    ANSWER,
    ANSWER_BYTES,
    CALL,
    INLINE,
    INLINE_BYTES,
    REQUEST,
    STOP,
    STORED,
    WELCOME,
    Connection,
    make_answer,
    make_error,
    serve,
)

from ..lanes import get_values, wait_ready


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

    @pytest.mark.parametrize("waits", [True, False])
    def test_driver_does_not_receive(self, driver, waits):
        """The messages that a stopped driver does not receive are sent when it goes on, in order."""
        listener, config = driver
        link = LocalLink(config, waits=waits)
        accepted, _ = listener.accept()
        accepted.settimeout(20)
        end = Packets(accepted)
        assert take(end, 1) == [[b"keyname"]]
        messages = [[b"\0" + bytes([i]) * 20_000, b"more"] for i in range(100)]
        sender = threading.Thread(target=lambda: [link.send(message) for message in messages])
        sender.start()
        sender.join(0.1 if waits else 20)
        assert sender.is_alive() == waits
        assert take(end, len(messages)) == messages
        sender.join(20)
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


class Peer:
    """The driver's end of a connection, which receives only when a test says so."""

    def __init__(self, listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        accepted.settimeout(20)
        self.end = Packets(accepted)
        self.sent = self.taken = 0
        assert take(self.end, 1) == [[b"keyname"]]

    def send(self, kind: int, method: str = "") -> None:
        numbered = kind not in (WELCOME, ACK)
        self.sent += numbered
        task = bytes([self.sent]) * 24
        header = struct.pack(REQUEST, kind, False, self.sent * numbered, self.taken, task)
        self.end.send([header + pickle.dumps((method, [], {}))])

    def take(self, count: int) -> list[int]:
        """Return the calls that so many answers belong to, or 0 for a greeting."""
        headers = [struct.unpack(ANSWER, message[0][:ANSWER_BYTES]) for message in take(self.end, count)]
        self.taken = max(number for *_, number, _, _ in headers)
        return [call for *_, call in headers]


class TestConnection:
    @pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "async"])
    @pytest.mark.parametrize("methods", [["make"] * 12 + ["hold"], ["items"]], ids=["answers", "items"])
    def test_code_after_an_answer(self, driver, overlaps, methods):
        """Answers and items arrive while the next code of the worker runs, even if the driver receives late."""
        holding, released = threading.Event(), threading.Event()

        def make():
            return b"x" * 90_000

        def hold():
            holding.set()
            released.wait(60)

        def items():
            for _ in range(12):
                yield make()
            hold()

        def run():
            find = {"make": make, "hold": hold, "items": items}.__getitem__
            if overlaps:
                asyncio.run(collect(serve_overlapping(driver[1], find, lambda read: None)))
            else:
                list(serve(driver[1], find, lambda read: None))

        worker = threading.Thread(target=run, daemon=True)
        worker.start()
        peer = Peer(driver[0])
        peer.send(WELCOME)
        for method in methods:
            peer.send(CALL, method)
        try:
            holding.wait(0.3)
            calls = peer.take(13)
            assert calls == [0, *range(1, 13)] if len(methods) > 1 else [0, *[1] * 12]
            assert holding.wait(20)
        finally:
            released.set()
            peer.send(STOP)
            peer.take(3 if overlaps else 2)
            peer.send(ACK)
            worker.join(20)
            peer.end.close()

    def test_connection_closed_before_the_greeting(self, driver):
        """A worker whose connection is closed before the driver has said anything connects again."""
        connection = Connection(driver[1])
        Peer(driver[0]).end.close()
        deadline = time.monotonic() + 20
        while not select.select([driver[0]], [], [], 0)[0] and time.monotonic() < deadline:
            connection.look(waits=True)
        peer = Peer(driver[0])
        peer.send(WELCOME)
        while not connection.is_welcome and time.monotonic() < deadline:
            connection.look(waits=True)
        assert peer.take(1) == [0]
        peer.end.close()
        with pytest.raises(DriverLostError):
            connection.look(waits=True)
        connection.close()


def receive_many(link: LocalLink, times: int) -> None:
    for _ in range(times):
        link.receive(waits=True)


async def collect(items) -> list:
    return [item async for item in items]


@pytest.fixture
def lane_socket():
    """Yield the driver's Unix socket, and a function that handles what has happened to it."""
    with select.epoll() as poller:
        made = local_of.LocalSocket(poller)

        def handle() -> list:
            happened = poller.poll(0)
            for file, events in happened:
                made.note(file, events)
            return happened

        yield made, handle
        made.close()


def make_link(made: local_of.LocalSocket, name: bytes = b"name") -> LocalLink:
    return LocalLink(made.complete(LaneConfig("", name, b"", b"", b"")))


class TestLocalSocket:
    def test_shared_files(self, lane_socket):
        """A connection that has ended is not reported any more, even if another process has it too."""
        made, handle = lane_socket
        with make_link_and_guest(made):
            while not made._links or not made._guests:
                handle()
            shared = [os.dup(file) for file in (*made._links, *made._guests)]
        try:
            while made._links or made._guests:
                handle()
                assert list(made.receive(drains=False)) == []
            assert handle() == []
        finally:
            for file in shared:
                os.close(file)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_forked_child(self, lane_socket):
        """A worker's connection ends with the driver, even if a child that the driver has forked goes on."""
        made, handle = lane_socket
        link = make_link(made)
        while not made._links:
            handle()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            made.close()
            with pytest.raises(DriverLostError):
                receive_many(link, 80)
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)
            link.close()

    def test_key_that_was_not_read(self, lane_socket, monkeypatch):
        """A worker whose key has arrived stays connected, however many connections without a key follow."""
        monkeypatch.setattr(local_of, "MOST_GUESTS", 4)
        made, handle = lane_socket
        link = make_link(made)
        guests = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(10)]
        for guest in guests:
            guest.connect(made.complete(LaneConfig("", b"", b"", b"", b"")).local_address)
        while handle():
            pass
        assert made.send(b"name", [b"\0hello"])
        assert link.receive(waits=True) == [b"\0hello"]
        assert len(made._guests) == 4
        for end in (link, *guests):
            end.close()

    def test_other_users(self, lane_socket, monkeypatch):
        """A process of another user does not get in, even with the key."""
        made, handle = lane_socket
        assert local_of.user_of(socket.socketpair(socket.AF_UNIX)[0]) == os.geteuid()
        monkeypatch.setattr(local_of, "user_of", lambda _: os.geteuid() + 1)
        link = make_link(made)
        while handle():
            pass
        assert made.send(b"name", [b"\0hello"]) is None
        with pytest.raises(DriverLostError):
            link.receive(waits=True)
        link.close()


@contextlib.contextmanager
def make_link_and_guest(made: local_of.LocalSocket) -> Iterator[None]:
    """Connect with the key and without it."""
    link = make_link(made)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.connect(made.complete(LaneConfig("", b"", b"", b"", b"")).local_address)
        yield
    link.close()


class TestLane:
    """Messages of a lane that are too large for a packet, or that a worker does not receive."""

    def test_large_messages(self, group):
        """Arguments and answers of several packets arrive whole, in order, by both kinds of sockets."""
        values = [os.urandom(80_000), "x" * 9_000]
        sent = [group.send("echo", i, *values) for i in range(50)]
        assert [get_values(futures, 60) for futures in sent] == [[((i, *values), {})] * 2 for i in range(50)]

    def test_many_arguments(self, group):
        """Arguments that are small but many arrive, as do the largest answers when they are passed on together."""
        sent = group.send("total", *[os.urandom(9_900) for _ in range(300)])
        assert get_values(sent, 60) == [300 * 9_900] * 2
        answers = [future for _ in range(15) for future in group.send("add", os.urandom(INLINE_BYTES - 100))]
        assert get_values(group.send("total", *answers), 60) == [30 * (INLINE_BYTES - 100)] * 2

    def test_worker_of_another_user(self, group, monkeypatch):
        """A worker that the Unix socket refuses connects by the network."""
        monkeypatch.setattr(local_of, "user_of", lambda _: os.geteuid() + 1)
        with group.lane.detour([0, 1]):  # after which the workers connect again
            pass
        assert get_values(group.send("add", 1), 20) == [1, 1]
        assert not group.router._local._by_name.keys() & {group.lane._sessions[0].identity}

    def test_worker_that_receives_nothing(self, group):
        """The driver does not wait for a worker that runs a method, and sends the rest when it goes on."""
        group.gate.clear()
        block = "x" * 20_000
        sent = [group.send("add", [i, block]) for i in range(60)]
        assert group.ran == [[], []]
        assert not wait_ready(sent[-1], timeout=0.1)[0]
        group.gate.set()
        assert [get_values(futures, 60) for futures in sent] == [[[i, block]] * 2 for i in range(60)]

    def test_worker_without_connection(self, group, eventually):
        """A worker whose connection is closed ends its serve call at once, with the reason."""
        session = group.lane._sessions[0]
        ((identity, packets),) = group.router._local._links.values()
        assert identity == session.identity
        with group.hold():
            group.router._local._drop(identity, packets)
        assert isinstance(session.items.ended.exception(20), DriverLostError)
        assert eventually(lambda: session.over)
        assert get_values(group.send("add", 1), 20) == [1, 1]  # by a connection of its own

    def test_largest_answer(self):
        """Whatever a worker sends in a message is smaller than the largest frame that the driver takes."""
        error = ValueError("\N{SNOWMAN}" * INLINE_BYTES)
        largest = [make_answer(bytes(INLINE_BYTES - 100)), make_error("method", error)]
        assert [answer.form for answer in largest] == [INLINE, STORED]
        assert sum(map(len, largest[0].frames)) + ANSWER_BYTES <= CONTENT_BYTES

# SPDX-License-Identifier: Apache-2.0
"""Lanes for tests: workers that are threads of this process, without Ray, and sockets that do not belong to a lane."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fairlead_lane._router import Router
from fairlead_lane._transport import Lane
from fairlead_lane._worker.serve import LaneConfig, serve
from fairlead_workergroup._calls.route import use_transport
from fairlead_workergroup.spi import Site


class Request(NamedTuple):
    method: str
    args: list
    kwargs: dict


class Handle:
    """An actor whose serve calls run in threads, one after the other, as Ray runs them."""

    def __init__(self, methods: dict) -> None:
        self._actor_id = b"\x01" * 16
        self.methods = methods
        self.turn = threading.Lock()
        self.held = threading.Event()
        self.held.set()
        self._fairlead_stream = self

    def remote(self, code, config) -> "Serving":
        return Serving(self, config)


class Serving:
    """A serve call, in place of its generator."""

    def __init__(self, handle: Handle, config) -> None:
        self.ended: Future = Future()
        started = threading.Event()

        def run() -> None:
            with handle.turn:
                started.set()
                try:
                    list(serve(config, handle.methods.__getitem__, lambda read: None))
                except BaseException as error:  # noqa: BLE001  reported as Ray does
                    self.ended.set_exception(error)
                else:
                    self.ended.set_result(None)

        threading.Thread(target=run, daemon=True).start()
        started.wait(0.2)

    def completed(self) -> "Serving":
        return self

    def future(self) -> Future:
        return self.ended


class Member:
    def __init__(self, rank: int, handle: Handle) -> None:
        self.rank, self.handle = rank, handle
        self.failure, self.restarting = None, False
        # Rank 0 connects by a Unix socket, and the others by TCP.
        self.process = SimpleNamespace(node_id="there" if rank else "here")


class Members(list):
    @property
    def members(self):
        return self

    def has(self, ranks) -> bool:
        return all(rank < len(self) for rank in ranks)


class Roster:
    connected, ending = True, False

    def __init__(self, members: Members) -> None:
        self.now = members

    def find(self, actor_id: str) -> None:
        return None


class Group:
    """A lane with workers that are threads; with `early`, the first call is made before the lane opens."""

    def __init__(self, size: int, port: int, *, early: bool = False) -> None:
        self.ran: list[list] = [[] for _ in range(size)]
        self.gate = threading.Event()
        self.gate.set()
        self.members = Members(Member(rank, Handle(self.methods(rank))) for rank in range(size))
        self.router = Router("127.0.0.1", port)
        self.released: list[bool] = []
        self.site = Site(Roster(self.members), None, overlaps=False)
        self.lane = Lane(self.site, self.router, lambda: self.released.append(True), None, node_id="here")
        self.early: list = self.send("add", 0) if early else []
        self.lane.open(20)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the lane's thread from its work, when it has done what it was given before."""
        held, release = threading.Event(), threading.Event()

        def wait() -> None:
            held.set()
            release.wait(60)

        self.lane._do(wait)
        assert held.wait(20)
        try:
            yield
        finally:
            release.set()

    def methods(self, rank: int) -> dict:
        def echo(*args, **kwargs):
            return args, kwargs

        def add(value):
            self.gate.wait(120)
            self.ran[rank].append(value)
            return value

        def total(*values):
            return sum(map(len, values))

        def items(count):
            yield from range(count)

        def items_and_note(count):
            self.ran[rank].append(("items", count))
            yield from range(count)

        def fail(text):
            raise KeyError(text)

        def items_and_fail():
            yield 1
            raise KeyError("after an item")

        methods = (echo, add, total, items, items_and_note, items_and_fail, fail)
        return {method.__name__: method for method in methods}

    def send(self, method: str, *args, ranks=None, **kwargs) -> list:
        ranks = range(len(self.members)) if ranks is None else ranks
        requests = [Request(method, list(args), kwargs) for _ in ranks]
        encoded = self.lane.encode(requests)
        return self.lane.send(self.members, ranks, encoded, yields_items=method.startswith("items"))


def find_port() -> int:
    """Return a port that nobody uses, and that no other process gets by chance, also while a lane binds it again."""
    for port in random.sample(range(20000, 30000), 100):  # The system and Ray choose theirs elsewhere.
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("100 ports of 20000-29999 are in use")


@contextlib.contextmanager
def open_group(*, early: bool = False) -> Iterator[Group]:
    made = Group(2, find_port(), early=early)
    try:
        yield made
    finally:
        made.gate.set()
        made.lane.stop()
        made.lane.close(20)
    assert made.released == [True]


class Resources:
    """Resources whose registration publishes to a list; `hold` runs when a thread is about to publish no lane."""

    def __init__(self, hold=lambda: None) -> None:
        self.published: list[bool] = []
        self.registration = self
        self._hold = hold

    def __setattr__(self, name, value):
        if name == "lane" and not value:
            self._hold()
        object.__setattr__(self, name, value)

    def publish(self):
        self.published.append(self.lane)

    def await_handles(self, timeout_s):
        """Nobody else asks."""


def open_lane(sender, resources, timeout_s):
    """Let a sender use a lane that does nothing."""

    def make(site):
        return SimpleNamespace(detour=None, open=sender.opens, stop=lambda: None, close=lambda _: None)

    return use_transport(sender, sender.membership, resources, make, timeout_s)


@contextlib.contextmanager
def connect_stranger(config: LaneConfig, keys: str, *, identity: bytes = b"") -> Iterator[Any]:
    """Connect a socket to a lane and send a message.

    Args:
        config: where the lane listens, and its keys.
        keys: those of the socket: "none", "wrong client" or "wrong server".
        identity: the name of the socket; empty for one that zmq chooses.

    Yields:
        The monitor of the socket, which has a message if a handshake succeeds.
    """
    zmq: Any = pytest.importorskip("zmq")
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if identity:
            stranger.routing_id = identity
        if keys != "none":
            stranger.curve_publickey, stranger.curve_secretkey = public, secret
            stranger.curve_serverkey = config.server_key if keys == "wrong client" else public
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            stranger.connect(config.address)
            with contextlib.suppress(zmq.Again):  # the handshake may have failed already
                stranger.send(b"x" * 100, zmq.NOBLOCK)
            yield monitor
        finally:
            stranger.disable_monitor()
            monitor.close(0)

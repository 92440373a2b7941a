# SPDX-License-Identifier: Apache-2.0
"""Lanes for tests: workers that are threads of this process, without Ray, sockets of strangers, and faults of lanes.

Tests of calls use these functions, and no private module of the packages. What a function changes lasts as long as the
`pytest.MonkeyPatch` that it is given.
"""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fairlead_lane import _local
from fairlead_lane._router import Router
from fairlead_lane._session import WINDOW
from fairlead_lane._transport import SLICE_S, Lane
from fairlead_lane._worker import serve as wire
from fairlead_lane._worker.links import NetworkLink
from fairlead_lane._worker.serve import LaneConfig, serve
from fairlead_workergroup._calls import sender as sender_of
from fairlead_workergroup._calls.execution import Execution
from fairlead_workergroup._calls.plan import CallOptions
from fairlead_workergroup._calls.route import use_transport
from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.operations import Route
from fairlead_workergroup._membership.phases import Phase
from fairlead_workergroup._observe.query import cancel_calls
from fairlead_workergroup._transport.futures import get as get_values
from fairlead_workergroup._transport.futures import wait as wait_ready
from fairlead_workergroup._transport.messages import references_of
from fairlead_workergroup._world import Deadline
from fairlead_workergroup.spi import Site

__all__ = [
    "Group",
    "Handle",
    "NetworkLink",
    "Resources",
    "Router",
    "SLICE_S",
    "WINDOW",
    "cancel_calls",
    "connect_stranger",
    "get_values",
    "open_group",
    "open_lane",
    "references_of",
    "wait_ready",
    "wire",
]

Patch = pytest.MonkeyPatch


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


def make_sender() -> Any:
    """Return the sender of a group without workers, whose lanes do nothing."""
    now = SimpleNamespace(
        members=[SimpleNamespace(slot=None, failure=None)], sharding=None, is_broken=False, ended=False
    )
    roster = SimpleNamespace(connected=True, ending=False, detour=None, check_connected=lambda: None)
    roster.now, roster.check_alive = now, lambda: now
    membership = Membership(roster, SimpleNamespace(policy=SimpleNamespace(on_failure=False)), None, None)
    membership._phase = Phase.SERVING
    membership.describe_wait = lambda advice="": f"A restart goes on. {advice}"
    described = SimpleNamespace(worker_class=SimpleNamespace(concurrent=False))
    return SimpleNamespace(
        roster=roster,
        described=described,
        transport=None,
        users_of_transport=0,
        membership=membership,
        opens=lambda _: None,
    )


def make_calling_sender() -> Any:
    """Return a sender of the package, whose calls are sent to nobody."""
    empty = make_sender()
    echo = SimpleNamespace(remote=lambda *args, **kwargs: object())
    member = SimpleNamespace(handle=SimpleNamespace(echo=echo))
    now = SimpleNamespace(
        lost=(), sharding=None, members=[member], epoch=0, is_broken=False, ended=False, has=lambda ranks: True
    )
    empty.roster.check_alive, empty.roster.now = lambda: now, now
    counters = SimpleNamespace(add=lambda **counts: None)
    return sender_of.Sender(empty.roster, empty.described, empty.membership, counters, None, None)


def make_order() -> Any:
    """Return a call of rank 0 that has not been sent."""
    method = SimpleNamespace(name="echo", result="value")
    return sender_of.Order(method, [0], [sender_of.Request("echo", [], {})], 0.0, Deadline(), (0, 0), ())


class RepeatedCall:
    """A call that has been sent, and is repeated because its workers were lost."""

    def __init__(self, sender: Any) -> None:
        sent = sender_of.Sent([], 0, 0)
        self._execution = Execution(sender, None, make_order(), sent, [], CallOptions(retries=1))
        self._execution.pending = list

    def repeat(self, within_s: float | None = None) -> bool:
        """Repeat it, or wait until another thread has; return whether that is done in time."""
        return bool(self._execution.repeat(-1, Deadline.after(within_s)))


def is_free(membership: Any, within_s: float = 20.0) -> bool:
    """Return whether this thread can make a call, and change the group."""
    deadline = Deadline.after(within_s)
    is_open = membership.gate.run(lambda: True, deadline)
    return bool(is_open and membership.begin(Route("nothing", lambda gate: None)).wait(deadline))


@contextlib.contextmanager
def restarting(membership: Any) -> Iterator[None]:
    """Let another operation hold the turn of a group, as a restart of workers does."""
    held, release = threading.Event(), threading.Event()

    def hold(gate: Any) -> None:
        held.set()
        release.wait(60)

    change = membership.begin(Route("a restart", hold))
    assert held.wait(20)
    yield
    release.set()
    assert change.wait(Deadline.after(20))


def make_config(address: str, server_key: bytes, public_key: bytes, secret_key: bytes) -> LaneConfig:
    """Return what a worker needs to connect by the network."""
    return LaneConfig(address, b"name", server_key, public_key, secret_key)


def find_ends_by(patch: Patch, function: Callable[[Any], Any]) -> None:
    """Let a lane find out with a function which workers have stopped to serve it, instead of asking Ray."""
    patch.setattr("fairlead_lane._transport.find_ended", function)


def look_for_ends_every(patch: Patch, seconds: float) -> None:
    """Let a lane look at this interval which workers have stopped to serve it."""
    patch.setattr("fairlead_lane._transport.CHECK_S", seconds)


def look_rarely(patch: Patch) -> None:
    """Let the thread of a lane find what no message announces only after a minute."""
    patch.setattr("fairlead_lane._transport.SLICE_S", 60.0)


def let_workers_look_rarely(patch: Patch) -> None:
    """Let idle workers look only each minute for what no message announces."""
    patch.setattr("fairlead_lane._worker.serve.QUIET_S", 60.0)


def block_shutdown_by(patch: Patch, block: Callable[[], Any]) -> None:
    """Let a lane keep `ray.shutdown()` waiting with this context manager."""
    patch.setattr("fairlead_lane._transport.block_shutdown", block)


def limit_waiting_calls(patch: Patch, count: int) -> None:
    """Let this number of calls of a worker wait to be sent before a thread has to wait."""
    patch.setattr("fairlead_lane._transport.Lane.most_waiting", count)


def limit_strangers(patch: Patch, count: int) -> None:
    """Let a Unix socket keep this number of connections that have not shown the key."""
    patch.setattr("fairlead_lane._local.MOST_GUESTS", count)


def hide_unix_sockets(patch: Patch) -> None:
    """Let workers look for the Unix socket of their lane where it is not, as in another network namespace."""
    patch.setattr(_local.LocalSocket, "complete", lambda _, config: config._replace(local_address="\0nowhere"))


def ask_nodes_by(patch: Patch, function: Callable[..., Any]) -> None:
    """Let a function answer for the agents of nodes, which a cancelled call asks about its workers."""
    patch.setattr("fairlead_workergroup._observe.query.ask_nodes", function)


def act_in_waits(patch: Patch, act: Callable[[Any, float | None], object]) -> None:
    """Let `act` run when a thread begins to wait in a lane, with the lane and the timeout."""
    run = Lane.run

    def act_and_run(lane: Any, is_enough: Callable[[], bool], timeout_s: float | None) -> Any:
        act(lane, timeout_s)
        return run(lane, is_enough, timeout_s)

    patch.setattr(Lane, "run", act_and_run)


def act_at_each_look(patch: Patch, act: Callable[[Any], object]) -> None:
    """Let `act` run with the lane each time a thread that waits in a lane looks whether it goes on."""
    run = Lane.run

    def run_and_act(lane: Any, is_enough: Callable[[], bool], timeout_s: float | None) -> Any:
        def act_and_look() -> bool:
            act(lane)
            return is_enough()

        return run(lane, act_and_look, timeout_s)

    patch.setattr(Lane, "run", run_and_act)


def list_ranks_that_serve(lane: Any) -> list[int]:
    """Return the ranks that serve a lane, or follow its end."""
    return [one.rank for one in lane._by_identity.values()]


def list_ranks_that_have_greeted(lane: Any) -> list[int]:
    """Return the ranks that have come to a lane that opens."""
    return [one.rank for one in lane._sessions.values() if one.greeted]

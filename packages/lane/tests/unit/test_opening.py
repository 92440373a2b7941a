# SPDX-License-Identifier: Apache-2.0
"""Tests of how a lane is opened, of its address and of its keys, without Ray."""

import contextlib
import os
import pickle
import secrets
import socket
import struct
import threading

import pytest

zmq = pytest.importorskip("zmq")

from fairlead_workergroup.exceptions import LaneError  # noqa: E402

from ..lanes import (  # noqa: E402
    NetworkLink,
    Resources,
    Router,
    connect_stranger,
    find_ends_by,
    get_values,
    hide_unix_sockets,
    limit_strangers,
    make_config,
    open_group,
    open_lane,
    wire,
)


class TestOpening:
    def test_one_thread_closes_and_another_opens(self, sender):
        """The state that other processes see is that of the lane that was opened last."""
        closing, opened = threading.Event(), threading.Event()

        def hold():
            if not closing.is_set():
                closing.set()
                opened.wait(0.5)  # until the deadline if no other thread can open a lane meanwhile

        resources = Resources(hold)

        def open_and_close():
            with open_lane(sender, resources, 60):
                pass

        first = threading.Thread(target=open_and_close)
        first.start()
        assert closing.wait(20)
        with open_lane(sender, resources, 60):
            opened.set()
            first.join(20)
            assert resources.published[-1] is True
        assert resources.published[-1] is False

    def test_interrupted_opening(self, sender, eventually):
        """Ctrl-C while the state is published leaves no lane open."""
        resources = Resources()

        def publish():
            if resources.lane:
                raise KeyboardInterrupt

        resources.publish = publish
        with pytest.raises(KeyboardInterrupt):
            open_lane(sender, resources, 60).__enter__()
        assert eventually(lambda: sender.transport is None)


class TestKeys:
    @pytest.mark.parametrize("keys", ["none", "wrong client", "wrong server", "garbage"])
    def test_strangers(self, group, keys):
        """Nobody without the keys of the lane is heard, and the calls go on."""
        config = group.router.config(b"stranger")
        if keys == "garbage":
            with socket.create_connection(("127.0.0.1", int(config.address.rpartition(":")[2]))) as stranger:
                stranger.sendall(os.urandom(4096))
                assert get_values(group.send("echo", 1)) == [((1,), {})] * 2
            return
        with connect_stranger(config, keys, identity=group.lane._sessions[0].identity) as monitor:
            for i in range(20):
                assert get_values(group.send("echo", i), 30) == [((i,), {})] * 2
            assert not monitor.poll(200)

    @pytest.mark.parametrize("says", ["greeting", "answer", "wrong key", "half a key", "garbage", "nothing"])
    def test_strangers_on_this_node(self, group, says):
        """Nobody without the key of the Unix socket is heard, not even under the name of a worker."""
        config, session = group.router.config(bytes(20), is_local=True), group.lane._sessions[0]
        group.gate.clear()
        sent = group.send("add", 1)
        with group.hold():
            (number,) = session._calls
        content = {
            "greeting": struct.pack(wire.ANSWER, wire.HELLO, 0, wire.INLINE, 0, 0, 0),
            "answer": struct.pack(wire.ANSWER, wire.VALUE, 0, wire.INLINE, 2, 0, number) + pickle.dumps("forged"),
            "wrong key": os.urandom(32) + session.identity,
            "half a key": config.local_key[:16] + session.identity,
            "garbage": os.urandom(4096),
            "nothing": b"",
        }[says]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(20)
            stranger.connect(config.local_address)
            if content:
                stranger.send(content)
                assert stranger.recv(1) == b""  # the lane has closed the connection
            group.gate.set()
            assert get_values([*sent, *group.send("echo", 1)], 20) == [1, 1, *[((1,), {})] * 2]
        assert group.ran == [[1], [1]]

    def test_many_strangers_on_this_node(self, group, monkeypatch):
        """Connections that say nothing do not keep the workers from connecting."""
        limit_strangers(monkeypatch, 4)
        config = group.router.config(bytes(20), is_local=True)
        with contextlib.ExitStack() as stack:
            strangers = []
            for _ in range(10):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stranger.settimeout(20)
                stranger.connect(config.local_address)
                strangers.append(stranger)
            assert strangers[0].recv(1) == b""
            with group.lane.detour([0, 1]):  # after which the workers connect again
                pass
            assert get_values(group.send("add", 1), 20) == [1, 1]

    def test_holder_of_the_keys(self, group):
        """A message that is not of the protocol is ignored, also from a holder of the keys."""
        config = group.router.config(b"x" * 20)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.routing_id = config.identity
            stranger.curve_publickey, stranger.curve_secretkey = config.public_key, config.secret_key
            stranger.curve_serverkey = config.server_key
            stranger.connect(config.address)
            stranger.send(b"x")
            for i in range(20):
                assert get_values(group.send("echo", i)) == [((i,), {})] * 2


class TestSizes:
    """What a peer without the keys may send: a greeting of ZeroMQ, and then the beginning of a frame of 4 GiB."""

    GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
    BEGINNING = struct.pack(">BQ", 6, 1 << 32)

    def announce(self, peer: socket.socket) -> bytes:
        """Announce a large frame, and return the bytes that arrive until the other side closes the connection."""
        peer.settimeout(60)
        received = b""
        with contextlib.suppress(ConnectionError):
            peer.sendall(self.GREETING)
            while len(received) < len(self.GREETING):
                received += peer.recv(64)
            peer.sendall(self.BEGINNING)
            while data := peer.recv(4096):
                received += data
        return received

    def test_driver(self, group):
        """The driver closes the connection of a stranger who announces a large frame, and the calls go on."""
        with socket.create_connection(("127.0.0.1", int(group.router.address.rpartition(":")[2]))) as stranger:
            assert self.announce(stranger)
        assert get_values(group.send("echo", 1), 20) == [((1,), {})] * 2

    def test_worker(self):
        """A worker closes its connection if a false driver announces a large frame."""
        keys = zmq.curve_keypair()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(20)
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            link = NetworkLink(make_config(address, zmq.curve_keypair()[0], *keys))
            peer, _ = listener.accept()
            with peer:
                assert self.announce(peer)
            link.close()


class TestAddress:
    def test_port_in_use(self, group):
        """A port that another process has taken is named, with what to do."""
        port = int(group.router.address.rpartition(":")[2])
        with pytest.raises(LaneError, match=rf"cannot listen at tcp://127\.0\.0\.1:{port}: .*port_range_low"):
            Router("127.0.0.1", port)

    def test_no_unix_sockets(self, monkeypatch):
        """Where a Unix socket cannot be bound, workers of this node connect by TCP too."""
        find_ends_by(monkeypatch, lambda streams: {})
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind("\0fairlead-lane-taken")
            monkeypatch.setattr(secrets, "token_hex", lambda _: "taken")
            with open_group() as group:
                assert not group.router.config(b"", is_local=True).local_address
                assert get_values(group.send("add", 1), 20) == [1, 1]

    def test_socket_out_of_reach(self, monkeypatch):
        """A worker that cannot reach the Unix socket, such as in a network namespace of its own, connects by TCP."""
        find_ends_by(monkeypatch, lambda streams: {})
        hide_unix_sockets(monkeypatch)
        with open_group() as group:
            assert get_values(group.send("add", 1), 20) == [1, 1]

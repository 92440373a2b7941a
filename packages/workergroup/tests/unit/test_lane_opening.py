# SPDX-License-Identifier: Apache-2.0
"""Tests of how a lane is opened, of its address and of its keys, without Ray."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

zmq = pytest.importorskip("zmq")

from fairlead_workergroup import _futures as futures_of  # noqa: E402
from fairlead_workergroup._calls.lane import open_lane  # noqa: E402
from fairlead_workergroup._lane.router import Router  # noqa: E402
from fairlead_workergroup.exceptions import LaneError  # noqa: E402

from ..lanes import Resources, connect_stranger  # noqa: E402


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
            with open_lane(sender, resources, 5):
                pass

        first = threading.Thread(target=open_and_close)
        first.start()
        assert closing.wait(20)
        with open_lane(sender, resources, 5):
            opened.set()
            first.join(20)
            assert resources.published[-1] is True
        assert resources.published[-1] is False

    def test_interrupted_opening(self, sender):
        """Ctrl-C while the state is published leaves no lane open."""
        resources = Resources()

        def publish():
            if resources.lane:
                raise KeyboardInterrupt

        resources.publish = publish
        with pytest.raises(KeyboardInterrupt):
            open_lane(sender, resources, 5).__enter__()
        assert sender.lane is None


class TestKeys:
    @pytest.mark.parametrize("is_local", [False, True])
    @pytest.mark.parametrize("keys", ["none", "wrong client", "wrong server", "garbage"])
    def test_strangers(self, group, keys, is_local):
        """Nobody without the keys of the lane is heard, and the calls go on."""
        config = group.router.config(b"stranger", is_local=is_local)
        if keys == "garbage":
            with socket.socket(socket.AF_UNIX if is_local else socket.AF_INET) as stranger:
                name = config.address.rpartition("@" if is_local else ":")[2]
                stranger.connect("\0" + name if is_local else ("127.0.0.1", int(name)))
                stranger.sendall(os.urandom(4096))
                assert futures_of.get(group.send("echo", 1)) == [((1,), {})] * 2
            return
        with connect_stranger(config, keys, identity=group.lane._sessions[0].identity) as monitor:
            for i in range(20):
                assert futures_of.get(group.send("echo", i), 30) == [((i,), {})] * 2
            assert not monitor.poll(200)

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
                assert futures_of.get(group.send("echo", i)) == [((i,), {})] * 2


class TestAddress:
    def test_port_in_use(self, group):
        """A port that another process has taken is named, with what to do."""
        port = int(group.router.address.rpartition(":")[2])
        with pytest.raises(LaneError, match=rf"cannot listen at tcp://127\.0\.0\.1:{port}: .*port_range_low"):
            Router("127.0.0.1", port)

    def test_no_unix_sockets(self, group, monkeypatch):
        """Where a Unix socket cannot be bound, workers of this node connect by TCP too."""
        taken = group.router.local_address.rpartition("-")[2]
        monkeypatch.setattr("fairlead_workergroup._lane.router.uuid.uuid4", lambda: SimpleNamespace(hex=taken))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        router = Router("127.0.0.1", port)
        try:
            assert router.config(b"", is_local=True).address == f"tcp://127.0.0.1:{port}"
        finally:
            router.close()

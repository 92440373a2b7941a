# SPDX-License-Identifier: Apache-2.0
"""The process of a node agent, without Ray: it holds ports, and notices which processes have ended."""

import contextlib
import errno
import os
import socket
import subprocess
import threading

import pytest

from fairlead_placement._nodes import agent_process
from fairlead_placement._nodes.agent_process import AgentProcess


def _are_free(ports):
    with contextlib.ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
        except OSError:
            return False
    return True


# Ten ports that nobody uses; other processes of this machine may run these tests at the same time.
LOW = next(low for low in range(20000 + os.getpid() % 1000 * 10, 32000, 10) if _are_free(range(low, low + 10)))


def test_a_release_that_overtakes_its_lease():
    """A release may arrive before its lease. Then no port stays held, and others can use it."""
    agent = AgentProcess()
    agent.release(["late"])
    assert agent.lease(["late"], LOW, LOW, "me") == ([], 0, 0)
    assert agent.leased() == []
    assert agent.lease(["other"], LOW, LOW, "me") == ([LOW], 0, 0)
    agent.release(["other"])
    assert agent.leased() == []


def test_a_release_that_overtakes_its_watch():
    """A release may arrive before its watch. Then a single sample is taken, and no thread samples for good."""
    agent = AgentProcess()
    agent.release(["late"])
    assert agent.memory("late", "me")[5] == 1
    assert (agent._watches, agent._owner) == ({}, {})


def has_ipv6():
    try:
        with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def serve(family, address, port, *, reuse, only_ipv6=False):
    """Listen as a server of one family, or of both, does."""
    with contextlib.closing(socket.socket(family)) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        if reuse:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen()


@pytest.fixture
def process():
    """Return the object that an agent runs, in this process."""
    process = AgentProcess()
    yield process
    process.release(list(process._held))


@needs_ipv6
@pytest.mark.parametrize(
    ("family", "address", "only_ipv6"),
    [
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET6, "::", True),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
    ],
)
def test_a_port_is_held_on_both_families(process, family, address, only_ipv6):
    """No other process can bind a leased port on IPv4, IPv6 or both. The server that it is for can listen on it."""
    assert process.lease(["mine"], LOW, LOW, "me") == ([LOW], 0, 0)
    with pytest.raises(OSError, match="Address already in use"):
        serve(family, address, LOW, reuse=False, only_ipv6=only_ipv6)
    serve(family, address, LOW, reuse=True, only_ipv6=only_ipv6)
    process.release(["mine"])
    with contextlib.closing(socket.socket(family)) as other:
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        other.bind((address, LOW))
        assert process.lease(["late"], LOW, LOW, "me") == ([], 0, 1)


@pytest.mark.parametrize("missing", ["the family", "its addresses"])
def test_a_machine_without_ipv6(process, monkeypatch, missing, bind):
    """Ports are leased on IPv4 alone if the system has no IPv6 (seam: the system refuses it)."""

    class Socket(socket.socket):
        def __init__(self, family=socket.AF_INET, *more):
            if family == socket.AF_INET6 and missing == "the family":
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *more)

        def bind(self, address):
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Socket)
    assert process.lease(["mine"], LOW, LOW, "me") == ([LOW], 0, 0)
    with pytest.raises(OSError, match="Address already in use"):
        bind(LOW)
    bind(LOW, reuse=True)
    assert process.lease(["other"], LOW, LOW, "me") == ([], 1, 0)


def test_ended_processes(process):
    """An agent releases what ended processes hold, the driver among them; an unknown state has no effect."""
    alive = {"dead": False, "unknown": None, "well": True}
    for port, owner in enumerate(alive, LOW):
        process.lease([owner], port, port, owner)
        process.publish(owner, 1, "value", owner)
    process.release_of_ended(alive.get)
    assert process.leased() == [LOW + 1, LOW + 2]
    assert sorted(process.published()) == ["unknown", "well"]


def leaves(process):
    """Return whether the agent ends its process."""
    ended = []
    process.end_if_idle(lambda: ended.append(True))
    return bool(ended)


class TestLeaving:
    """An agent leaves only when nothing keeps it."""

    @pytest.fixture(autouse=True)
    def no_children(self, monkeypatch):
        monkeypatch.setattr(agent_process, "has_children", lambda: False)

    def test_after_a_while(self, process, monkeypatch):
        """An agent waits for further requests after each one, unless it is told to leave."""
        assert not leaves(process)
        process.leave()
        assert process.answer("leased") == []
        assert not leaves(process)
        process.leave()
        assert leaves(process)
        monkeypatch.setattr(agent_process, "IDLE_S", 0.0)
        assert process.answer("leased") == []
        assert leaves(process)

    @pytest.mark.parametrize(
        ("take", "give_back"),
        [
            (("lease", ["mine"], LOW, LOW, "owner"), ("release", ["mine"])),
            (("memory", "watcher", "owner"), ("release", ["watcher"])),
            (("publish", "key", 1, "value", "owner"), ("release", ["key"])),
            (("publish", "key", 1, "value", "owner"), ("release_of_ended", lambda owner: owner != "owner")),
        ],
    )
    def test_what_it_holds(self, process, take, give_back):
        """A lease, a watcher and a publication keep it until they are given back, or their owner has ended."""
        getattr(process, take[0])(*take[1:])
        process.leave()
        assert not leaves(process)
        getattr(process, give_back[0])(*give_back[1:])
        process.leave()
        assert leaves(process)

    def test_what_a_function_does(self, process, monkeypatch):
        """A function that runs keeps it, and so does a thread that a function has started, until it ends."""
        monkeypatch.setattr(agent_process, "IDLE_S", 0.0)
        ends = threading.Event()
        thread = threading.Thread(target=ends.wait)
        assert process.answer("run", leaves, process) is False
        process.answer("run", thread.start)
        assert not leaves(process)
        ends.set()
        thread.join()
        assert leaves(process)

    def test_a_child(self, monkeypatch):
        """A child process that runs keeps it, and one that has ended does not, even before it has been waited for."""
        monkeypatch.undo()
        assert not agent_process.has_children()
        with subprocess.Popen(["sleep", "60"]) as child:
            assert agent_process.has_children()
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert not agent_process.has_children()

    def test_a_request_that_comes_too_late(self, process):
        """A request after the decision waits for the end of the process: its function must not run twice."""
        ran = threading.Event()
        thread = threading.Thread(target=process.answer, args=("run", ran.set))

        def end():
            thread.start()
            assert not ran.wait(0.2)

        process.leave()
        process.end_if_idle(end)  # only here does it return
        thread.join()
        assert ran.is_set()

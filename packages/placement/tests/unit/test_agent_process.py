# SPDX-License-Identifier: Apache-2.0
"""The process of a node agent, without Ray: it holds ports and publications."""

import contextlib
import errno
import os
import socket
import threading

import pytest

from fairlead_placement._nodes.agent_process import NodeAgent


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
    process = NodeAgent()
    yield process
    process.release(["mine", "other", "late"])


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
    assert process.lease(["mine"], LOW, LOW) == ([LOW], 0, 0)
    with pytest.raises(OSError, match="Address already in use"):
        serve(family, address, LOW, reuse=False, only_ipv6=only_ipv6)
    serve(family, address, LOW, reuse=True, only_ipv6=only_ipv6)
    process.release(["mine"])
    with contextlib.closing(socket.socket(family)) as other:
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        other.bind((address, LOW))
        assert process.lease(["late"], LOW, LOW) == ([], 0, 1)


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
    assert process.lease(["mine"], LOW, LOW) == ([LOW], 0, 0)
    with pytest.raises(OSError, match="Address already in use"):
        bind(LOW)
    bind(LOW, reuse=True)
    assert process.lease(["other"], LOW, LOW) == ([], 1, 0)


def test_a_lease_that_is_requested_again(process):
    """A lease whose answer was lost is requested again by the same ids, and is the same then."""
    assert process.lease(["mine"], LOW, LOW) == ([LOW], 0, 0)
    assert process.lease(["mine"], LOW, LOW) == ([LOW], 0, 0)
    assert process.lease(["other"], LOW, LOW) == ([], 1, 0)
    process.release(["mine", "mine", "unknown"])
    assert process.lease(["other"], LOW, LOW) == ([LOW], 0, 0)


def test_publications(process):
    """A reader that has the latest version gets no value, and an older version replaces no newer one."""
    process.publish(["key"], 3, "value")
    process.publish(["key"], 2, "late")
    process.publish(["other"], 1, "theirs")
    assert process.read("key", 2) == (3, "value")
    assert process.read("key", 3) == (3, None)
    assert process.read_all("k") == {"key": "value"}
    process.release(["key"])
    assert process.read("key", 0) == (0, None)
    assert process.read_all("") == {"other": "theirs"}


def test_samples(process, eventually):
    """A watcher gets the peak of all samples since sampling began, and none from before a pause without watchers."""
    first = process.memory(["mine"])
    assert first[0] == first[1] + first[2]
    assert eventually(lambda: process.memory(["other"])[4] == 3)
    assert process.memory(["mine"])[3] >= first[3]
    process.release(["mine", "other"])
    assert eventually(lambda: "fairlead-memory" not in {thread.name for thread in threading.enumerate()})
    assert process.memory(["late"])[4] == 1

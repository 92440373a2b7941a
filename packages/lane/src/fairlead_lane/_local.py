# SPDX-License-Identifier: Apache-2.0
"""The driver's Unix socket of a lane, for the workers of its node."""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence

from ._worker.links import LaneConfig, Packets

KEY_BYTES = 32
# The connections whose key has not arrived. The first of them is closed when there are more.
MOST_GUESTS = 256
BACKLOG = 1024
_open: "weakref.WeakSet[LocalSocket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close all sockets after a fork: a connection that the child has too would not end with this process."""
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


def user_of(connected: socket.socket) -> int:
    """Return the user of the process that has connected."""
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


class LocalSocket:
    """A Unix socket and its connections by name. Where such a socket cannot be made, it has no connections."""

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller
        self._key = secrets.token_bytes(KEY_BYTES)
        # The zero makes it an address without a file.
        self._address = f"\0fairlead-lane-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        # By descriptor.
        self._guests: dict[int, socket.socket] = {}
        self._links: dict[int, tuple[bytes, Packets]] = {}
        self._by_name: dict[bytes, Packets] = {}
        self._readable: list[tuple[bytes, Packets]] = []
        try:
            self._listener.bind(self._address)
            self._listener.listen(BACKLOG)
            poller.register(self._listener, select.EPOLLIN)
        except OSError:  # a sandbox may forbid such sockets
            self._address = ""
        _open.add(self)

    def complete(self, config: LaneConfig) -> LaneConfig:
        """Return what a worker of this node needs to connect."""
        return config._replace(local_address=self._address, local_key=self._key)

    def __contains__(self, file: int) -> bool:
        """Return whether a file is the connection of a worker."""
        return file in self._links

    def note(self, file: int, events: int) -> None:
        """Take an event that the poller has reported, if it is of this socket."""
        link = self._links.get(file)
        if link is None:
            if file in self._guests:
                self._let_in(file)
            elif file == self._listener.fileno():
                self._accept()
            return
        if events & select.EPOLLOUT:
            self._flush(link[1])
        if events & ~select.EPOLLOUT:
            self._readable.append(link)

    def receive(self, *, drains: bool) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield all messages that have arrived, or without `drains` one of each connection that was reported."""
        readable, self._readable = self._readable, []
        for name, packets in list(self._links.values()) if drains else readable:
            try:
                while True:
                    message = packets.receive(socket.MSG_DONTWAIT)
                    if message is not None:
                        yield name, message
                        if not drains:
                            break
            except BlockingIOError:
                continue
            except OSError:
                self._drop(name, packets)

    def send(self, name: bytes, message: Sequence[bytes]) -> bool | None:
        """Send a message; return whether the connection exists still, and None if there is none of this name."""
        packets = self._by_name.get(name)
        if packets is None:
            return None
        try:
            packets.send(message)
        except OSError:
            return False  # what the worker has sent before can still be received
        if packets.is_behind:
            self._poller.modify(packets, select.EPOLLIN | select.EPOLLOUT)
        return True

    def close(self) -> None:
        for guest in (self._listener, *self._guests.values()):
            guest.close()
        for packets in self._by_name.values():
            packets.close()

    def _accept(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many files are open
                if not self._guests:
                    return
                self._make_room()
                continue
            if user_of(guest) not in (0, os.geteuid()):
                guest.close()
                continue
            guest.setblocking(False)
            self._guests[guest.fileno()] = guest
            self._poller.register(guest, select.EPOLLIN)
            if len(self._guests) > MOST_GUESTS:
                self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has waited longest, unless its key has arrived."""
        file = next(iter(self._guests))
        self._let_in(file)
        if file in self._guests:
            self._dismiss(file)

    def _let_in(self, file: int) -> None:
        """Read the key and the name that a new connection gives; close it if the key is wrong."""
        try:
            said = self._guests[file].recv(KEY_BYTES + 1024)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not hmac.compare_digest(said[:KEY_BYTES], self._key):
            self._dismiss(file)
            return
        name, packets = said[KEY_BYTES:], Packets(self._guests.pop(file))
        if (old := self._by_name.get(name)) is not None:
            self._drop(name, old)
        self._by_name[name] = packets
        self._links[file] = name, packets

    def _dismiss(self, file: int) -> None:
        # Closing a file ends its events only if no other process has it, such as one that forks right now.
        self._poller.unregister(file)
        self._guests.pop(file).close()

    def _flush(self, packets: Packets) -> None:
        with contextlib.suppress(OSError):  # the end of the connection is received
            packets.flush()
        if not packets.is_behind:
            self._poller.modify(packets, select.EPOLLIN)

    def _drop(self, name: bytes, packets: Packets) -> None:
        """Close a connection that has ended, unless it has been closed before."""
        if self._by_name.get(name) is packets:
            del self._by_name[name], self._links[packets.fileno()]
            self._poller.unregister(packets)
            packets.close()

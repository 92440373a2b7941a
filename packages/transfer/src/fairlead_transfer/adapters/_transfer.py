# SPDX-License-Identifier: Apache-2.0
"""The part of one process in one transfer: its connections, its messages and its errors.

The first sender leads: all other processes are connected to it.
"""

import contextlib
import functools
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from .._remote.segment import Description
from .._remote.sockets import LOOK_S, Caller, Gone, Late, close, join
from ..exceptions import Phase, RankFailure, Role, State, TransferError
from ._buckets import Part
from ._members import Membership
from ._messages import is_closed, receive, send_all

AGAIN = (
    "Start lost processes again and update the weights again. Engines that have loaded a part hold a mixture of two "
    "versions until then."
)
OUT_OF_STEP = (
    "Each transfer is one call of each engine. If the next one fails too, prepare and connect all engines again."
)
# Seconds in which all others are notified that this process has failed.
FAREWELL_S = 1.0
Arrivals = queue.SimpleQueue[tuple[Caller, socket.socket]]
_Message = TypeVar("_Message")


class Start(NamedTuple):
    """All processes are connected to the leader."""


class Staged(NamedTuple):
    """A sender has filled its share of a bucket."""

    bucket: int
    parts: list[Part]  # what it has in the bucket
    last: bool
    description: Description  # where the share is


class Bucket(NamedTuple):
    """A receiver is to copy a bucket."""

    number: int
    parts: list[Part]
    filled: int  # bytes
    staged: Mapping[int, Description]  # the shares by sender; empty if `whole` is given
    whole: Description | None  # where the reader of the node has put the bucket
    relays: bool  # whether others on the node get it from this receiver
    last: bool


class Copied(NamedTuple):
    """A receiver has copied a bucket; or, from the leader, all have."""

    bucket: int
    whole: Description | None = None  # where others on its node find it


class Transfer:
    """The connections of one process in one transfer; the number counts the transfers of its engine."""

    def __init__(self, me: Membership, number: int, version: int | None, timeout: float) -> None:
        self.me = me
        self._number = number
        self.connections: dict[int, socket.socket] = {}
        self.bucket = 0  # the number of the next one
        self.delivered = False  # whether an engine may have loaded a part of the version
        self.timeout = timeout
        self._version = version or 0
        self._closed = False
        self._lock = threading.Lock()

    def open(self, arrivals: Arrivals) -> None:
        """Connect to the leader, or have all others connect to it; `arrivals` has the connections that it gets."""
        deadline = time.monotonic() + self.timeout
        if not self.me.number:
            self._gather(arrivals, deadline)
            self.tell(range(1, len(self.me.nodes)), Start())
            return
        address = self.me.addresses[0]
        try:
            join(address, self.me.secret, (self.me.number, self._number), deadline, functools.partial(self._add, 0))
        except Late as error:
            raise self.late({0}, f"accept a connection at {address}") from error
        except Gone as error:
            raise self.lost({0: str(error)}) from error
        self.hear(Start, "begin the transfer")

    def _gather(self, arrivals: Arrivals, deadline: float) -> None:
        """Wait until all others are connected."""
        others = set(range(1, len(self.me.nodes)))
        while True:
            # Those of a member that has given up, and will come again.
            for number in [number for number, connection in self.connections.items() if is_closed(connection)]:
                close(self.connections.pop(number))
            missing = others.difference(self.connections)
            if not missing:
                return
            if self._closed:
                raise self.lost({0: "its caller has given up"})
            if time.monotonic() > deadline:
                raise self.late(missing, "connect to source rank 0")
            with contextlib.suppress(queue.Empty):
                self._admit(arrivals, *arrivals.get(timeout=min(LOOK_S, max(0.0, deadline - time.monotonic()))))

    def _admit(self, arrivals: Arrivals, caller: Caller, connection: socket.socket) -> None:
        """Add the connection of a member that has come for this transfer; send away one that has come for another."""
        member, transfer = caller
        if transfer == self._number:
            self._add(member, connection)
            return
        why = f"it began transfer {transfer} of its engine, and source rank 0 is at transfer {self._number}"
        error = self.error({member: why}, OUT_OF_STEP)
        if transfer > self._number:  # it has given this one up, and waits for its own
            arrivals.put((caller, connection))
            raise error
        send_all({member: connection}, [member], error, time.monotonic() + FAREWELL_S)
        close(connection)

    def _add(self, number: int, connection: socket.socket) -> None:
        """Add a connection, in place of an earlier one of this member; Gone if the transfer has ended."""
        with self._lock:
            unused = None if self._closed else self.connections.pop(number, None)
            if not self._closed:
                self.connections[number] = connection
        if unused is not None:
            close(unused)
        if self._closed:
            close(connection)
            raise Gone("its caller has given up")

    def tell(self, numbers: Iterable[int], message: Any) -> None:
        """Send a message to other processes."""
        late, gone = send_all(self.connections, numbers, message, time.monotonic() + self.timeout)
        if gone:
            self.raise_reported(gone)
            raise self.lost(gone)
        if late:
            raise self.late(late, f"read a message about bucket {self.bucket}")

    def raise_reported(self, numbers: Iterable[int]) -> None:
        """Raise the error that one of these processes has sent before it closed its connection or its memory."""
        deadline = time.monotonic() + FAREWELL_S
        for number in numbers:
            with contextlib.suppress(Late, Gone, KeyError):
                while True:
                    message = receive(self.connections[number], deadline)
                    if isinstance(message, TransferError):
                        raise message

    def hear(self, kind: type[_Message], doing: str) -> _Message:
        """Return the next message of the leader."""
        # A little longer than the leader waits, whose error says which process is late.
        message = self.read(0, doing, time.monotonic() + 1.25 * self.timeout)
        if not isinstance(message, kind):
            raise self.error({0: f"it sent {message!r}, and {kind.__name__} was expected"}, AGAIN)
        return message

    def read(self, number: int, doing: str, deadline: float) -> Any:
        """Return a message of a process; raise the error of one that has failed."""
        try:
            message = receive(self.connections[number], deadline)
        except Late as error:
            raise self.late({number}, doing) from error
        except (Gone, KeyError) as error:
            raise self.lost({number: str(error)}) from error
        if isinstance(message, TransferError):
            raise message
        return message

    def late(self, numbers: Iterable[int], doing: str, waited_s: float | None = None) -> TransferError:
        """Return the error that some processes did not do something in time."""
        why = f"it did not {doing} within {waited_s or self.timeout:g} s"
        text = f"If these processes make progress, give the engine a longer timeout than {self.timeout:g} s. {AGAIN}"
        return self.error(dict.fromkeys(numbers, why), text)

    def lost(self, reasons: Mapping[int, str]) -> TransferError:
        """Return the error that some processes were lost."""
        why = f"it was lost at bucket {self.bucket}: its process has exited, or an error of its own has ended its part"
        return self.error({number: f"{why} ({reason})" for number, reason in reasons.items()}, AGAIN)

    def error(self, reasons: Mapping[int, str], remedy: str) -> TransferError:
        """Return an error that names processes."""
        me, failures = self.me, []
        for number, why in sorted(reasons.items()):
            side: Role = "source" if number < me.senders else "target"
            rank = number - (0 if side == "source" else me.senders)
            failures.append(RankFailure(side, rank, me.nodes[number], why))
        # Buckets go straight to the engines, which may have loaded them.
        phase: Phase = "commit" if self.delivered else "move"
        ranks = range(len(me.receivers) if self.delivered else 0)
        versions: dict[int, State] = dict.fromkeys(ranks, "inconsistent")
        return TransferError(phase, self._version, tuple(failures), versions, remedy)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process has failed."""
        report = error
        if not isinstance(error, TransferError):
            why = f"{type(error).__name__}: {error}"
            why = "its consumer stopped reading" if isinstance(error, GeneratorExit) else why
            report = self.error({self.me.number: why}, "See the error of that process.")
        # One that does not take it will see that the connection is closed.
        send_all(self.connections, list(self.connections), report, time.monotonic() + FAREWELL_S)

    def close(self) -> None:
        """Close all connections; a thread that waits for a message gets an error."""
        with self._lock:
            self._closed = True
            connections, self.connections = self.connections, {}
        for connection in connections.values():
            close(connection)

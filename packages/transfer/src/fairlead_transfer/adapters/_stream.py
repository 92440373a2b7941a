# SPDX-License-Identifier: Apache-2.0
"""Weights from some processes to others, bucket after bucket, when a framework has started both sides.

The first sender leads. Each sender says when it has filled its share of a bucket. The leader then tells the receivers
where the shares are. On each node without the memory of a sender, one receiver reads for all of the node. Two buckets
are in memory at a time: senders fill one while receivers copy the other.
"""

import asyncio
import contextlib
import multiprocessing.connection
import queue
import socket
import time
import traceback
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

from .._descriptions import TRAVELLING
from .._remote.segment import ENDED, Segments, Unread
from .._remote.server import READER, serve
from .._remote.sockets import Caller, Listener, close
from ._buckets import BucketShape, Packer, Part, Unpacker
from ._intake import Intake
from ._members import Membership, describe, reserve_ports
from ._transfer import AGAIN, Arrivals, Bucket, Copied, Staged, Transfer


class WeightEngine:
    """The part of one process, and what the checkpoint engines of all frameworks have alike.

    Each transfer connects again, and gives all memory and connections back at its end.

    Attributes:
        bucket_size: bytes of a bucket.
    """

    def __init__(self, bucket_size: int, timeout: float, dtype: str | None) -> None:
        if bucket_size < 1 or timeout <= 0:
            raise ValueError(f"bucket_size and timeout must be positive, got {bucket_size} and {timeout}.")
        if dtype is not None and dtype not in TRAVELLING:
            raise ValueError(f"dtype must be one of {', '.join(TRAVELLING)}, got {dtype!r}.")
        self.bucket_size = bucket_size
        self._timeout = timeout
        self._dtype = dtype
        self._ports: dict[str, socket.socket] = {}  # which wait for connections, by address
        self._me: Membership | None = None
        self._offered = [Segments()]  # what readers elsewhere may ask for
        self._arrivals: Arrivals = queue.SimpleQueue()
        self._release: Any = None
        self._current: tuple[Any, ...] = ()  # what the transfer that runs has open
        self._transfers = 0  # which have begun since this process has its place

    def prepare(self) -> dict[str, Any]:
        """Begin a transfer.

        Returns:
            What the other processes have to know of this one. It has a secret of the transfer.
        """
        self.finalize()
        self._ports = reserve_ports()
        return describe(self._ports, self.bucket_size)

    def _join(self, membership: Membership) -> None:
        """Take a place in the transfer. Nothing waits for others before the first bucket."""
        if not self._ports:
            raise ValueError("Call prepare() of the engine before it joins a transfer.")
        self._shape = BucketShape.fit(self.bucket_size, membership.senders)
        self._me, self._transfers = membership, 0
        if membership.listens:
            self._offered = offered = [Segments()]
            self._arrivals = arrivals = queue.SimpleQueue[tuple[Caller, socket.socket]]()

            def take(caller: Caller, connection: socket.socket) -> None:
                if caller == READER:
                    serve(connection, offered[0])
                else:
                    arrivals.put((caller, connection))

            host, _ = membership.addresses[membership.number]
            listener = Listener(self._ports.pop(host), membership.secret, take)
            # Its threads would keep the port open after an engine that nobody finalizes.
            self._release = weakref.finalize(self, _close_all, listener, arrivals)
        self._close_ports()

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Send weights; return when all receivers have copied the last bucket.

        Args:
            weights: names and whole tensors, the same in the same order on all senders.
            global_steps: the version, for errors. NeMo RL passes none.

        Raises:
            TransferError: a process is lost, late, or has failed; names it. `versions` says whether receivers may hold
                a mixture ("inconsistent").
            TypeError: something that is no dense torch tensor.
            ValueError: this engine has no place in a transfer.
        """
        me = self._joined("sends")
        offer, share = Segments(), self._shape.share
        self._offered[0] = offer
        packer = Packer(self._shape, me.number, self._dtype)
        with self._transferring(global_steps, offer) as transfer:
            sender = Leader(transfer) if not me.number else Follower(transfer)
            try:
                await asyncio.to_thread(transfer.open, self._arrivals)  # first, so that all others learn of an error
                packer.begin(offer.begin(0, share))
                for name, tensor in weights:
                    for _ in packer.add(name, tensor):
                        await asyncio.to_thread(sender.flush, offer, *packer.take(), False)
                        packer.begin(offer.begin(transfer.bucket % 2, share))
                await asyncio.to_thread(sender.flush, offer, *packer.take(), True)
            finally:
                packer.forget()

    async def _receive(self, version: int | None) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """Yield the tensors of each bucket. Their memory is this process's own, and lives as long as they do."""
        me = self._joined("receives")
        intake, unpacker, last = Intake(self._shape, me), Unpacker(self._shape), False
        with self._transferring(version, intake) as transfer:
            await asyncio.to_thread(transfer.open, self._arrivals)
            while not last:
                parts, memory, last = await asyncio.to_thread(_take, transfer, intake, unpacker)
                if last:
                    self._drop()  # nothing can fail any more
                tensors = list(unpacker.unpack(parts, memory))
                del memory
                if tensors:
                    yield tensors
                del tensors

    @contextlib.contextmanager
    def _transferring(self, version: int | None, memory: Segments | Intake) -> Iterator[Transfer]:
        """Begin a transfer with this memory; at the end give everything back, and tell the others of an error."""
        assert self._me is not None
        self._transfers += 1
        transfer = Transfer(self._me, self._transfers, version, self._timeout)
        self._drop()
        self._current = mine = transfer, memory
        try:
            yield transfer
        except BaseException as error:
            transfer.fail(error)
            raise
        finally:
            for part in mine:
                part.close()

    def finalize(self) -> None:
        """Leave the transfer, and give all memory and connections back. A call that runs in another thread fails."""
        self._drop()
        self._me = None
        if self._release is not None:
            self._release()
            self._release = None
        self._close_ports()

    def _close_ports(self) -> None:
        for port in self._ports.values():
            port.close()
        self._ports = {}

    def _drop(self) -> None:
        """Give back what the transfer has open."""
        for part in self._current:
            part.close()
        self._current = ()

    def _joined(self, doing: str) -> Membership:
        if self._me is None:
            text = "This engine takes part in no transfer: it has not joined one, or was finalized."
            raise ValueError(f"{text} Call prepare() of all engines, then connect them again.")
        role = "sends" if self._me.number < self._me.senders else "receives"
        if role != doing:
            raise ValueError(f"This engine {role} weights, and is not one that {doing} them.")
        return self._me


def _take(transfer: Transfer, intake: Intake, unpacker: Unpacker) -> tuple[list[Part], Any, bool]:
    """Copy the next bucket; return its content, its memory and whether it is the last one, which all have copied."""
    me = transfer.me
    bucket = transfer.hear(Bucket, f"send bucket {transfer.bucket}")
    memory, whole = unpacker.make(), None
    # The leader waits longer for this process, so that the error names the sender that is late.
    within_s = 0.75 * transfer.timeout
    try:
        if bucket.whole is not None:
            intake.map_whole(bucket.whole, bucket.filled, memory)
        else:
            whole = intake.read(bucket, memory, time.monotonic() + within_s)
    except Unread as error:
        traceback.clear_frames(error.__traceback__)  # they would keep the memory as long as the error
        transfer.raise_reported([0])  # it may say why that process has given back its memory
        if error.outcome == "late":
            doing = f"send its share of bucket {bucket.number} to target rank {me.number - me.senders}"
            raise transfer.late([error.source], doing, within_s) from error
        raise transfer.lost({error.source: str(error)}) from error
    transfer.tell([0], Copied(bucket.number, whole))
    transfer.bucket, transfer.delivered = bucket.number + 1, True
    if bucket.last:
        transfer.hear(Copied, "say that all receivers have the weights")
    return bucket.parts, memory, bucket.last


class Follower:
    """A sender that does not lead."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def flush(self, offer: Segments, parts: list[Part], filled: int, last: bool) -> None:
        """Offer a bucket, and return when the memory of the one before it can be filled again, or all is copied."""
        transfer, number = self._transfer, self._transfer.bucket
        self._stage(Staged(number, parts, last, offer.end(number % 2)), filled)
        self._await_copies(number - 1)
        if last:
            self._await_copies(number)
        transfer.bucket = number + 1

    def _stage(self, staged: Staged, filled: int) -> None:
        self._transfer.tell([0], staged)
        self._transfer.delivered = True  # from now on, a receiver may have it

    def _await_copies(self, bucket: int) -> None:
        self._transfer.hear(Copied, f"say that all receivers have copied bucket {bucket}")


class Leader(Follower):
    """The sender that leads."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self._readers = transfer.me.find_readers()
        self._staged: dict[int, Staged] = {}
        # The receivers that have yet to copy each bucket, and what they were told.
        self._copying: dict[int, set[int]] = {}
        self._told: dict[int, Bucket] = {}

    def _stage(self, staged: Staged, filled: int) -> None:
        """Wait until all senders have filled their share; tell the receivers."""
        transfer, number = self._transfer, staged.bucket
        followers = set(range(1, transfer.me.senders))
        self._pump(lambda: followers.difference(self._staged), f"stage its share of bucket {number}")
        shares, self._staged = {0: staged, **self._staged}, {}
        for sender, other in shares.items():
            if other.last != staged.last or other.parts != staged.parts:
                names = f"{other.parts[0].name!r} to {other.parts[-1].name!r}" if other.parts else "no tensor"
                summary = f"of {len(other.parts)} tensors or parts, {names}"
                why = f"its bucket {other.bucket}, {summary}, is not that of source rank 0"
                text = "Have all senders yield the same names, dtypes and shapes in the same order."
                raise transfer.error({sender: why}, text)
        places = {sender: other.description for sender, other in shares.items()}
        told = self._told[number] = Bucket(number, staged.parts, filled, places, None, False, staged.last)
        self._copying[number] = set(self._readers)
        transfer.delivered = True
        transfer.tell([reader for reader, others in self._readers.items() if not others], told)
        transfer.tell([reader for reader, others in self._readers.items() if others], told._replace(relays=True))

    def _await_copies(self, bucket: int) -> None:
        """Wait until all receivers have copied a bucket; tell the senders, and of the last one also the receivers."""
        transfer = self._transfer
        self._pump(lambda: self._copying.get(bucket, set()), f"copy bucket {bucket}")
        self._copying.pop(bucket, None)
        told = self._told.pop(bucket, None)
        others = len(transfer.me.nodes) if told is not None and told.last else transfer.me.senders
        transfer.tell(range(1, others), Copied(bucket))

    def _pump(self, find_missing: Callable[[], set[int]], doing: str) -> None:
        """Read messages until no process is missing."""
        transfer = self._transfer
        deadline = time.monotonic() + transfer.timeout
        while missing := find_missing():
            if not transfer.connections:
                raise ValueError(ENDED)
            connections: Any = {connection: number for number, connection in transfer.connections.items()}
            ready: list[Any] = multiprocessing.connection.wait(connections, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise transfer.late(missing, doing)
            for connection in ready:
                number = connections[connection]
                self._note(number, transfer.read(number, doing, deadline))

    def _note(self, number: int, message: Any) -> None:
        """Take a message of a follower or a receiver."""
        transfer = self._transfer
        if isinstance(message, Staged):
            self._staged[number] = message
            return
        if not isinstance(message, Copied):
            raise transfer.error({number: f"it sent {message!r}, which was not expected"}, AGAIN)
        waiting = self._copying[message.bucket]
        waiting.discard(number)
        if others := self._readers.get(number, []) if message.whole is not None else []:
            waiting.update(others)
            transfer.tell(others, self._told[message.bucket]._replace(staged={}, whole=message.whole))


def _close_all(listener: Listener, arrivals: Arrivals) -> None:
    listener.close()
    while not arrivals.empty():
        close(arrivals.get()[1])

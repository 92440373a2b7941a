# SPDX-License-Identifier: Apache-2.0
"""Weights from some processes to others, bucket after bucket, when a framework has started both sides.

The first sender leads. Each sender says when it has filled its share of a bucket. The leader then tells the receivers
where the shares are. On each node without the memory of a sender, one receiver reads for all of the node. Two buckets
are in memory at a time: senders fill one while receivers copy the other.
"""

import asyncio
import contextlib
import socket
import threading
import time
import traceback
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from .._descriptions import TRAVELLING
from .._remote.server import ReadError
from .._remote.sockets import LOOK_S, Gone, Late, connect, has_exited
from .._remote.transport import Overwritten
from ..exceptions import Phase, RankFailure, State, TransferError
from ._buckets import BucketShape, Packer, Part, Unpacker, digest
from ._channel import Channel, send_all, wait_for_any
from ._members import Membership, Ports, describe
from ._shares import Description, Intake, Offer

AGAIN = (
    "Start lost processes again and update the weights again. Engines that have loaded a part hold a mixture of two "
    "versions until then."
)
# Seconds that others have to connect, and to learn it, when a process has exited before it connected.
GRACE_S = 5.0
# Seconds in which all others are notified that this process has failed.
FAREWELL_S = 1.0
Side = Literal["source", "target"]


class Staged(NamedTuple):
    """A sender has filled its share of a bucket."""

    bucket: int
    mark: bytes  # what it has in the bucket
    summary: str  # the same for people
    description: Description  # where the share is


class Bucket(NamedTuple):
    """A receiver is to copy a bucket."""

    number: int
    transfer: int  # as the leader counts them
    parts: list[Part]
    filled: int  # bytes
    staged: Mapping[int, Description]  # the shares by sender; empty if `whole` is given
    whole: Description | None  # where the reader of the node has put the bucket
    relays: bool  # whether others on the node get it from this receiver
    last: bool


class Copied(NamedTuple):
    """A receiver has copied a bucket; or, to a sender, all have."""

    bucket: int
    transfer: int  # as the leader counts them
    whole: Description | None = None  # where others on its node find it


class Failed(NamedTuple):
    """A process has failed, and with it the transfer."""

    error: BaseException
    transfer: int  # the last one of which the process has heard


class Arrivals:
    """The connections of members that the leader has not taken yet; of one member, the last one."""

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self._changed = threading.Condition()
        self._closed = False

    def note(self, number: int, connection: socket.socket) -> None:
        """Note a connection."""
        channel = Channel(connection)
        with self._changed:
            unused = channel if self._closed else self._channels.pop(number, None)
            if not self._closed:
                self._channels[number] = channel
            self._changed.notify_all()
        if unused is not None:
            unused.close()

    def take(self, seconds: float) -> dict[int, Channel]:
        """Return the connections that have come, after a wait if there are none, and those that are not closed."""
        with self._changed:
            if not self._channels:
                self._changed.wait(max(0.0, seconds))
            taken, self._channels = self._channels, {}
        for number, channel in list(taken.items()):
            if channel.is_closed() and not channel.has_data():  # a member that has given up, and will come again
                taken.pop(number).close()
        return taken

    def close(self) -> None:
        """Close all connections, and those that come later."""
        with self._changed:
            self._closed = True
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()


class WeightStream:
    """The part of one process. `prepare`, `join`, then `send` or `receive` any number of times, then `close`.

    After a failure the process keeps its place, and gives back memory and connections: the next transfer connects
    again.
    """

    def __init__(self, bucket_bytes: int, timeout: float, dtype: str | None = None) -> None:
        if bucket_bytes < 1 or timeout <= 0:
            raise ValueError(f"bucket_size and timeout must be positive, got {bucket_bytes} and {timeout}.")
        if dtype is not None and dtype not in TRAVELLING:
            raise ValueError(f"dtype must be one of {', '.join(TRAVELLING)}, got {dtype!r}.")
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._dtype = dtype
        self._ports: Ports | None = None
        self._me: Membership | None = None
        self._offer: Offer | None = None
        self._intake: Intake | None = None
        self._arrivals = Arrivals()
        self._release: Any = None
        self._channels: dict[int, Channel] = {}
        self._version = 0
        self._transfer = 0  # the one that runs, as the leader counts them
        self._turn: object = None  # of the transfer that runs
        self._bucket = 0  # the next one
        # Of the leader: what senders have filled, and the receivers that have yet to copy each bucket.
        self._staged: dict[int, Staged] = {}
        self._copying: dict[int, set[int]] = {}
        self._told: dict[int, Bucket] = {}
        # Whether an engine may have loaded a part of the version, and whether a receiver has all of it.
        self._delivered = False
        self._ended = False

    def prepare(self) -> dict[str, Any]:
        """Begin a transfer; return what the other processes have to know of this one."""
        self.close()
        self._ports = Ports()
        return describe(self._ports, self._bucket_bytes)

    def join(self, membership: Membership) -> None:
        """Take a place in the transfer. Nothing waits for others before the first bucket."""
        if self._ports is None:
            raise ValueError("Call prepare() of the engine before it joins a transfer.")
        shape = BucketShape.fit(self._bucket_bytes, membership.senders)
        ports, self._ports = self._ports, None
        listening = ports.take(membership.addresses[membership.number]) if membership.listens else None
        ports.close()
        self._me, self._shape, self._arrivals = membership, shape, Arrivals()
        self._readers = membership.find_readers()
        if membership.number < membership.senders:
            self._offer = Offer(shape.share, membership, listening, self._arrivals.note)
            # Its threads would keep the port open after an engine that nobody finalizes.
            self._release = weakref.finalize(self, _close_all, self._offer, self._arrivals)
        else:
            self._intake = Intake(shape, membership)

    async def send(self, weights: Iterable[Any] | AsyncIterator[Any], version: int | None) -> None:
        """Send tensors, which all senders yield in the same order; return when all receivers have copied them."""
        turn = self._begin(version)
        packer: Packer | None = None
        try:
            me, offer = self._joined(), self._offer
            if offer is None:
                raise ValueError("This engine receives weights: it cannot send any.")
            await asyncio.to_thread(self._open, turn)  # before anything can fail, so that all others learn of it
            packer = Packer(self._shape, me.number, self._dtype)
            packer.begin(offer.begin(0))
            async for name, tensor in _iterate(weights):
                for _ in packer.add(name, tensor):
                    await asyncio.to_thread(self._flush, offer, *packer.take(), False)
                    packer.begin(offer.begin(self._bucket))
            await asyncio.to_thread(self._flush, offer, *packer.take(), True)
            await asyncio.to_thread(self._finish)
        except BaseException as error:
            if packer is not None:
                packer.forget()
            self._fail(error)
            raise

    async def receive(self, version: int | None) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """Yield the tensors of each bucket. Their memory is this process's own, and lives as long as they do."""
        turn = self._begin(version)
        try:
            self._joined()
            if self._intake is None:
                raise ValueError("This engine sends weights: it cannot receive any.")
            await asyncio.to_thread(self._open, turn)
            unpacker, last = Unpacker(self._shape), False
            while not last:
                parts, memory, last = await asyncio.to_thread(self._take, turn, self._intake, unpacker)
                tensors = list(unpacker.unpack(parts, memory))
                del memory
                if tensors:
                    yield tensors
                del tensors
        except BaseException as error:
            if not (isinstance(error, GeneratorExit) and self._ended):
                self._fail(error)
            raise

    def close(self) -> None:
        """Leave the transfer, and give everything back."""
        self._drop()
        self._me = None
        if self._release is not None:
            self._release()
            self._release = None
        self._offer = self._intake = None
        if self._ports is not None:
            self._ports.close()
            self._ports = None

    def _drop(self) -> None:
        """Give back connections and memory; the place in the transfer stays."""
        self._turn = None
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
        for part in (self._offer, self._intake):
            if part is not None:
                part.drop()

    # -- senders -------------------------------------------------------------------------------------------------------

    def _flush(self, offer: Offer, parts: list[Part], filled: int, last: bool) -> None:
        """Offer a bucket, and return when the memory of the one before it can be filled again."""
        me, number = self._joined(), self._bucket
        names = f"{parts[0].name!r} to {parts[-1].name!r}" if parts else "no tensor"
        summary = f"of {len(parts)} tensors or parts, {names}"
        staged = Staged(number, digest(parts, last), summary, offer.end(number))
        if me.number:
            self._tell([0], staged)
            self._delivered = True  # from now on, a receiver may have it
            self._hear(Copied, f"say that bucket {number - 1} was copied")
        else:
            self._lead(parts, filled, staged, last)
        self._bucket = number + 1

    def _lead(self, parts: list[Part], filled: int, mine: Staged, last: bool) -> None:
        me, number = self._joined(), mine.bucket
        followers = set(range(1, me.senders))
        self._pump(lambda: followers.difference(self._staged), f"stage its share of bucket {number}")
        staged, self._staged = {0: mine, **self._staged}, {}
        for sender, other in staged.items():
            if other.mark != mine.mark:
                why = f"its bucket {other.bucket}, {other.summary}, is not that of source rank 0"
                text = "Have all senders yield the same names, dtypes and shapes in the same order."
                raise self._error({sender: why}, text)
        descriptions = {sender: other.description for sender, other in staged.items()}
        told = self._told[number] = Bucket(number, self._transfer, parts, filled, descriptions, None, False, last)
        self._copying[number] = set(self._readers)
        self._delivered = True
        self._tell([reader for reader, others in self._readers.items() if not others], told)
        self._tell([reader for reader, others in self._readers.items() if others], told._replace(relays=True))
        self._await_copies(number - 1)
        self._tell(followers, Copied(number - 1, self._transfer))

    def _finish(self) -> None:
        """Wait until the last bucket has been copied."""
        me = self._joined()
        if me.number:
            self._hear(Copied, "say that all receivers have the weights")
            return
        self._await_copies(self._bucket - 1)
        self._tell(range(1, me.senders), Copied(self._bucket - 1, self._transfer))

    def _await_copies(self, bucket: int) -> None:
        self._pump(lambda: self._copying.get(bucket, set()), f"copy bucket {bucket}")
        self._copying.pop(bucket, None)
        self._told.pop(bucket, None)

    def _pump(self, find_missing: Callable[[], set[int]], doing: str) -> None:
        """Read messages until no process is missing."""
        deadline = time.monotonic() + self._timeout
        while missing := find_missing():
            ready = wait_for_any(self._channels, deadline - time.monotonic())
            if not ready:
                raise self._late(missing, doing)
            for number in ready:
                self._note(number, self._read(number, doing, deadline))

    def _note(self, number: int, message: Any) -> None:
        """Take a message of a follower or a receiver."""
        if isinstance(message, Staged):
            self._staged[number] = message
            return
        if not isinstance(message, Copied):
            raise self._error({number: f"it sent {message!r}, which was not expected"}, AGAIN)
        waiting = self._copying[message.bucket]
        waiting.discard(number)
        if others := self._readers.get(number, []) if message.whole is not None else []:
            waiting.update(others)
            self._tell(others, self._told[message.bucket]._replace(staged={}, whole=message.whole))

    # -- receivers -----------------------------------------------------------------------------------------------------

    def _take(self, turn: object, intake: Intake, unpacker: Unpacker) -> tuple[list[Part], Any, bool]:
        """Copy the next bucket; return its content, its memory and whether it is the last one."""
        me = self._joined()
        bucket = self._hear(Bucket, f"send bucket {self._bucket}")
        memory = unpacker.make()
        # The leader waits longer for this process, so that the error names the sender that is late.
        deadline = time.monotonic() + 0.75 * self._timeout

        def is_over(sender: int) -> bool:
            return self._turn is not turn or self._has_exited(sender)

        try:
            if bucket.whole is not None:
                intake.map_whole(bucket.whole, bucket.filled, memory)
                whole = None
            else:
                whole = intake.read(
                    bucket.number,
                    bucket.staged,
                    bucket.filled,
                    memory,
                    relays=bucket.relays,
                    deadline=deadline,
                    is_over=is_over,
                )
        except ReadError as error:
            traceback.clear_frames(error.__traceback__)  # they would keep the memory as long as the error
            doing = f"send its share of bucket {bucket.number} to target rank {me.number - me.senders}"
            if isinstance(error.__cause__, Late):
                raise self._late([error.source], doing, 0.75 * self._timeout) from error
            raise self._lost({error.source: str(error.args[1]) or "it has overwritten the bucket"}) from error
        except (OSError, Overwritten) as error:
            traceback.clear_frames(error.__traceback__)
            why = f"bucket {bucket.number}: {type(error).__name__}: {error}"
            text = "Processes of one node have to run as one user, which may open the memory of the others."
            raise self._error({me.number: why}, f"{text} {AGAIN}") from error
        self._tell([0], Copied(bucket.number, self._transfer, whole))
        self._bucket, self._delivered, self._ended = bucket.number + 1, True, bucket.last
        return bucket.parts, memory, bucket.last

    def _hear(self, kind: type, doing: str) -> Any:
        """Return the next message of the leader."""
        # A little longer than the leader waits, whose error says which process is late.
        message = self._read(0, doing, time.monotonic() + 1.25 * self._timeout)
        if not isinstance(message, kind):
            raise self._error({0: f"it sent {message!r}, and {kind.__name__} was expected"}, AGAIN)
        self._transfer = getattr(message, "transfer", 0)
        return message

    # -- connections ---------------------------------------------------------------------------------------------------

    def _open(self, turn: object) -> None:
        """Connect to the leader, or have all others connect to it, unless they are connected."""
        me, began = self._joined(), time.monotonic()
        deadline = began + self._timeout
        if me.number:
            if 0 in self._channels and self._channels[0].is_closed():
                self._drop_leader()
            if 0 not in self._channels:
                self._channels[0] = self._connect(me, turn, deadline)
            return
        others = set(range(1, len(me.nodes)))
        while True:
            left_s = 0.0 if others <= self._channels.keys() else deadline - time.monotonic()
            arrived = self._arrivals.take(min(LOOK_S, left_s))
            for number, channel in arrived.items():
                if number in self._channels:
                    self._channels.pop(number).close()
                self._channels[number] = channel
            missing = others.difference(self._channels)
            if not missing:
                return
            exited = [number for number in missing if self._has_exited(number)]
            if exited and (len(exited) == len(missing) or time.monotonic() > began + GRACE_S):
                raise self._lost(dict.fromkeys(exited, "it had not connected"))
            if self._turn is not turn:
                raise self._lost({0: "its caller has given up"})
            if time.monotonic() > deadline:
                raise self._late(missing, "connect to source rank 0")

    def _drop_leader(self) -> None:
        """Close the connection that the leader has closed; raise its error, unless it is of an earlier transfer."""
        message = None
        with contextlib.suppress(Late, Gone):
            message = self._channels[0].receive(time.monotonic() + FAREWELL_S)
        self._channels.pop(0).close()
        if isinstance(message, Failed) and message.transfer > self._transfer:
            raise message.error

    def _connect(self, me: Membership, turn: object, deadline: float) -> Channel:
        def is_over() -> bool:
            return self._turn is not turn or self._has_exited(0)

        try:
            return Channel(connect(me.addresses[0], me.secret, me.number, deadline, is_over))
        except Late as error:
            raise self._late({0}, f"accept a connection at {me.addresses[0]}: {error}") from error
        except Gone as error:
            raise self._lost({0: str(error)}) from error

    def _has_exited(self, number: int) -> bool:
        """Return whether a process of this node has exited; elsewhere its id means nothing."""
        me = self._joined()
        return me.nodes[number] == me.nodes[me.number] and has_exited(me.pids[number])

    def _tell(self, numbers: Iterable[int], message: Any) -> None:
        late, gone = send_all(self._channels, numbers, message, time.monotonic() + self._timeout)
        if gone:
            raise self._lost(gone)
        if late:
            raise self._late(late, f"read a message about bucket {self._bucket}")

    def _read(self, number: int, doing: str, deadline: float) -> Any:
        """Return a message of a process; raise the error of one that has failed."""
        try:
            message = self._channels[number].receive(deadline)
        except Late as error:
            raise self._late({number}, doing) from error
        except (Gone, KeyError) as error:
            raise self._lost({number: str(error)}) from error
        if isinstance(message, Failed):
            raise message.error
        return message

    # -- errors --------------------------------------------------------------------------------------------------------

    def _begin(self, version: int | None) -> object:
        self._version, self._bucket = version or 0, 0
        self._staged, self._copying, self._told = {}, {}, {}
        self._delivered = self._ended = False
        self._turn = object()
        if self._me is not None and not self._me.number:
            self._transfer += 1
        return self._turn

    def _joined(self) -> Membership:
        if self._me is None:
            text = "This engine takes part in no transfer: it has not joined one, or was finalized."
            raise ValueError(f"{text} Call prepare() of all engines, then connect them again.")
        return self._me

    def _fail(self, error: BaseException) -> None:
        """Tell the others, and give back memory and connections."""
        report = error
        if self._me is not None and not isinstance(error, TransferError):
            why = f"{type(error).__name__}: {error}"
            why = "its consumer stopped reading" if isinstance(error, GeneratorExit) else why
            report = self._error({self._me.number: why}, "See the error of that process.")
        # One that does not take it will see that the connection is closed.
        send_all(self._channels, list(self._channels), Failed(report, self._transfer), time.monotonic() + FAREWELL_S)
        self._drop()

    def _late(self, numbers: Iterable[int], doing: str, waited_s: float | None = None) -> TransferError:
        why = f"it did not {doing} within {waited_s or self._timeout:g} s"
        text = f"If these processes make progress, give the engine a longer timeout than {self._timeout:g} s. {AGAIN}"
        return self._error(dict.fromkeys(numbers, why), text)

    def _lost(self, reasons: Mapping[int, str]) -> TransferError:
        why = f"it was lost at bucket {self._bucket}: its process has exited, or an error of its own has ended its part"
        return self._error({number: f"{why} ({reason})" for number, reason in reasons.items()}, AGAIN)

    def _error(self, reasons: Mapping[int, str], remedy: str) -> TransferError:
        me = self._joined()
        failures = []
        for number, why in sorted(reasons.items()):
            side: Side = "source" if number < me.senders else "target"
            rank = number - (0 if side == "source" else me.senders)
            failures.append(RankFailure(side, rank, me.nodes[number], why))
        # Buckets go straight to the engines, which may have loaded them.
        phase: Phase = "commit" if self._delivered else "move"
        inconsistent: dict[int, State] = (
            dict.fromkeys(range(len(me.receivers)), "inconsistent") if self._delivered else {}
        )
        return TransferError(phase, self._version, tuple(failures), inconsistent, remedy)


def _close_all(offer: Offer, arrivals: Arrivals) -> None:
    offer.close()
    arrivals.close()


class WeightEngine:
    """The phases of a checkpoint engine that all frameworks call alike.

    Attributes:
        bucket_size: bytes of a bucket.
    """

    def __init__(self, bucket_size: int, timeout: float, dtype: str | None) -> None:
        self.bucket_size = bucket_size
        self._stream = WeightStream(bucket_size, timeout, dtype)

    def prepare(self) -> dict[str, Any]:
        """Begin a transfer.

        Returns:
            What the other processes have to know of this one. It has a secret of the transfer.

        >>> from fairlead_transfer.adapters import verl
        >>> sorted(verl.FairleadCheckpointEngine(bucket_size=1 << 20).prepare())
        ['address', 'bucket_bytes', 'local_address', 'node', 'pid', 'token']
        """
        return self._stream.prepare()

    def finalize(self) -> None:
        """Leave the transfer, and give all memory and connections back.

        >>> from fairlead_transfer.adapters import verl
        >>> verl.FairleadCheckpointEngine(bucket_size=1 << 20).finalize()
        """
        self._stream.close()


async def _iterate(weights: Iterable[Any] | AsyncIterator[Any]) -> AsyncIterator[Any]:
    if isinstance(weights, AsyncIterator):
        async for named in weights:
            yield named
    else:
        for named in weights:
            yield named

# SPDX-License-Identifier: Apache-2.0
"""Weights from some processes to others, bucket after bucket, when a framework has started both sides.

The first sender leads. For each bucket it has all senders stage their shares, tells the receivers where these are, and
waits until all receivers have copied them. Two buckets are in memory at a time: senders fill one while receivers copy
the other.
"""

import asyncio
import contextlib
import multiprocessing.connection
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .._endpoint import (
    Endpoint,
    EndpointDescription,
    EndpointOrders,
    EndpointPlan,
    StagedPieces,
    plan_endpoints,
    share_secret,
    with_tensors,
)
from ..exceptions import Phase, RankFailure, State, TransferError
from ._buckets import BucketShape, Packer, Part, Unpacker, digest
from ._channel import LOOK_S, Channel, Gone, Late, accept, connect, has_exited, reserve

AGAIN = (
    "Start lost processes again and update the weights again. Engines that have loaded a part hold a mixture of two "
    "versions until then."
)
# Seconds that others have to connect, and to learn it, when a process has exited before it connected.
GRACE_S = 5.0
Side = Literal["source", "target"]


@dataclass(frozen=True)
class Membership:
    """The place of a process in a transfer.

    Attributes:
        number: of this process: the senders first, then the receivers.
        senders: the number of processes that send.
        nodes: the node of every process.
        pids: the id of every process.
        address: where the first sender listens.
        secret: what all processes of the transfer share.
        members: the descriptions of all processes, for the first sender; empty for others.
    """

    number: int
    senders: int
    nodes: tuple[str, ...]
    pids: tuple[int, ...]
    address: tuple[str, int]
    secret: bytes = field(repr=False)
    members: tuple[EndpointDescription, ...] = ()


def make_memberships(metadata: Sequence[Mapping[str, Any]], senders: int) -> list[Membership]:
    """Return the membership of each process from what `prepare` has returned in all, the senders first."""
    if not 0 < senders < len(metadata):
        raise ValueError(f"A transfer needs a sender and a receiver, got {senders} of {len(metadata)} that send.")
    sizes = sorted({one["bucket_bytes"] for one in metadata})
    if len(sizes) > 1:
        raise ValueError(f"The processes have buckets of {sizes} bytes: configure one size.")
    nodes = tuple(one["description"].node for one in metadata)
    if len(found := sorted(set(nodes))) > 1:
        hosts = ", ".join(found)
        text = f"This engine moves weights between processes that can share memory, and these are on {hosts}."
        raise ValueError(f"{text} Run them as one user on one host, or use an engine of the framework.")
    members = tuple(one["description"] for one in metadata)
    secret, address, pids = share_secret(members), tuple(metadata[0]["address"]), tuple(one["pid"] for one in metadata)
    return [
        Membership(number, senders, nodes, pids, address, secret, members if number == 0 else ())
        for number in range(len(metadata))
    ]


class WeightStream:
    """The part of one process. `prepare`, `join`, then `send` or `receive` any number of times, then `close`."""

    def __init__(self, bucket_bytes: int, timeout: float) -> None:
        if bucket_bytes < 1 or timeout <= 0:
            raise ValueError(f"bucket_size and timeout must be positive, got {bucket_bytes} and {timeout}.")
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._endpoint: Endpoint | None = None
        self._reserved: Any = None
        self._me: Membership | None = None
        self._channels: dict[int, Channel] = {}
        self._version = 0
        self._bucket = 0  # the next one
        # The receivers that copy the bucket before it.
        self._copying = set[int]()
        # Whether an engine may have loaded a part of the version, and whether a receiver has all of it.
        self._delivered = False
        self._ended = False

    def prepare(self) -> dict[str, Any]:
        """Begin a transfer; return what the other processes have to know of this one."""
        self.close()
        self._endpoint = Endpoint({})
        self._reserved = reserve()
        return {
            "description": self._endpoint.describe(),
            "address": self._reserved.getsockname(),
            "bucket_bytes": self._bucket_bytes,
            "pid": os.getpid(),
        }

    def join(self, membership: Membership) -> None:
        """Take a place in the transfer. Nothing waits for others before the first bucket."""
        if self._endpoint is None:
            raise ValueError("Call prepare() of the engine before it joins a transfer.")
        self._drop_connections()
        self._me, self._shape = membership, BucketShape.fit(self._bucket_bytes, membership.senders)
        self._plans: dict[int, EndpointPlan] = {}
        self._orders: dict[int, Any] = {}
        if membership.number == 0:
            self._reserved.listen(len(membership.nodes))
        else:
            self._drop_reserved()

    async def send(self, weights: Iterable[Any] | AsyncIterator[Any], version: int | None) -> None:
        """Send tensors, which all senders yield in the same order; return when all receivers have copied them."""
        self._begin(version)
        try:
            me = self._joined()
            await asyncio.to_thread(self._open)  # before anything can fail, so that all others learn of it
            packer = Packer(self._shape, me.number)
            async for name, tensor in _iterate(weights):
                for _ in packer.add(name, tensor):
                    await asyncio.to_thread(self._flush, *packer.take(), False)
            await asyncio.to_thread(self._flush, *packer.take(), True)
            await asyncio.to_thread(self._finish)
        except BaseException as error:
            self._fail(error)
            raise

    async def receive(self, version: int | None) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """Yield the tensors of each bucket. Their memory is this process's own, and lives as long as they do."""
        self._begin(version)
        try:
            self._joined()
            unpacker, last = Unpacker(self._shape), False
            while not last:
                parts, bucket, last = await asyncio.to_thread(self._take, unpacker)
                tensors = list(unpacker.unpack(parts, bucket))
                del bucket
                if tensors:
                    yield tensors
                del tensors
        except BaseException as error:
            if not (isinstance(error, GeneratorExit) and self._ended):
                self._fail(error)
            raise

    def close(self) -> None:
        """Leave the transfer, and give everything back."""
        self._drop_connections()
        self._drop_reserved()
        self._me = None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    # -- the first sender ----------------------------------------------------------------------------------------------

    def _flush(self, parts: list[Part], share: Any, last: bool) -> None:
        """Stage a bucket, when the one before has been copied; have the receivers copy it."""
        me, rows = self._joined(), share.global_shape[0]
        if me.number:
            self._follow(parts, share, last)
            return
        self._await_copies()
        others, receivers = range(1, me.senders), range(me.senders, len(me.nodes))
        is_new = rows not in self._plans
        plan = self._plans[rows] if rows in self._plans else self._make_plan(me, rows)
        mark = digest(parts, last)
        for number in others:
            self._tell(number, "stage", (self._bucket, mark, plan.sources[number] if is_new else None))
        staged = {0: self._stage(plan.sources[0], share)}
        staged |= self._gather(set(others), "staged", "stage its share of")
        self._copying, self._delivered = set(receivers), True
        for number in receivers:
            orders = plan.targets[number - me.senders] if is_new else None
            self._tell(number, "bucket", (self._bucket, parts, rows, orders, list(staged.values()), last))
        self._bucket += 1

    def _stage(self, orders: EndpointOrders, share: Any) -> StagedPieces:
        self._own().replace({"bucket": share})
        with self._blaming_itself():
            return self._own().stage(orders, self._bucket)

    def _make_plan(self, me: Membership, rows: int) -> EndpointPlan:
        shape = self._shape
        sources = [with_tensors(one, [shape.describe(rows, at)]) for at, one in enumerate(me.members[: me.senders])]
        targets = [with_tensors(one, [shape.describe(rows, None)]) for one in me.members[me.senders :]]
        self._plans[rows] = plan_endpoints(sources, targets)
        return self._plans[rows]

    def _finish(self) -> None:
        """Wait until the last bucket has been copied."""
        me = self._joined()
        if me.number:
            self._expect("finished", "say that all receivers have the weights")
            return
        self._await_copies()
        for number in range(1, me.senders):
            self._tell(number, "finished", None)

    def _await_copies(self) -> None:
        copying, self._copying = self._copying, set[int]()
        self._gather(copying, "copied", "copy")

    def _gather(self, pending: set[int], kind: str, doing: str) -> dict[int, Any]:
        """Wait for a message of each of these processes, and for none that any process has failed."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        while missing := pending.difference(found):
            channels: Any = self._channels.values()
            ready: list[Any] = multiprocessing.connection.wait(channels, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._late(missing, f"{doing} bucket {self._bucket}")
            for number in [number for number, channel in self._channels.items() if channel in ready]:
                found[number] = self._read(number, kind, f"{doing} bucket {self._bucket}", deadline)
        return found

    # -- the other processes -------------------------------------------------------------------------------------------

    def _follow(self, parts: list[Part], share: Any, last: bool) -> None:
        bucket, mark, orders = self._expect("stage", f"ask for bucket {self._bucket}")
        rows = share.global_shape[0]
        if mark != digest(parts, last):
            names = f"{parts[0].name!r} to {parts[-1].name!r}" if parts else "no tensor"
            why = f"its bucket {bucket}, of {len(parts)} tensors or parts, {names}, is not that of source rank 0"
            text = "Have all senders yield the same names, dtypes and shapes in the same order."
            raise self._error({self._joined().number: why}, text)
        self._orders[rows] = orders or self._orders[rows]
        self._tell(0, "staged", self._stage(self._orders[rows], share))
        self._bucket, self._delivered = bucket + 1, True

    def _take(self, unpacker: Unpacker) -> tuple[list[Part], Any, bool]:
        """Copy the next bucket; return its content, its memory and whether it is the last one."""
        self._open()
        bucket, parts, rows, orders, staged, last = self._expect("bucket", f"send bucket {self._bucket}")
        self._orders[rows] = orders or self._orders[rows]
        memory, endpoint = unpacker.make(rows), self._own()
        endpoint.replace({"bucket": memory})
        with self._blaming_itself():
            endpoint.fetch(self._orders[rows], staged)
            endpoint.commit()
        endpoint.replace({})
        self._tell(0, "copied", bucket)
        self._bucket, self._delivered, self._ended = bucket + 1, True, last
        return parts, memory, last

    def _expect(self, kind: str, doing: str) -> Any:
        """Return the content of the next message of the first sender."""
        # A little longer than the first sender waits, whose error says which process is late.
        return self._read(0, kind, doing, time.monotonic() + 1.25 * self._timeout)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Connect to the first sender, or have all others connect to it, unless they are connected."""
        me = self._joined()
        began = time.monotonic()
        deadline = began + self._timeout
        if me.number:
            if not self._channels:

                def is_over() -> bool:
                    return self._me is not me or has_exited(me.pids[0])

                try:
                    self._channels[0] = connect(me.address, me.secret, me.number, deadline, is_over)
                except Late as error:
                    raise self._late({0}, f"accept a connection at {me.address}: {error}") from error
                except Gone as error:
                    raise self._lost([0], error) from error
            return
        while missing := set(range(1, len(me.nodes))).difference(self._channels):
            exited = [number for number in missing if has_exited(me.pids[number])]
            if exited and (len(exited) == len(missing) or time.monotonic() > began + GRACE_S):
                raise self._lost(exited, Gone("it had not connected"))
            left = deadline - time.monotonic()
            if left > LOOK_S and not multiprocessing.connection.wait([self._reserved], LOOK_S):
                continue
            try:
                joined = accept(self._reserved, me.secret, deadline)
            except (Late, Gone) as error:
                raise self._late(missing, "connect to source rank 0") from error
            if joined is not None:
                self._channels[joined[0]] = joined[1]

    def _tell(self, number: int, kind: str, content: Any) -> None:
        try:
            self._channels[number].send((kind, content), time.monotonic() + self._timeout)
        except Late as error:
            raise self._late({number}, f"read a message about bucket {self._bucket}") from error
        except Gone as error:
            raise self._lost([number], error) from error

    def _read(self, number: int, kind: str, doing: str, deadline: float) -> Any:
        """Return the content of a message of this kind; raise the error of a process that has failed."""
        try:
            found, content = self._channels[number].receive(deadline)
        except Late as error:
            raise self._late({number}, doing) from error
        except Gone as error:
            raise self._lost([number], error) from error
        if found == "failed":
            raise content
        if found != kind:
            raise self._error({number: f"it sent {found!r}, and {kind!r} was expected"}, AGAIN)
        return content

    # -- errors --------------------------------------------------------------------------------------------------------

    def _begin(self, version: int | None) -> None:
        self._version, self._bucket, self._copying = version or 0, 0, set()
        self._delivered = self._ended = False

    def _joined(self) -> Membership:
        if self._me is None:
            text = "This engine takes part in no transfer: it has not joined one, was finalized, or has failed."
            raise ValueError(f"{text} Call prepare() of all engines, then connect them again.")
        return self._me

    def _own(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint

    def _fail(self, error: BaseException) -> None:
        """Tell the others, and give everything back."""
        report = error
        if self._me is not None and not isinstance(error, TransferError):
            why = f"{type(error).__name__}: {error}"
            why = "its consumer stopped reading" if isinstance(error, GeneratorExit) else why
            report = self._error({self._me.number: why}, "See the error of that process.")
        for channel in self._channels.values():
            with contextlib.suppress(Late, Gone):  # it will see that the connection is closed
                channel.send(("failed", report), time.monotonic() + 1.0)
        self.close()

    @contextlib.contextmanager
    def _blaming_itself(self) -> Iterator[None]:
        """Raise what the endpoint could not do as an error of this process; the endpoint knows one bucket only."""
        try:
            yield
        except TransferError as error:
            reason = "; ".join(one.reason for one in error.failures)
            raise self._error({self._joined().number: f"bucket {self._bucket}: {reason}"}, AGAIN) from error

    def _late(self, numbers: Iterable[int], doing: str) -> TransferError:
        why = f"it did not {doing} within {self._timeout:g} s"
        text = f"If these processes make progress, give the engine a longer timeout than {self._timeout:g} s. {AGAIN}"
        return self._error(dict.fromkeys(numbers, why), text)

    def _lost(self, numbers: Iterable[int], error: Gone) -> TransferError:
        why = f"it was lost at bucket {self._bucket}: its process has exited, or an error of its own has ended its part"
        return self._error(dict.fromkeys(numbers, f"{why} ({error})"), AGAIN)

    def _error(self, reasons: Mapping[int, str], remedy: str) -> TransferError:
        me = self._joined()
        failures = []
        for number, why in sorted(reasons.items()):
            side: Side = "source" if number < me.senders else "target"
            rank = number - (0 if side == "source" else me.senders)
            failures.append(RankFailure(side, rank, me.nodes[number], why))
        # Buckets go straight to the engines, which may have loaded them.
        phase: Phase = "commit" if self._delivered else "move"
        torn: dict[int, State] = dict.fromkeys(range(len(me.nodes) - me.senders), "torn") if self._delivered else {}
        return TransferError(phase, self._version, tuple(failures), torn, remedy)

    def _drop_connections(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def _drop_reserved(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


class WeightEngine:
    """The phases of a checkpoint engine that all frameworks call alike.

    Attributes:
        bucket_size: bytes of a bucket.
    """

    def __init__(self, bucket_size: int, timeout: float) -> None:
        self.bucket_size = bucket_size
        self._stream = WeightStream(bucket_size, timeout)

    def prepare(self) -> dict[str, Any]:
        """Begin a transfer.

        Returns:
            What the other processes have to know of this one. It has a secret of the transfer.

        >>> from fairlead_transfer.adapters import verl
        >>> sorted(verl.FairleadCheckpointEngine(bucket_size=1 << 20).prepare())
        ['address', 'bucket_bytes', 'description', 'pid']
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
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one

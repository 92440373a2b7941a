# SPDX-License-Identifier: Apache-2.0
"""A worker's end of a link: it describes tensors, stages what others need, fetches and commits.

The driver sends one request for each step. Every request carries the epoch of its attempt. An end refuses a request
that a later attempt has superseded: a worker that was stopped and continues late gets such requests.
"""

import asyncio
import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .collection import Collection, call, find_copies
from .entry import find_shared
from .replies import Channel, Committed, Described, Fetched, Place, Refused
from .segment import Unread
from .tensors import check_writable, copy_all, digest, find_overlapping, finish, join_pieces, library, part
from .transports import Network, ObjectStore, SharedMemory


class Intake(NamedTuple):
    """What a target rank gets in one attempt."""

    epoch: int  # of the attempt
    version: int
    staged: Mapping[int, Sequence[Channel]]  # the channels of source ranks
    reads: Sequence[Place]  # the channels that this rank reads over the network for all ranks of its node
    fresh: bool  # whether a rank may still use what was read before
    relays: Mapping[Place, Any]  # where the rank that reads for this node has put them
    deadline: float  # when to give up, in `time.monotonic`


class End:
    """One side of a link in one worker; its key is the link's id and the side."""

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._epoch = -1
        self._collection = Collection()
        self._tasks: dict[str, Any] = {}
        self._method: str | None = None  # returns the tensors of a target
        self._committed: tuple[int, int] | None = None
        self._network = Network()
        self._transports: dict[str, SharedMemory] = {
            "shared_memory": SharedMemory(),
            "tcp": self._network,
            "object_store": ObjectStore(),
        }
        self._pieces: list[tuple[int, Any, Any]] = []
        self._staged: tuple[int, int] | None = None
        self._writable: tuple[int, int] | None = None  # the plan and the memory that were found so
        self._concurrent = False
        self._writing = asyncio.Lock()

    def serve(self, worker: Any, operation: str, args: tuple[Any, ...]) -> Any:
        """Run an operation; on a worker whose async methods overlap, the result is a coroutine on its event loop."""
        # A worker that runs one method at a time has no running loop here; it runs the coroutine to its end.
        self._concurrent = asyncio._get_running_loop() is not None  # noqa: SLF001
        return self._close() if operation == "close" else self._run(worker, operation, args)

    async def _run(self, worker: Any, operation: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(await getattr(self, f"_{operation}")(worker, *args) or ())

    async def _describe(
        self,
        worker: Any,
        epoch: int,
        method: str,
        known: int,
        tasks: dict[str, Any] | None = None,
        tasks_id: int = 0,
        compares: bool = False,
        fresh: bool = False,
    ) -> Described:
        """Describe the tensors, and stage them if they are as the plan has them.

        The driver has planned with the description of the number `known`. Without tasks, those that were given before
        hold; the number 0 stages nothing.
        """
        if epoch < self._epoch:
            return Described("superseded")
        began, self._epoch, self._method = time.monotonic(), epoch, method
        _commit_fault(self._key[1], "collect")
        values = await call(worker, method)
        if epoch < self._epoch:  # the method has let another attempt pass
            return Described("superseded")
        reply = self._collection.note(values, method, known)._replace(collect_s=time.monotonic() - began)
        if tasks is not None:
            self._tasks = tasks
            for kind, transport in self._transports.items():
                channels = enumerate(tasks["channels"])
                transport.keep_only([number for number, channel in channels if channel["kind"] == kind])
        is_planned = tasks_id and self._tasks.get("id") == tasks_id and self._collection.number == known
        if not is_planned or reply.refused:
            return reply
        _commit_fault(self._key[1], "stage")
        began = time.monotonic()
        staged = await self._in_thread(self._stage, compares, fresh)
        return reply._replace(channels=staged[0], digests=staged[1], stage_s=time.monotonic() - began)

    async def _fetch(
        self,
        worker: Any,
        epoch: int,
        version: int,
        tasks: dict[str, Any] | None,
        tasks_id: int,
        staged: Mapping[int, Sequence[Channel]],
        reads: Sequence[Place],
        fresh: bool,
        relays: Mapping[Place, Any],
        within_s: float,
    ) -> Fetched:
        """Map what the tasks say, read it over the network, or get it from Ray's object store.

        Without tasks, those that were given before hold. The other arguments are as for `Intake`.
        """
        if epoch < self._epoch:
            return Fetched("superseded")
        self._epoch = epoch
        self._tasks = tasks or self._tasks
        if self._tasks.get("id") != tasks_id:
            return Fetched("unplanned")
        deadline = time.monotonic() + within_s
        if refused := await self._find_unwritable(worker):
            return Fetched("refused", refused=refused)
        intake = Intake(epoch, version, staged, reads, fresh, relays, deadline)
        reply: Fetched = await self._in_thread(self._fetch_all, intake)
        return reply

    async def _prepare(self, worker: Any, epoch: int, method: str) -> None:
        """Call a method of the user's before the wait of a commit, which its error ends."""
        if epoch >= self._epoch:  # otherwise nothing will be committed
            await call(worker, method)

    async def _commit(
        self,
        worker: Any,
        epoch: int,
        version: int,
        before: str | None,
        after: str | None,
        apply: str | None,
        chunk_bytes: int,
    ) -> Committed:
        """Put the staged tensors into place, while no method of the worker runs or those that run have paused."""
        if self._committed == (epoch, version):
            return Committed(version=version)
        if epoch < self._epoch:
            return Committed("superseded")
        if self._staged != (epoch, version) or not self._is_unchanged():
            return Committed("missing")
        began, writing = time.monotonic(), False
        try:
            _commit_fault(self._key[1], "commit")
            await call(worker, before)
            if self._method is not None:
                await self._collect_again(worker, self._method)
            async with self._writing:  # an earlier commit may be at `apply`
                if epoch < self._epoch or self._staged != (epoch, version):  # a later attempt has passed meanwhile
                    return Committed("superseded")
                finish(self._collection.values.values())
                writing, self._committed = True, None
                await self._put(apply, worker, chunk_bytes)
                finish(self._collection.values.values())
                writing, self._committed = False, (epoch, version)
            await call(worker, after)
        except Exception as error:  # noqa: BLE001  whatever the user's methods raise
            text = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
            return Committed("failed", error=text.rstrip(), inconsistent=writing)
        finally:
            # Also if a hook was cancelled, or Ctrl-C came.
            if self._staged == (epoch, version):
                self._drop()
        return Committed(version=version, commit_s=time.monotonic() - began)

    async def _collect_again(self, worker: Any, method: str) -> None:
        """Collect the tensors of the target, which a hook may have replaced; ValueError if they cannot be written."""
        self._collection.note_again(await call(worker, method), method, self._tasks["names"])
        if refused := await self._find_unwritable(worker):
            raise ValueError(f"the tensors of the target cannot be written: {dict(refused)}")

    async def _find_unwritable(self, worker: Any) -> Refused:
        """Return the tensors that new values cannot be written into; looks once for each plan and memory."""
        state, tasks = (self._tasks["id"], self._collection.moves), self._tasks
        if self._method is None or self._writable == state:
            return []
        own = {name: local for name in tasks["names"] if (local := self._collection.values.get(name)) is not None}
        wrong = check_writable(own) + find_overlapping(library(tasks["library"]), own)
        wrong = wrong or find_copies(own, await call(worker, self._method))
        self._writable = None if wrong else state
        return wrong

    async def _release(self, worker: Any, epoch: int) -> None:
        """Drop the tensors of an attempt, which were kept alive until its end."""
        if epoch >= self._epoch:
            self._drop()

    def _drop(self) -> None:
        self._collection.values = {}
        self._pieces, self._staged = [], None
        for transport in self._transports.values():
            transport.release()

    def _close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        find_shared("ends", {}).pop(self._key, None)

    def _is_unchanged(self) -> bool:
        return all(transport.is_unchanged() for transport in self._transports.values())

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what blocks: in a thread where other methods may run beside it."""
        return await asyncio.to_thread(function, *args) if self._concurrent else function(*args)

    def _tensors(self) -> list[Any]:
        """Return the tensors by their numbers in the tasks; None for those that this rank does not hold."""
        return list(map(self._collection.values.get, self._tasks["names"]))

    def _stage(self, compares: bool, fresh: bool) -> tuple[list[Channel], dict[Any, int] | None]:
        """Make what others need available to them; return the channels and, if they are compared, digests."""
        tools, tensors, tasks = library(self._tasks["library"]), self._tensors(), self._tasks
        dtypes = tasks["dtypes"]
        finish(self._collection.values.values())
        digests = None
        if compares:
            digests = {
                key: digest(tools, part(tensors[index], box), dtypes[index]) for key, index, box in tasks["held"]
            }
        staged = []
        for number, channel in enumerate(tasks["channels"]):

            def write(content: memoryview, blocks: Sequence[Any] = channel["blocks"]) -> None:
                views = (tools.view(content, dtypes[index], offset, sizes) for index, _, sizes, offset in blocks)
                copy_all(tools, zip(views, (part(tensors[index], box) for index, box, *_ in blocks), strict=True))

            kind = channel["kind"]
            staged.append((kind, self._transports[kind].stage(number, channel["size"], write, fresh)))
        return staged, digests

    def _fetch_all(self, intake: Intake) -> Fetched:
        began, tools, tasks = time.monotonic(), library(self._tasks["library"]), self._tasks
        dtypes = tasks["dtypes"]
        self._staged = None
        for transport in self._transports.values():
            transport.release()
        pieces: list[tuple[int, Any, Any]] = []
        staged = {(source, number): entry for source, all in intake.staged.items() for number, entry in enumerate(all)}
        needed = [(source, number) for source, channels in tasks["sources"].items() for number in channels]
        for kind, transport in self._transports.items():
            transport.forget_others({place for place in needed if staged[place][0] == kind})
        try:
            reads = {place: staged[place][1] for place in intake.reads}
            relays = {**intake.relays, **self._network.relay(reads, intake.fresh, intake.deadline)}
            for place in needed:
                kind, where = staged[place]
                where = relays[place] if kind == "tcp" else where
                content = self._transports[kind].fetch(place, where, intake.deadline)
                pieces += [
                    (index, box, tools.view(content, dtypes[index], offset, sizes))
                    for index, box, sizes, offset in tasks["sources"][place[0]][place[1]]
                ]
        except Unread as error:
            return Fetched(error.outcome, source=error.source, reason=str(error))
        _commit_fault(self._key[1], "move")
        if intake.epoch == self._epoch:  # otherwise a later attempt has begun
            self._pieces, self._staged = pieces, (intake.epoch, intake.version)
        return Fetched(relays=relays, length=tasks["bytes"], move_s=time.monotonic() - began)

    async def _put(self, apply: str | None, worker: Any, chunk_bytes: int) -> None:
        """Overwrite the tensors of the target, or hand whole tensors to a method of the user's."""
        tools, tensors = library(self._tasks["library"]), self._tensors()
        if apply is not None:
            for chunk in join_pieces(tools, self._tasks, self._pieces, chunk_bytes):
                await call(worker, apply, chunk)
                _commit_fault(self._key[1], "committing")
        else:
            pairs = ((part(tensors[index], box), value) for index, box, value in self._pieces)
            copy_all(tools, itertools.islice(pairs, 1))
            _commit_fault(self._key[1], "committing")
            copy_all(tools, pairs)
        if not self._is_unchanged():
            raise BufferError("the memory of a source was written during the commit")


def _commit_fault(side: str, phase: str) -> None:
    """Kill or stop this process if a test has planned that for this phase."""
    how = find_shared("faults", {}).pop((side, phase), None)
    if how is not None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

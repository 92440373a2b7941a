# SPDX-License-Identifier: Apache-2.0
"""A worker's end of a link: it describes tensors, stages what others need, fetches, verifies and commits.

The driver sends one request for each step. Every request carries the epoch of its attempt. An end refuses a request
that a later attempt has superseded: a worker that was stopped and continues late gets such requests.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .buckets import Place, Reader, offer_buckets
from .delta import Base, Change, Unpatched, apply_changes, check_changes, fetch_patches
from .entry import SHARED, note_weights
from .faults import commit_fault
from .holder import Holder
from .nixl import Nixl
from .segment import SharedMemory
from .staging import find_digest, stage_whole
from .store import ObjectStore
from .tensors import (
    check_writable,
    find_differing,
    finish,
    join_pieces,
    part,
    resolve,
)
from .transport import (
    Blocked,
    Late,
    Lost,
    Overwritten,
    Transport,
    Wanted,
    await_replies,
    describe_error,
    explain_failure,
)


class End(Holder):
    """One side of a link in one worker; its key is the link's id and the side."""

    def __init__(self, key: tuple[str, str]) -> None:
        super().__init__(key)
        # By source rank and channel, what this target rank wants.
        self._wanted: dict[tuple[int, int], list[Wanted]] = {}
        self._nixl = Nixl()
        self._transports: dict[str, Transport] = {
            "shared_memory": SharedMemory(),
            "object_store": ObjectStore(),
            "nixl": self._nixl,
        }
        self._pieces: list[tuple[int, Any, Any]] = []
        self._local: list[tuple[int, Any, Any]] = []
        self._base = Base()
        self._changes: list[Change] = []
        # A method of the user's has run since the patches were compared with the tensors that they are for.
        self._prepared = False
        self._staged: tuple[int, int] | None = None
        self._torn = False
        self._writing = False
        self._concurrent = False

    @property
    def held(self) -> int | str | None:
        """The version in place, as in `Link.versions`."""
        return "torn" if self._torn else self._committed and self._committed[1]

    def serve(self, worker: Any, operation: str, args: tuple[Any, ...]) -> Any:
        """Run an operation; on a worker whose async methods overlap, the result is a coroutine on its event loop."""
        # A worker that runs one method at a time has no running loop here; it runs the coroutine to its end.
        self._concurrent = asyncio._get_running_loop() is not None  # noqa: SLF001
        if operation == "close":
            return self._close()
        return getattr(self, f"_{operation}")(worker, *args)

    async def _source(
        self,
        worker: Any,
        epoch: int,
        method: str | None,
        known: int,
        orders: dict[str, Any] | None,
        order_id: int,
        verify: bool,
        fresh: bool,
        delta: tuple[int, bool, bool] | None = None,
        offer: tuple[Any, int, float] | None = None,
    ) -> dict[str, Any]:
        """Describe the tensors of the source, and stage them if they are as the plan has them.

        Without a method these are the tensors of this attempt. The driver has planned with the description of the
        number `known`. Without orders, those that were given before hold; the number 0 stages nothing. `fresh` stages
        into new memory, because a target may still read the old one. `delta` is as for `Base.follow`. `offer` has the
        board, the rank and the seconds for a transfer in buckets, which ends when the targets have read them.
        """
        began = time.monotonic()
        if (late := self._enter(epoch)) is not None:
            return late
        reply: dict[str, Any] = {"number": self._number}
        reply |= {} if method is None else await self._collect(worker, epoch, method, known)
        self._values = {name: resolve(local) for name, local in self._values.items()}
        reply["collect_s"] = time.monotonic() - began
        if orders is not None:
            self._orders = orders
            for kind, transport in self._transports.items():
                kinds = [one["kind"] for one in orders["channels"]]
                used = [at for at, one in enumerate(kinds) if one == kind]
                transport.keep_only(used if offer is None else [0] * (kind in kinds))
        if order_id and self._orders.get("id") == order_id and self._number == known and "refused" not in reply:
            commit_fault(self._key[1], "stage")
            began = time.monotonic()
            reply["staged"] = await self._in_thread(self._stage, epoch, verify, fresh, delta, offer)
            reply["stage_s"] = time.monotonic() - began
        return reply

    async def _target(self, worker: Any, epoch: int, method: str, known: int) -> dict[str, Any]:
        """Describe the tensors of the target, unless a late transfer may still write into them."""
        began = time.monotonic()
        if (late := self._enter(epoch)) is not None:
            return late
        if self._nixl.is_torn():
            return {"number": 0, "torn": True}
        self._method = method
        reply = await self._collect(worker, epoch, method, known)
        if "tensors" in reply and (refused := check_writable(self._values)):
            reply["refused"] = refused  # with the description, because the link may exclude these
        return {**reply, "collect_s": time.monotonic() - began}

    async def _fetch(
        self,
        worker: Any,
        epoch: int,
        version: int,
        orders: dict[str, Any] | None,
        order_id: int,
        staged: Mapping[int, Any],
        verify: bool,
        within_s: float,
        take: tuple[Any, int, bool] | None = None,
    ) -> dict[str, Any]:
        """Map what the orders say, or get it from Ray's object store, and compare digests.

        Without orders, those that were given before hold. `staged` is the reply of each source rank, or a reference to
        it, which is waited for. `take` has the board and the rank for a transfer in buckets, and whether the tensors of
        the target are read into later: then nothing is copied here.
        """
        if (late := self._enter(epoch)) is not None:
            return late
        if not self._has_orders(orders, order_id):
            return {"unplanned": True}
        args = epoch, version, staged, verify, time.monotonic() + within_s
        return await self._in_thread(*((self._fetch_all, *args) if take is None else (self._take_all, *args, take)))

    def _take_all(
        self,
        epoch: int,
        version: int,
        tasks: Mapping[int, Any],
        verify: bool,
        deadline: float,
        take: tuple[Any, int, bool],
    ) -> dict[str, Any]:
        """Copy all buckets, or open the first ones if they are to be read into the tensors of the target."""
        self._staged, in_place = None, take[2]
        reader = self._make_reader(epoch, tasks, verify, deadline, *take[:2])
        if in_place:
            return reader.look()
        reply, pieces = reader.copy()
        if "bytes" in reply and epoch == self._epoch:
            self._pieces, self._changes, self._staged = pieces, [], (epoch, version)
        return reply

    def _make_reader(
        self, epoch: int, tasks: Mapping[int, Any], verify: bool, deadline: float, board: Any, rank: int
    ) -> Reader:
        args = self._tools(), self._orders, self._wanted, self._transports, tasks, verify, deadline
        return Reader(Place(board, epoch, rank), *args)

    async def _prepare(self, worker: Any, epoch: int, method: str) -> None:
        """Call a method of the user's before the wait of a commit, which its error ends."""
        if epoch >= self._epoch:  # otherwise nothing will be committed
            self._prepared = True
            await self._call(worker, method)

    async def _commit(self, worker: Any, epoch: int, version: int, *args: Any) -> dict[str, Any]:
        """Put the version into place; then no source rank waits for this one any more."""
        try:
            return await self._put_version(worker, epoch, version, *args)
        finally:
            if (reading := args[-1]) is not None and reading[-1] is not None:
                board, rank, _ = reading[-1]
                board.leave.remote(epoch, rank)

    async def _put_version(
        self,
        worker: Any,
        epoch: int,
        version: int,
        before: str | None,
        after: str | None,
        apply: str | None,
        chunk_bytes: int,
        reading: tuple[Any, ...] | None,
    ) -> dict[str, Any]:
        """Put the staged tensors into place, while no method of the worker runs or those that run have paused.

        `reading` is None for what `_fetch` has staged, and otherwise has its last arguments: nothing has been staged,
        and the tensors of the target are read into.

        Returns:
            `committed`: the version; or `superseded`; or `missing`: nothing of this version is staged; or `error`, with
            `torn`: whether some tensors are of the new version and others are not.
        """
        if self._committed == (epoch, version) and not self._torn:
            return {"committed": version}
        if epoch < self._epoch:
            return {"superseded": self._epoch}
        if reading is None:
            there = self._staged == (epoch, version) and all(one.is_unchanged() for one in self._transports.values())
        else:
            # A rank may hold no tensor at all.
            there = bool(self._values or not self._marks) and self._has_orders(*reading[:2])
        if not there:
            return {"missing": True}
        began, self._writing, reply = time.monotonic(), False, dict[str, Any]()

        def begin() -> None:
            self._writing, self._committed = True, None
            reply["overwritten"] = self._claim(apply)

        try:
            commit_fault(self._key[1], "commit")
            await self._call(worker, before)
            await self._look_again(worker)
            finish(self._values.values())
            if self._prepared or before is not None:
                check_changes(self._tools(), self._orders, self._tensors(), self._changes)
            if reading is None:
                begin()
                await self._put(apply, worker, chunk_bytes)
            else:
                reply |= await self._in_thread(self._read_in_place, epoch, version, begin, *reading[2:])
            finish(self._values.values())
            self._writing = False
            self._torn, self._committed = False, (epoch, version)
            await self._call(worker, after)
        except Exception as error:  # noqa: BLE001  whatever the user's methods raise
            self._torn = self._torn or self._writing
            done = self._committed == (epoch, version)
            return {**reply, **describe_error(error), "torn": self._writing, "done": done}
        finally:
            note_weights(self.held)
            self._drop()
        return {**reply, "committed": version, "commit_s": time.monotonic() - began}

    async def _release(self, worker: Any, epoch: int) -> None:
        """Drop the tensors of an attempt, which were kept alive until its end."""
        if epoch >= self._epoch:
            self._drop()
            self._staged = None

    def _drop(self) -> None:
        self._values, self._pieces, self._local, self._changes, self._prepared = {}, [], [], [], False
        for transport in self._transports.values():
            transport.release()

    def _close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        shared: Any = sys.modules[SHARED]
        shared.ends.pop(self._key, None)

    async def _in_thread(self, function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Run what blocks: in a thread where other methods may run beside it."""
        return await asyncio.to_thread(function, *args) if self._concurrent else function(*args)

    def _stage(
        self,
        epoch: int,
        verify: bool,
        fresh: bool,
        delta: tuple[int, bool, bool] | None,
        offer: tuple[Any, int, float] | None,
    ) -> dict[str, Any]:
        """Make what others need available to them: whole tensors, or what has changed in them."""
        tools, orders, tensors = self._tools(), self._orders, self._tensors()
        finish(self._values.values())
        pieces = orders["held"] if verify else ()
        held = {key: find_digest(tools, orders, tensors, at, box) for key, at, box, _ in pieces}
        if offer is not None:
            board, rank, within_s = offer
            place, deadline = Place(board, epoch, rank), time.monotonic() + within_s
            args = place, tools, orders, tensors, self._transports, held, verify, deadline
            return {"channels": offer_buckets(*args)}
        reason, channels = self._base.follow(tools, orders, tensors, epoch, delta, verify)
        if channels:
            for transport in self._transports.values():
                transport.keep_only(())
        else:
            channels = stage_whole(tools, orders, tensors, self._transports, verify, fresh)
        reply: dict[str, Any] = {"channels": channels, **({"whole": reason} if reason else {})}
        return {**reply, "held": held} if verify else reply

    def _has_orders(self, orders: dict[str, Any] | None, order_id: int) -> bool:
        """Take new orders of a target rank if there are any; return whether the orders have this number."""
        if orders is None:
            return bool(self._orders.get("id") == order_id)
        self._orders = orders
        self._wanted = {
            (source, number): [
                Wanted(block, offset, sizes, orders["dtypes"][at], inside, orders["device"])
                for at, _, _, (block, offset, sizes, inside) in ordered
            ]
            for source, channels in orders["sources"].items()
            for number, ordered in channels.items()
        }
        return bool(orders["id"] == order_id)

    def _read_in_place(
        self,
        epoch: int,
        version: int,
        begin: Callable[[], None],
        staged: Mapping[int, Any],
        verify: bool,
        within_s: float,
        take: tuple[Any, int, bool] | None,
    ) -> dict[str, Any]:
        """Read what the orders say into the tensors of the target, and call `begin` before some are overwritten."""
        tools, tensors, deadline = self._tools(), self._tensors(), time.monotonic() + within_s
        if take is None:
            begin()
            reply = self._fetch_all(epoch, version, staged, verify, deadline, tensors)
        else:
            reply = self._make_reader(epoch, staged, verify, deadline, *take[:2]).read_into(tensors, begin)
        if "bytes" not in reply:
            raise RuntimeError(explain_failure(reply))
        tools.copy_all((part(tensors[at], box), value) for at, box, value in self._local)
        return reply

    def _fetch_all(
        self,
        epoch: int,
        version: int,
        staged: Mapping[int, Any],
        verify: bool,
        deadline: float,
        into: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        began = time.monotonic()
        tools, orders, tensors = self._tools(), self._orders, self._tensors()
        self._staged, self._changes = None, []
        for transport in self._transports.values():
            transport.release()
        self._local = self._copy_local(tools)
        pieces = list(self._local)
        replies, trouble = await_replies(staged, orders["sources"], deadline)
        if trouble is not None:
            return trouble
        blocked: dict[int, tuple[str, str]] = {}
        wrong: list[tuple[str, int]] = []
        verify_s, saved = 0.0, 0
        fetched: dict[tuple[int, int], tuple[list[Any], Mapping[str, Any], list[Any]]] = {}
        changes: list[Change] = []
        sent = {source: replies[source]["staged"]["channels"] for source in orders["sources"]}
        for kind, transport in self._transports.items():
            transport.forget_others(
                {one for one, channels in orders["sources"].items() for at in channels if sent[one][at]["kind"] == kind}
            )
        for source, channels in orders["sources"].items():
            for number, ordered in channels.items():
                channel = sent[source][number]
                try:
                    if channel["kind"] == "patch":
                        if self._torn or self._committed is None or self._committed[0] < channel["since"]:
                            return {"unpatched": "it does not hold the last version"}
                        less, whole, found = fetch_patches(tools, orders, channel, ordered, tensors, deadline)
                        saved, pieces, changes = saved + less, pieces + whole, changes + found
                        continue
                    places = None if into is None else [part(into[at], box) for at, box, _, _ in ordered]
                    found = self._fetch_channel(source, number, channel, deadline, places)
                except Late:
                    return {"waiting": [source]}
                except Blocked as error:
                    blocked[source] = channel["kind"], str(error)
                    continue
                except Lost as error:
                    return {"lost": source, "reason": str(error)}
                except Overwritten:
                    return {"overwritten": source}
                except Unpatched as error:
                    return {"unpatched": str(error)}
                if into is not None:
                    commit_fault(self._key[1], "committing")
                fetched[source, number] = found, channel, ordered
                pieces += [(at, box, value) for (at, box, _, _), value in zip(ordered, found, strict=True)]
                if verify:
                    started = time.monotonic()
                    commit_fault(self._key[1], "verify")
                    wrong += find_differing(tools, orders, source, channel["digests"], ordered, found)
                    verify_s += time.monotonic() - started
        if blocked:
            return {"blocked": blocked}
        commit_fault(self._key[1], "move")
        if wrong:
            return {"differing": wrong}
        if epoch == self._epoch:
            self._pieces, self._changes, self._staged = pieces, changes, (epoch, version)
        move_s = time.monotonic() - began - verify_s
        reply: dict[str, Any] = {"bytes": orders["bytes"] - saved, "saved": saved, "move_s": move_s}
        if orders["relays"]:
            relayed = [(*fetched[source, number], position) for source, number, position in orders["relays"]]
            channel = {"kind": "nixl", "staged": self._nixl.relay(tools, [found[at] for found, _, _, at in relayed])}
            if verify:
                channel["digests"] = [sent["digests"][ordered[at][2]] for _, sent, ordered, at in relayed]
            reply["staged"] = {"channels": [channel]}
        return {**reply, "verify_s": verify_s} if verify else reply

    def _fetch_channel(
        self, source: int, number: int, channel: Mapping[str, Any], deadline: float, into: Sequence[Any] | None
    ) -> list[Any]:
        if "blocked" in channel:
            raise Blocked(channel["blocked"])
        tools, wanted, order = self._tools(), self._wanted[source, number], self._orders["id"]
        if into is not None:
            return self._nixl.fetch(tools, source, number, channel["staged"], wanted, order, deadline, into)
        transport = self._transports[channel["kind"]]
        return transport.fetch(tools, source, number, channel["staged"], wanted, order, deadline)

    def _copy_local(self, tools: Any) -> list[tuple[int, Any, Any]]:
        """Copy what the source end of this process holds: it may change before the commit."""
        orders = self._orders
        if not orders["local"]:
            return []
        shared: Any = sys.modules[SHARED]
        own = shared.ends[self._key[0], "source"]._values  # noqa: SLF001  of the same class
        finish(own.values())
        pieces = []
        for at, box, source_box, sizes in orders["local"]:
            copy = tools.empty(sizes, orders["dtypes"][at])
            tools.copy(copy, part(own[orders["source_names"][at]], source_box))
            pieces.append((at, box, copy))
        return pieces

    async def _put(self, apply: str | None, worker: Any, chunk_bytes: int) -> None:
        """Overwrite the tensors of the target, or hand whole tensors to a method of the user's."""
        tools = self._tools()
        if apply is not None:
            for chunk in join_pieces(tools, self._orders, self._pieces, chunk_bytes):
                await self._call(worker, apply, chunk)
                commit_fault(self._key[1], "committing")
        else:
            tensors = self._tensors()
            pairs = ((part(tensors[at], box), value) for at, box, value in self._pieces)
            tools.copy_all(itertools.islice(pairs, 1))
            commit_fault(self._key[1], "committing")
            tools.copy_all(pairs)
            apply_changes(tools, self._orders, tensors, self._changes)
        if not all(one.is_unchanged() for one in self._transports.values()):
            raise BufferError("the memory of a source was written during the commit")

# SPDX-License-Identifier: Apache-2.0
"""A worker's end of a link: it describes tensors, stages what others need, fetches and commits.

The driver sends one request for each step. Every request carries the epoch of its attempt. An end refuses a request
that a later attempt has superseded: a worker that was stopped and continues late gets such requests.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from .collection import Collection, call
from .entry import find_shared, note_weights
from .faults import commit_fault
from .network import Network
from .reading import Ties, explain, fetch_channel
from .segment import SharedMemory
from .sockets import Late
from .staging import Context, stage_channel
from .store import ObjectStore
from .tensors import check_writable, copy_all, find_overlapping, finish, join_pieces, library, overlap, part, span
from .transport import (
    Blocked,
    Lost,
    Overwritten,
    Transport,
    Wanted,
    await_replies,
    describe_error,
)

# What a rank that reads for its node may reply that is true of the other ranks there too.
RELAY_TROUBLES = frozenset(["blocked", "lost", "reason", "overwritten", "waiting", "superseded", "unstaged"])


class StageOptions(NamedTuple):
    """How a source rank stages."""

    compares: bool  # whether digests of what several source ranks hold are compared
    fresh: bool  # whether a target may still use what was staged before


class Intake(NamedTuple):
    """What a target rank gets in one attempt."""

    epoch: int  # of the attempt
    version: int
    staged: Mapping[int, Any]  # the reply of each source rank, or a reference to it
    # "reads": the channels to read for all ranks of the node; "reply": of the rank that does, or a reference to it
    relay: Mapping[str, Any] | None
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
        # The memory of the committed version, until another link overwrites it.
        self._claimed: list[tuple[str, int, int]] = []
        self._transports: dict[str, Transport] = {
            "shared_memory": SharedMemory(),
            "tcp": Network(),
            "object_store": ObjectStore(),
        }
        self._pieces: list[tuple[int, Any, Any]] = []
        self._staged: tuple[int, int] | None = None
        self._overlap_checked: tuple[int, int] | None = None
        self._inconsistent = False
        self._writing = False
        self._concurrent = False

    @property
    def held(self) -> int | Literal["inconsistent"] | None:
        """The version in place, as in `Link.versions`."""
        return "inconsistent" if self._inconsistent else self._committed and self._committed[1]

    def serve(self, worker: Any, operation: str, args: tuple[Any, ...]) -> Any:
        """Run an operation; on a worker whose async methods overlap, the result is a coroutine on its event loop."""
        # A worker that runs one method at a time has no running loop here; it runs the coroutine to its end.
        self._concurrent = asyncio._get_running_loop() is not None  # noqa: SLF001
        if operation == "close":
            return self._close()
        return getattr(self, f"_{operation}")(worker, *args)

    def _enter(self, epoch: int) -> dict[str, Any] | None:
        """Note the attempt; return the reply to a superseded one."""
        if epoch < self._epoch:
            return {"superseded": self._epoch}
        self._epoch = epoch
        return None

    async def _collect(self, worker: Any, epoch: int, method: str, known: int) -> dict[str, Any]:
        commit_fault(self._key[1], "collect")
        values = await call(worker, method)
        # The method may have let another attempt pass.
        return self._enter(epoch) or self._collection.note(values, method, known)

    def _context(self) -> Context:
        """Return the tensors by their numbers in the tasks; None for those that this rank does not hold."""
        values, tasks = self._collection.values, self._tasks
        return Context(library(tasks["library"]), tasks, list(map(values.get, tasks["names"])), self._transports)

    async def _source(
        self,
        worker: Any,
        epoch: int,
        method: str | None,
        known: int,
        tasks: dict[str, Any] | None,
        tasks_id: int,
        *options: Any,
    ) -> dict[str, Any]:
        """Describe the tensors of the source, and stage them if they are as the plan has them.

        Without a method these are the tensors of this attempt. The driver has planned with the description of the
        number `known`. Without tasks, those that were given before hold; the number 0 stages nothing. The options are
        those of `StageOptions`.
        """
        began, how = time.monotonic(), StageOptions(*options)
        if (late := self._enter(epoch)) is not None:
            return late
        reply: dict[str, Any] = {"number": self._collection.number}
        reply |= {} if method is None else await self._collect(worker, epoch, method, known)
        self._collection.resolve()
        reply["collect_s"] = time.monotonic() - began
        if tasks is not None:
            self._tasks = tasks
            for kind, transport in self._transports.items():
                transport.keep_only([at for at, channel in enumerate(tasks["channels"]) if channel["kind"] == kind])
        there = tasks_id and self._tasks.get("id") == tasks_id and self._collection.number == known
        if there and "refused" not in reply:
            commit_fault(self._key[1], "stage")
            began = time.monotonic()
            reply["staged"] = await self._in_thread(self._stage, how)
            reply["stage_s"] = time.monotonic() - began
        return reply

    async def _target(self, worker: Any, epoch: int, method: str, known: int) -> dict[str, Any]:
        """Describe the tensors of the target."""
        began = time.monotonic()
        if (late := self._enter(epoch)) is not None:
            return late
        self._method = method
        reply = await self._collect(worker, epoch, method, known)
        if "tensors" in reply and (refused := await self._check_target(worker, method)):
            reply["refused"] = refused  # with the description, because the link may exclude these
        return {**reply, "collect_s": time.monotonic() - began}

    async def _check_target(self, worker: Any, method: str) -> list[tuple[str, str]]:
        """Return the tensors of the target that new values cannot be written into: names and reasons."""
        values, moved = self._collection.values, self._collection.has_moved
        refused = check_writable(values)
        if moved and values:
            refused += self._collection.find_copies(await call(worker, method))
        return refused

    async def _fetch(
        self,
        worker: Any,
        epoch: int,
        version: int,
        tasks: dict[str, Any] | None,
        tasks_id: int,
        staged: Mapping[int, Any],
        relay: Mapping[str, Any] | None,
        within_s: float,
    ) -> dict[str, Any]:
        """Map what the tasks say, read it over the network, or get it from Ray's object store.

        Without tasks, those that were given before hold. The other arguments are as for `Intake`.
        """
        if (late := self._enter(epoch)) is not None:
            return late
        if not self._has_tasks(tasks, tasks_id):
            return {"unplanned": True}
        intake = Intake(epoch, version, staged, relay, time.monotonic() + within_s)
        return await self._in_thread(self._fetch_all, intake)

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
    ) -> dict[str, Any]:
        """Put the staged tensors into place, while no method of the worker runs or those that run have paused.

        Returns:
            `committed`: the version; or `superseded`; or `missing`: nothing of this version is staged; or `error`, with
            `inconsistent`: whether some tensors are of the new version and others are not.
        """
        if self._committed == (epoch, version) and not self._inconsistent:
            return {"committed": version}
        if epoch < self._epoch:
            return {"superseded": self._epoch}
        if self._staged != (epoch, version) or not all(
            transport.is_unchanged() for transport in self._transports.values()
        ):
            return {"missing": True}
        began, self._writing, reply = time.monotonic(), False, dict[str, Any]()
        try:
            commit_fault(self._key[1], "commit")
            await call(worker, before)
            if self._method is not None:
                values = await call(worker, self._method)
                names = self._tasks["names"]
                self._collection.note_again(values, self._method, names)
                if self._collection.has_moved and (
                    copies := self._collection.find_copies(await call(worker, self._method), names)
                ):
                    raise ValueError(f"the tensors of the target cannot be written: {dict(copies)}")
            finish(self._collection.values.values())
            self._writing, self._committed = True, None
            reply["overwritten"] = self._claim(apply)
            await self._put(apply, worker, chunk_bytes)
            finish(self._collection.values.values())
            self._writing = False
            self._inconsistent, self._committed = False, (epoch, version)
            await call(worker, after)
        except Exception as error:  # noqa: BLE001  whatever the user's methods raise
            done = self._committed == (epoch, version)
            return {**reply, **describe_error(error), "inconsistent": self._writing, "done": done}
        finally:
            # Also if a hook was cancelled, or Ctrl-C came.
            self._inconsistent = self._inconsistent or self._writing
            note_weights(self.held)
            self._drop()
        return {**reply, "committed": version, "commit_s": time.monotonic() - began}

    async def _release(self, worker: Any, epoch: int) -> None:
        """Drop the tensors of an attempt, which were kept alive until its end."""
        if epoch >= self._epoch:
            self._drop()
            self._staged = None

    def _drop(self) -> None:
        self._collection.values = {}
        self._pieces = []
        for transport in self._transports.values():
            transport.release()

    def _close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        find_shared("ends", {}).pop(self._key, None)

    async def _in_thread(self, function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Run what blocks: in a thread where other methods may run beside it."""
        return await asyncio.to_thread(function, *args) if self._concurrent else function(*args)

    def _stage(self, how: StageOptions) -> dict[str, Any]:
        """Make what others need available to them."""
        context, tasks = self._context(), self._tasks
        finish(self._collection.values.values())
        held = {key: context.digest(at, box) for key, at, box, _ in (tasks["held"] if how.compares else ())}
        channels = [
            stage_channel(context, number, channel, how.fresh) for number, channel in enumerate(tasks["channels"])
        ]
        reply = {"channels": channels}
        return {**reply, "held": held} if how.compares else reply

    def _has_tasks(self, tasks: dict[str, Any] | None, tasks_id: int) -> bool:
        """Take new tasks of a target rank if there are any; return whether the tasks have this number."""
        if tasks is None:
            return bool(self._tasks.get("id") == tasks_id)
        dtypes = tasks["dtypes"]
        sources = {
            source: {
                number: [
                    (at, box, Wanted(block, offset, sizes, dtypes[at], inside))
                    for at, box, (block, offset, sizes, inside) in ordered
                ]
                for number, ordered in channels.items()
            }
            for source, channels in tasks["sources"].items()
        }
        self._tasks = {**tasks, "sources": sources}
        return bool(tasks["id"] == tasks_id)

    def _fetch_all(self, intake: Intake) -> dict[str, Any]:
        began, deadline = time.monotonic(), intake.deadline
        context, tasks = self._context(), self._tasks
        self._staged = None
        for transport in self._transports.values():
            transport.release()
        if overlapping := self._find_overlapping(context):
            return {"refused": overlapping}
        pieces, ties = self._copy_local(context), Ties(context)
        replies, trouble = await_replies(intake.staged, intake.staged, deadline)
        if trouble is not None:
            return trouble
        blocked: dict[int, tuple[str, str]] = {}
        sent = {source: reply["staged"]["channels"] for source, reply in replies.items()}
        for kind, transport in self._transports.items():
            places = ((source, number) for source, channels in tasks["sources"].items() for number in channels)
            transport.forget_others(
                {(source, number) for source, number in places if sent[source][number]["kind"] == kind}
            )
        relayed = self._relay(intake, sent)
        if "relays" not in relayed:
            return relayed
        for source, channels in tasks["sources"].items():
            for number, ordered in channels.items():
                channel = sent[source][number]
                if channel["kind"] == "tcp" and "blocked" not in channel:
                    channel = {**channel, "staged": relayed["relays"][source, number]}
                try:
                    wanted = [part for *_, part in ordered]
                    found = fetch_channel(context, source, number, channel, wanted, deadline)
                except Blocked as error:
                    blocked |= explain(source, channel, error)["blocked"]
                    continue
                except (Late, Lost, Overwritten) as error:
                    return explain(source, channel, error)
                pieces += [(at, box, value) for (at, box, _), value in zip(ordered, found, strict=True)]
        if blocked:
            return {"blocked": blocked}
        commit_fault(self._key[1], "move")
        ties.note(pieces)
        if clashing := ties.find_clashing():
            return {"refused": clashing}
        if intake.epoch == self._epoch:  # otherwise a later attempt has begun
            self._pieces, self._staged = pieces, intake[:2]
        return {"bytes": tasks["bytes"], "move_s": time.monotonic() - began, "relays": relayed["relays"]}

    def _relay(self, intake: Intake, sent: Mapping[int, Any]) -> dict[str, Any]:
        """Read over the network for all ranks of this node, or wait for the rank that does.

        Returns:
            `relays`: where the channels are, by source rank and number; or the reply to the driver without it.
        """
        relay = intake.relay or {"reads": (), "fresh": False}
        if "reply" in relay:
            replies, trouble = await_replies({0: relay["reply"]}, [0], intake.deadline, key="relays")
            if trouble is None or "unstaged" not in trouble:
                return {"unrelayed": trouble} if trouble else replies[0]
            return {key: value for key, value in replies[0].items() if key in RELAY_TROUBLES} or {"unrelayed": trouble}
        staged = {(source, number): sent[source][number] for source, number in relay["reads"]}
        unable = {
            source: ("tcp", channel["blocked"]) for (source, _), channel in staged.items() if "blocked" in channel
        }
        if unable:
            return {"blocked": unable}
        network = self._transports["tcp"]
        assert isinstance(network, Network)
        try:
            places = {place: channel["staged"] for place, channel in staged.items()}
            return {"relays": network.relay(places, relay["fresh"], intake.deadline) if places else {}}
        except Blocked as error:
            # Whatever closes one port closes the others too.
            return {"blocked": {source: ("tcp", str(error)) for source, _ in staged}}
        except (Late, Lost, Overwritten) as error:
            return explain(error.source, {"kind": "tcp"}, error)  # type: ignore[union-attr]

    def _find_overlapping(self, context: Context) -> list[tuple[str, str]]:
        """Return the tensors that share some elements with another one; looks once for each plan and memory."""
        state = self._tasks["id"], self._collection.moves
        if self._overlap_checked == state:
            return []
        own = zip(self._tasks["names"], context.tensors, strict=True)
        wrong = find_overlapping(context.tools, {name: local for name, local in own if local is not None})
        self._overlap_checked = None if wrong else state
        return wrong

    def _copy_local(self, context: Context) -> list[tuple[int, Any, Any]]:
        """Copy what the source end of this process holds: it may change before the commit."""
        tasks, tools = self._tasks, context.tools
        if not tasks["local"]:
            return []
        own = find_shared("ends", {})[self._key[0], "source"]._collection.values  # noqa: SLF001  of the same class
        finish(own.values())
        pieces = []
        for at, box, source_box, sizes in tasks["local"]:
            copy = tools.empty(sizes, tasks["dtypes"][at])
            tools.copy(copy, part(own[tasks["source_names"][at]], source_box))
            pieces.append((at, box, copy))
        return pieces

    def _claim(self, apply: str | None) -> list[str]:
        """Note what this end overwrites; return the ids of the links whose tensors are among that.

        What a method of the user's takes is known by its name and the names of the tensors.
        """
        if apply is not None:
            self._claimed = [(f"{apply} {name}", 0, 1) for name in self._tasks["names"]]
        else:
            context = self._context()
            own = (local for local in context.tensors if local is not None and 0 not in local.shape)
            self._claimed = [span(context.tools, local) for local in own]
        lost = []
        for (link, _), end in find_shared("ends", {}).items():
            if end is not self and overlap(self._claimed, end._claimed):  # noqa: SLF001  of the same class
                end._claimed, end._committed = [], None  # noqa: SLF001
                lost.append(link)
        return lost

    async def _put(self, apply: str | None, worker: Any, chunk_bytes: int) -> None:
        """Overwrite the tensors of the target, or hand whole tensors to a method of the user's."""
        context = self._context()
        if apply is not None:
            for chunk in join_pieces(context.tools, self._tasks, self._pieces, chunk_bytes):
                await call(worker, apply, chunk)
                commit_fault(self._key[1], "committing")
        else:
            pairs = ((context.part(at, box), value) for at, box, value in self._pieces)
            copy_all(context.tools, itertools.islice(pairs, 1))
            commit_fault(self._key[1], "committing")
            copy_all(context.tools, pairs)
        if not all(transport.is_unchanged() for transport in self._transports.values()):
            raise BufferError("the memory of a source was written during the commit")

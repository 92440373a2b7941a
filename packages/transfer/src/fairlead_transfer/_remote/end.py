# SPDX-License-Identifier: Apache-2.0
"""A worker's end of a link: it describes tensors, stages what others need, fetches, verifies and commits.

The driver sends one request for each step. Every request carries the epoch of its attempt. An end refuses a request
that a later attempt has superseded: a worker that was stopped and continues late gets such requests.
"""

import asyncio
import inspect
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray

from .entry import SHARED
from .faults import commit_fault
from .segment import Mapping as SegmentMapping
from .segment import Segment
from .tensors import check_tensors, describe, digest, library, look, nbytes, part

# Pieces from this size on are stored from where they are, the others are packed together first.
ALONE_BYTES = 1 << 20
ALIGNED = 64


class End:
    """One side of a link in one worker.

    Args:
        key: the link's id and the side.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._epoch = -1
        self._values: Mapping[str, Any] = {}
        self._marks: list[Any] = []
        self._number = 0
        self._described: list[tuple[Any, ...]] = []
        self._orders: dict[str, Any] = {}
        self._segments: dict[int, Segment] = {}
        self._packed: dict[int, bytearray] = {}
        self._mapped: dict[int, SegmentMapping] = {}
        self._outgoing: dict[int, list[Any]] = {}
        self._incoming: dict[int, list[Any]] = {}
        self._pieces: list[tuple[int, Any, Any]] = []
        self._used: list[tuple[SegmentMapping, int]] = []
        self._staged: tuple[int, int] | None = None
        self._committed: tuple[int, int] | None = None
        self._torn = False
        self._concurrent = False

    def serve(self, worker: Any, operation: str, args: tuple[Any, ...]) -> Any:
        """Run an operation; on a worker whose async methods overlap, the result is a coroutine on its event loop."""
        # A worker that runs one method at a time has no running loop here; it runs the coroutine to its end.
        self._concurrent = asyncio._get_running_loop() is not None  # noqa: SLF001
        if operation == "close":
            return self._close()
        return getattr(self, f"_{operation}")(worker, *args)

    # -- the steps -----------------------------------------------------------------------------------------------------

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
    ) -> dict[str, Any]:
        """Describe the tensors of the source, and stage them if they are as the plan has them.

        Args:
            worker: the user's instance.
            epoch: of the attempt.
            method: returns the tensors; None to keep those of this attempt.
            known: the number of the description that the driver has planned with.
            orders: what to stage; None for the orders that were given before.
            order_id: the number of these orders; 0 to stage nothing.
            verify: whether to compute digests.
            fresh: stage into new memory, because a target may still read the old one.
        """
        began = time.monotonic()
        if (late := self._enter(epoch)) is not None:
            return late
        reply: dict[str, Any] = {"number": self._number}
        if method is not None:
            reply = await self._collect(worker, epoch, method, known)
        reply["collect_s"] = time.monotonic() - began
        if orders is not None:
            self._orders = orders
        if order_id and self._orders.get("id") == order_id and self._number == known and "refused" not in reply:
            self._reach("stage")
            began = time.monotonic()
            reply["staged"] = await self._in_thread(self._stage, verify, fresh)
            reply["stage_s"] = time.monotonic() - began
        return reply

    async def _target(self, worker: Any, epoch: int, method: str, known: int) -> dict[str, Any]:
        """Describe the tensors of the target."""
        began = time.monotonic()
        if (late := self._enter(epoch)) is not None:
            return late
        return {**await self._collect(worker, epoch, method, known), "collect_s": time.monotonic() - began}

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
    ) -> dict[str, Any]:
        """Map what the orders say, or get it from Ray's object store, and compare digests.

        Args:
            worker: the user's instance.
            epoch: of the attempt.
            version: of the tensors.
            orders: what to fetch from whom; None for the orders that were given before.
            order_id: the number of the orders.
            staged: the reply of each source rank, or a reference to it.
            verify: whether to compare digests.
            within_s: seconds to wait for the replies.
        """
        if (late := self._enter(epoch)) is not None:
            return late
        if orders is not None:
            self._orders = orders
        if self._orders.get("id") != order_id:
            return {"unplanned": True}
        deadline = time.monotonic() + within_s
        reply: dict[str, Any] = await self._in_thread(self._fetch_all, epoch, version, staged, verify, deadline)
        return reply

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
        """Put the staged tensors into place. The driver calls it while no method of the worker runs.

        Returns:
            `committed`: the version; or `superseded`; or `missing`: nothing of this version is staged; or `error`, with
            `torn`: whether some tensors are of the new version and others are not.
        """
        if self._committed == (epoch, version) and not self._torn:
            return {"committed": version}
        if epoch < self._epoch:
            return {"superseded": self._epoch}
        if self._staged != (epoch, version) or not self._is_unchanged():
            return {"missing": True}
        began, writing = time.monotonic(), False
        try:
            self._reach("commit")
            await self._call(worker, before)
            writing = True
            await self._put(apply, worker, chunk_bytes)
            writing = False
            self._torn, self._committed = False, (epoch, version)
            await self._call(worker, after)
        except Exception as error:  # noqa: BLE001  whatever the user's methods raise
            self._torn = self._torn or writing
            text = "".join(traceback.format_exception(error))
            name = f"{type(error).__name__}: {error}"
            return {"error": name, "traceback": text, "torn": writing, "done": self._committed == (epoch, version)}
        finally:
            self._values, self._pieces = {}, []
        return {"committed": version, "commit_s": time.monotonic() - began}

    async def _release(self, worker: Any, epoch: int) -> None:
        """Drop the tensors of an attempt, which were kept alive until its end."""
        if epoch >= self._epoch:
            self._values, self._pieces, self._staged = {}, [], None

    def _close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        shared: Any = sys.modules[SHARED]
        shared.ends.pop(self._key, None)

    # -- how they are done ---------------------------------------------------------------------------------------------

    def _enter(self, epoch: int) -> dict[str, Any] | None:
        """Note the attempt; return the reply to a superseded one."""
        if epoch < self._epoch:
            return {"superseded": self._epoch}
        self._epoch = epoch
        return None

    def _reach(self, phase: str) -> None:
        """Note that this phase has been reached, which a test may have planned a fault for."""
        commit_fault(self._key[1], phase)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what blocks: in a thread where other methods may run meanwhile."""
        return await asyncio.to_thread(function, *args) if self._concurrent else function(*args)

    async def _call(self, worker: Any, method: str | None, *args: Any) -> Any:
        """Call a method of the user's, of any kind; nothing if there is no name."""
        result = getattr(worker, method)(*args) if method is not None else None
        while inspect.isawaitable(result) and not isinstance(result, ray.ObjectRef):
            result = await result
        return result

    async def _collect(self, worker: Any, epoch: int, method: str, known: int) -> dict[str, Any]:
        self._reach("collect")
        values = await self._call(worker, method)
        if epoch < self._epoch:  # the method has let another attempt pass
            return {"superseded": self._epoch}
        try:
            looked = {name: look(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError):
            looked = {}  # `check_tensors` says what is wrong
        marks = [(name, mark) for name, (mark, _) in looked.items()]
        if not marks or marks != self._marks:
            if wrong := check_tensors(values, method):
                return {"number": self._number, "refused": wrong}
            # Only the storage may have changed, of which the driver knows nothing.
            described = [(name, *describe(value)) for name, value in values.items()]
            if described != self._described or not self._number:
                self._number, self._described = self._number + 1, described
            self._marks = marks
        self._values = {name: local for name, (_, local) in looked.items()}
        return {"number": self._number, "tensors": None if self._number == known else self._described}

    def _tools(self) -> Any:
        return library(self._orders["library"])

    def _stage(self, verify: bool, fresh: bool) -> dict[str, Any]:
        """Copy what others need to where they find it."""
        tools, orders = self._tools(), self._orders
        channels: list[dict[str, Any]] = []
        for number, channel in enumerate(orders["channels"]):
            pieces = [
                (part(self._values[orders["names"][at]], box), orders["dtypes"][at], sizes, offset)
                for at, box, sizes, offset in channel["pieces"]
            ]
            if channel["kind"] == "shared_memory":
                description = self._stage_in_segment(tools, number, channel["size"], pieces, fresh)
                channels.append({"segment": description})
            else:
                channels.append({"object": self._stage_in_store(tools, number, channel["size"], pieces)})
            if verify:
                channels[-1]["digests"] = [digest(tools, tensor, dtype) for tensor, dtype, _, _ in pieces]
        reply: dict[str, Any] = {"channels": channels}
        if verify:
            reply["held"] = {
                key: digest(tools, part(self._values[orders["names"][at]], box), orders["dtypes"][at])
                for key, at, box, _ in orders["held"]
            }
        return reply

    def _stage_in_segment(
        self, tools: Any, number: int, size: int, pieces: Sequence[Any], fresh: bool
    ) -> tuple[Any, ...]:
        segment = self._segments.get(number)
        if segment is None or segment.size < size or fresh:
            if segment is not None:
                segment.close()
            segment = self._segments[number] = Segment(size)
            self._outgoing.pop(number, None)
        content = segment.begin()
        kept = self._outgoing.get(number)
        if kept is None or kept[0] != self._orders["id"]:
            # The same memory in every send, so its views are made once.
            views = [tools.view(content, dtype, offset, sizes) for _, dtype, sizes, offset in pieces]
            kept = self._outgoing[number] = [self._orders["id"], views]
        for view, (tensor, _, _, _) in zip(kept[1], pieces, strict=True):
            tools.copy(view, tensor)
        return segment.end()

    def _stage_in_store(self, tools: Any, number: int, size: int, pieces: Sequence[Any]) -> Any:
        """Store one value: where each piece is, and the buffers."""
        buffers: list[Any] = [None]
        index: list[tuple[int, int]] = []
        small = []
        end = 0
        for tensor, dtype, sizes, _ in pieces:
            length = nbytes(tools, sizes, dtype)
            alone = tools.as_buffer(tensor) if length >= ALONE_BYTES and tools.dtype_name(tensor) == dtype else None
            if alone is not None:
                index.append((len(buffers), 0))
                buffers.append(pickle.PickleBuffer(alone))
                continue
            index.append((0, end))
            small.append((tensor, dtype, sizes, end))
            end += -(-length // ALIGNED) * ALIGNED
        if len(packed := self._packed.get(number, bytearray())) < end:
            packed = self._packed[number] = bytearray(end)
        for tensor, dtype, sizes, offset in small:
            tools.copy(tools.view(packed, dtype, offset, sizes), tensor)
        buffers[0] = pickle.PickleBuffer(memoryview(packed)[:end])
        return ray.put([index, *buffers])

    def _fetch_all(
        self, epoch: int, version: int, staged: Mapping[int, Any], verify: bool, deadline: float
    ) -> dict[str, Any]:
        began = time.monotonic()
        tools, orders = self._tools(), self._orders
        self._staged, self._used = None, []
        pieces = self._copy_local(tools)
        replies, trouble = self._await_replies(staged, deadline)
        if trouble is not None:
            return trouble
        blocked: dict[int, str] = {}
        wrong: list[tuple[str, int]] = []
        moved, verify_s = 0, 0.0
        for source, channels in orders["sources"].items():
            if "staged" not in replies[source]:
                return {"unstaged": source}
            for number, ordered in channels.items():
                channel = replies[source]["staged"]["channels"][number]
                try:
                    size, found = self._open_channel(tools, source, number, channel, ordered, deadline)
                except ray.exceptions.GetTimeoutError:  # before OSError, which it is too
                    return {"waiting": [source]}
                except OSError as error:
                    blocked[source] = f"{type(error).__name__}: {error}"
                    continue
                except ray.exceptions.RayError as error:
                    return {"lost": source, "reason": " ".join(str(error).split())[:200]}
                except BufferError:
                    return {"overwritten": source}
                moved += size
                pieces += found
                if verify:
                    started = time.monotonic()
                    self._reach("verify")
                    wrong += self._differing(tools, source, channel["digests"], ordered, found)
                    verify_s += time.monotonic() - started
        if blocked:
            return {"blocked": blocked}
        self._reach("move")
        if wrong:
            return {"differing": wrong}
        if epoch == self._epoch:
            self._pieces, self._staged = pieces, (epoch, version)
        reply: dict[str, Any] = {"bytes": moved, "move_s": time.monotonic() - began - verify_s}
        return {**reply, "verify_s": verify_s} if verify else reply

    def _await_replies(
        self, staged: Mapping[int, Any], deadline: float
    ) -> tuple[dict[int, Any], dict[str, Any] | None]:
        """Return the replies of the source ranks, and what to answer if one does not come."""
        replies: dict[int, Any] = {}
        for source, reply in staged.items():
            if not isinstance(reply, ray.ObjectRef):
                replies[source] = reply
                continue
            try:
                replies[source] = ray.get(reply, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                return replies, {"waiting": [source]}
            except Exception as error:  # noqa: BLE001  the driver sees the same error of the source itself
                return replies, {"lost": source, "reason": " ".join(str(error).split())[:200]}
        return replies, None

    def _copy_local(self, tools: Any) -> list[tuple[int, Any, Any]]:
        """Copy what the source end of this process holds: it may change before the commit."""
        orders = self._orders
        if not orders["local"]:
            return []
        shared: Any = sys.modules[SHARED]
        own = shared.ends[self._key[0], "source"]._values  # noqa: SLF001  of the same class
        pieces = []
        for at, box, source_box, sizes in orders["local"]:
            copy = tools.empty(sizes, orders["dtypes"][at])
            tools.copy(copy, part(own[orders["source_names"][at]], source_box))
            pieces.append((at, box, copy))
        return pieces

    def _open_channel(
        self, tools: Any, source: int, number: int, channel: Mapping[str, Any], ordered: Any, deadline: float
    ) -> tuple[int, list[tuple[int, Any, Any]]]:
        """Return the bytes and the pieces of one channel of a source, which share its memory.

        Raises:
            OSError: its segment cannot be opened here.
            BufferError: its segment was written meanwhile.
            RayError: its value is lost, or does not arrive in time.
        """
        if "segment" not in channel:
            index, *buffers = ray.get(channel["object"], timeout=max(0.0, deadline - time.monotonic()))
            return self._view(tools, ordered, buffers, index)
        description = channel["segment"]
        if source not in self._mapped or self._mapped[source].token != description[3]:
            self._mapped[source] = SegmentMapping(description)
            self._incoming.pop(source, None)
        mapped = self._mapped[source]
        if not mapped.holds(description[4]):
            raise BufferError
        self._used.append((mapped, description[4]))
        kept = self._incoming.get(source)
        if kept is None or kept[0] != (self._orders["id"], number):
            # The same memory in every send, so its views are made once.
            views = self._view(tools, ordered, [mapped.content()], None)
            kept = self._incoming[source] = [(self._orders["id"], number), *views]
        return kept[1], kept[2]

    def _view(
        self, tools: Any, ordered: Any, buffers: Sequence[Any], index: Any
    ) -> tuple[int, list[tuple[int, Any, Any]]]:
        moved, pieces = 0, []
        for at, box, sizes, piece, offset in ordered:
            buffer, begin = (0, offset) if index is None else index[piece]
            dtype = self._orders["dtypes"][at]
            pieces.append((at, box, tools.view(buffers[buffer], dtype, begin, sizes)))
            moved += nbytes(tools, sizes, dtype)
        return moved, pieces

    def _differing(
        self, tools: Any, source: int, sent: Sequence[int], ordered: Any, pieces: Sequence[Any]
    ) -> Iterator[tuple[str, int]]:
        """Yield the name and the source of each piece whose bytes are not those that were sent."""
        for (at, _, _, piece, _), (_, _, value) in zip(ordered, pieces, strict=True):
            if digest(tools, value, self._orders["dtypes"][at]) != sent[piece]:
                yield self._orders["names"][at], source

    def _is_unchanged(self) -> bool:
        """Return whether no segment has been written since it was opened."""
        return all(mapped.holds(generation) for mapped, generation in self._used)

    async def _put(self, apply: str | None, worker: Any, chunk_bytes: int) -> None:
        """Overwrite the tensors of the target, or hand whole tensors to a method of the user's."""
        tools, names = self._tools(), self._orders["names"]
        if apply is not None:
            for chunk in self._chunks(tools, chunk_bytes):
                await self._call(worker, apply, chunk)
                self._reach("committing")
        else:
            for at, box, value in self._pieces:
                tools.copy(part(self._values[names[at]], box), value)
                self._reach("committing")
        if not self._is_unchanged():
            raise BufferError("the memory of a source was written during the commit")

    def _chunks(self, tools: Any, chunk_bytes: int) -> Iterator[dict[str, Any]]:
        """Yield whole tensors in parts of at most so many bytes; a larger tensor is a part by itself."""
        orders = self._orders
        pieces: dict[int, list[Any]] = {}
        for at, box, value in self._pieces:
            pieces.setdefault(at, []).append((box, value))
        chunk: dict[str, Any] = {}
        size = 0
        for at, parts in sorted(pieces.items()):
            shape, dtype = orders["shapes"][at], orders["dtypes"][at]
            length = nbytes(tools, shape, dtype)
            if chunk and size + length > chunk_bytes:
                yield chunk
                chunk, size = {}, 0
            whole = chunk[orders["names"][at]] = tools.empty(shape, dtype)
            for box, value in parts:
                tools.copy(part(whole, box), value)
            size += length
        if chunk:
            yield chunk

# SPDX-License-Identifier: Apache-2.0
"""Transfers with a bound of memory, in the workers: a source stages one bucket after the other, as targets read them.

A target reads the buckets of all its sources in the order of their numbers, so no two ranks wait for each other.
"""

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from .faults import commit_fault
from .staging import stage_channel
from .tensors import find_differing, finish, part
from .transport import Blocked, Late, Lost, Overwritten, Transport, Wanted, fetch_value

# The bucket before the first one: the digests of what several ranks hold, for the driver, which is reader -1.
HELD, DRIVER = -1, -1


class Place(NamedTuple):
    """The place of one end in an attempt."""

    board: Any  # the actor
    epoch: int  # of the attempt
    rank: int  # of this end


def offer_buckets(
    place: Place,
    tools: Any,
    orders: Mapping[str, Any],
    tensors: Sequence[Any],
    transports: Mapping[str, Transport],
    held: Mapping[Any, int],
    verify: bool,
    deadline: float,
) -> list[dict[str, Any]]:
    """Stage the channels of a source rank, each when all readers have read the one before; return their transports."""
    offers: Any = place.board.offer
    if fetch_value(offers.remote(place.epoch, place.rank, HELD, held, [DRIVER]), deadline):
        return []
    for number, channel in enumerate(orders["channels"]):
        # The same memory for all of them.
        key = orders["id"], number
        staged = stage_channel(tools, orders, tensors, transports, 0, channel, key, verify, fresh=False)
        if number:
            commit_fault("source", "feed")
        args = place.epoch, place.rank, number, staged, channel["readers"]
        if fetch_value(offers.remote(*args), deadline):
            return []
    return [{"kind": channel["kind"]} for channel in orders["channels"]]


def take_bucket(board: Any, epoch: int, source: int, number: int, task: Any, deadline: float) -> Any:
    """Return where a bucket of a source rank is.

    Args:
        board: the board.
        epoch: of the attempt.
        source: the rank.
        number: of the bucket.
        task: the future of the request in which the source rank offers its buckets.
        deadline: when to give up, in `time.monotonic`.

    Raises:
        Late, Lost: it was not offered in time, or never will be.
    """
    answer = board.take.remote(epoch, source, number).future()
    left = max(0.0, deadline - time.monotonic())
    concurrent.futures.wait([answer, task], left, concurrent.futures.FIRST_COMPLETED)
    if not answer.done():
        if not task.done():
            raise Late
        if (error := task.exception()) is not None:
            cause = getattr(error, "cause", None) or error  # of the user's method
            raise Lost(f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}")
    try:
        reason, staged = answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        raise Late from error
    except ray.exceptions.RayError as error:
        raise Lost(f"the board of the buckets is lost: {' '.join(str(error).split())[:200]}") from error
    if reason:
        raise Lost(reason)
    return staged


class Reader:
    """Reads the buckets of a target rank.

    Args:
        place: of the rank.
        tools: the library of the tensors.
        orders: of this rank.
        wanted: by source rank and channel, what it wants.
        transports: by name.
        tasks: for each source rank, the reference of the request in which it offers its buckets.
        verify: whether digests are compared.
        deadline: when to give up, in `time.monotonic`.
    """

    def __init__(
        self,
        place: Place,
        tools: Any,
        orders: Mapping[str, Any],
        wanted: Mapping[tuple[int, int], Sequence[Wanted]],
        transports: Mapping[str, Transport],
        tasks: Mapping[int, Any],
        verify: bool,
        deadline: float,
    ) -> None:
        self._place = place
        self._tools = tools
        self._orders = orders
        self._wanted = wanted
        self._transports = transports
        self._tasks = {source: task.future() for source, task in tasks.items()}
        self._verify = verify
        self._deadline = deadline
        self._verify_s = 0.0

    def look(self) -> dict[str, Any]:
        """Open the first bucket of each source rank, and copy nothing; return the reply."""
        began = time.monotonic()
        for source, channels in self._orders["sources"].items():
            number, channel = min(channels), dict[str, Any]()
            try:
                channel = self._take(source, number)
                self._fetch(source, number, channel, self._wanted[source, number][:1], None)
            except (Late, Lost, Blocked, Overwritten) as error:
                return _explain(source, channel, error)
            finally:
                self._let_go()
        commit_fault("target", "move")
        return {"bytes": 0, "saved": 0, "move_s": time.monotonic() - began}

    def copy(self) -> tuple[dict[str, Any], list[tuple[int, Any, Any]]]:
        """Copy all buckets into memory of this process; return the reply and the pieces."""
        pieces: list[tuple[int, Any, Any]] = []

        def make_places(ordered: Sequence[Any], wanted: Sequence[Wanted]) -> list[Any]:
            made = [self._tools.empty(one.sizes, one.dtype) for one in wanted]
            pieces.extend((at, box, new) for (at, box, _, _), new in zip(ordered, made, strict=True))
            return made

        return self._read(make_places, lambda: None, into=False), pieces

    def read_into(self, tensors: Sequence[Any], begin: Callable[[], None]) -> dict[str, Any]:
        """Read all buckets into the tensors of the target; `begin` is called before the first byte is written."""

        def find_places(ordered: Sequence[Any], wanted: Sequence[Wanted]) -> list[Any]:
            return [part(tensors[at], box) for at, box, _, _ in ordered]

        return self._read(find_places, begin, into=True)

    def _read(
        self,
        find_places: Callable[[Sequence[Any], Sequence[Wanted]], list[Any]],
        begin: Callable[[], None],
        *,
        into: bool,
    ) -> dict[str, Any]:
        began, has_begun = time.monotonic(), False
        sources = self._orders["sources"]
        # Stable: each rank begins with another source, as the orders say.
        for number, source in sorted(((n, one) for one, all in sources.items() for n in all), key=lambda pair: pair[0]):
            ordered, wanted = sources[source][number], self._wanted[source, number]
            channel, found = dict[str, Any](), list[Any]()
            try:
                channel = self._take(source, number)
                places = find_places(ordered, wanted)
                straight = into and channel["kind"] == "nixl" and "blocked" not in channel
                if straight and not has_begun:
                    begin()
                    has_begun = True
                found = self._fetch(source, number, channel, wanted, places if straight else None)
                if self._verify and (wrong := self._compare(source, channel, ordered, found)):
                    return {"differing": wrong}
                if not straight:
                    if not has_begun:
                        begin()
                        has_begun = True
                    self._tools.copy_all(zip(places, found, strict=True))
                # The source stages the next one into this memory.
                finish(places)
                if not self._transports[channel["kind"]].is_unchanged():
                    raise Overwritten
            except (Late, Lost, Blocked, Overwritten) as error:
                return _explain(source, channel, error)
            finally:
                found = []
                self._let_go()
            if into:
                commit_fault("target", "committing")
            self._place.board.finish.remote(self._place.epoch, self._place.rank, [(source, number)])
        if not has_begun:
            begin()
        commit_fault("target", "move")
        reply = {"bytes": self._orders["bytes"], "saved": 0, "move_s": time.monotonic() - began - self._verify_s}
        return {**reply, "verify_s": self._verify_s} if self._verify else reply

    def _take(self, source: int, number: int) -> dict[str, Any]:
        place, task = self._place, self._tasks[source]
        channel: dict[str, Any] = take_bucket(place.board, place.epoch, source, number, task, self._deadline)
        return channel

    def _fetch(
        self, source: int, number: int, channel: Mapping[str, Any], wanted: Sequence[Wanted], into: Any
    ) -> list[Any]:
        if "blocked" in channel:
            raise Blocked(channel["blocked"])
        transport: Any = self._transports[channel["kind"]]
        order = self._orders["id"], number, len(wanted)
        args = self._tools, source, number, channel["staged"], wanted, order, self._deadline
        found: list[Any] = transport.fetch(*args) if into is None else transport.fetch(*args, into)
        return found

    def _compare(
        self, source: int, channel: Mapping[str, Any], ordered: Sequence[Any], found: Sequence[Any]
    ) -> list[tuple[str, int]]:
        began = time.monotonic()
        commit_fault("target", "verify")
        wrong = list(find_differing(self._tools, self._orders, source, channel["digests"], ordered, found))
        self._verify_s += time.monotonic() - began
        return wrong

    def _let_go(self) -> None:
        """Unmap what was read: shared memory counts as memory of this process as long as it is mapped."""
        for transport in self._transports.values():
            transport.release()
            transport.forget_others(())


def _explain(source: int, channel: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """Return the reply to the driver."""
    if isinstance(error, Blocked):
        return {"blocked": {source: (channel["kind"], str(error))}}
    if isinstance(error, Lost):
        return {"lost": source, "reason": str(error)}
    return {"waiting": [source]} if isinstance(error, Late) else {"overwritten": source}

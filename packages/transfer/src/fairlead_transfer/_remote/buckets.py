# SPDX-License-Identifier: Apache-2.0
"""Transfers with a bound of memory, in the workers: a source stages one bucket after the other, as targets read them.

A target reads the buckets of all its sources in the order of their numbers, so no two ranks wait for each other.
"""

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray

from .faults import commit_fault
from .reading import Ties, explain, fetch_channel, find_differing
from .staging import Context, stage_channel
from .tensors import copy_all, finish
from .transport import Blocked, Late, Lost, Overwritten, fetch_value

# The bucket before the first one: the digests of what several ranks hold, for the driver, which is reader -1.
HELD, DRIVER = -1, -1


class Place(NamedTuple):
    """The place of one end in an attempt."""

    board: Any  # the actor
    epoch: int  # of the attempt
    rank: int  # of this end


def offer_buckets(
    place: Place, context: Context, held: Mapping[Any, int], verify: bool, deadline: float
) -> list[dict[str, Any]]:
    """Stage the channels of a source rank, each when all readers have read the one before; return their transports."""
    offers: Any = place.board.offer
    if fetch_value(offers.remote(place.epoch, place.rank, HELD, held, [DRIVER]), deadline):
        return []
    channels = context.orders["channels"]
    for number, channel in enumerate(channels):
        # The same memory for all of them.
        staged = stage_channel(context, 0, channel, (context.orders["id"], number), verify, fresh=False)
        if number:
            commit_fault("source", "feed")
        args = place.epoch, place.rank, number, staged, channel["readers"]
        if fetch_value(offers.remote(*args), deadline):
            return []
    return [{"kind": channel["kind"]} for channel in channels]


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
        context: of this process.
        tasks: for each source rank, the reference of the request in which it offers its buckets.
        verify: whether digests are compared.
        deadline: when to give up, in `time.monotonic`.
    """

    def __init__(self, place: Place, context: Context, tasks: Mapping[int, Any], verify: bool, deadline: float) -> None:
        self._place = place
        self._context = context
        self._tasks = {source: task.future() for source, task in tasks.items()}
        self._verify = verify
        self._deadline = deadline

    def look(self) -> dict[str, Any]:
        """Open the first buckets of the source ranks, and copy nothing; return the reply."""
        began = time.monotonic()
        for source, channels in self._context.orders["sources"].items():
            number, channel = min(channels), dict[str, Any]()
            if number:
                continue  # the rank stages it when others, which copy nothing either now, have read those before it
            try:
                channel = self._take(source, number)
                fetch_channel(
                    self._context, source, number, channel, [channels[number][0][3]], self._deadline, into=None
                )
            except (Late, Lost, Blocked, Overwritten) as error:
                return explain(source, channel, error)
            finally:
                self._let_go()
        commit_fault("target", "move")
        return {"bytes": 0, "saved": 0, "move_s": time.monotonic() - began}

    def read(self, begin: Callable[[], None], copies: list[tuple[int, Any, Any]] | None) -> dict[str, Any]:
        """Copy all buckets into new memory, as pieces of `copies`, or without it into the tensors; return the reply.

        `begin` is called before the first byte is written.
        """
        context, orders, verify_s, began = self._context, self._context.orders, 0.0, time.monotonic()
        sources, ties = orders["sources"], Ties(context)
        # Stable: each rank begins with another source, as the orders say.
        for number, source in sorted(((n, one) for one, all in sources.items() for n in all), key=lambda pair: pair[0]):
            ordered = sources[source][number]
            wanted = [one for *_, one in ordered]
            channel, found = dict[str, Any](), list[Any]()
            try:
                channel = self._take(source, number)
                straight = copies is None and channel["kind"] == "nixl" and "blocked" not in channel
                if copies is None:
                    places = [(ties.place if straight else context.part)(at, box) for at, box, _, _ in ordered]
                else:
                    places = [context.tools.empty(one.sizes, one.dtype) for one in wanted]
                    copies += [(at, box, new) for (at, box, _, _), new in zip(ordered, places, strict=True)]
                if straight:
                    begin()
                found = fetch_channel(
                    context, source, number, channel, wanted, self._deadline, places if straight else None
                )
                if self._verify:
                    started = time.monotonic()
                    if wrong := find_differing(context, source, channel, ordered, found):
                        return {"differing": wrong}
                    verify_s += time.monotonic() - started
                ties.note((at, box, value) for (at, box, *_), value in zip(ordered, found, strict=True))
                if not straight:
                    begin()
                    copy_all(context.tools, zip(places, found, strict=True))
                # The source stages the next one into this memory.
                finish(places)
                if not context.transports[channel["kind"]].is_unchanged():
                    raise Overwritten
            except (Late, Lost, Blocked, Overwritten) as error:
                return explain(source, channel, error)
            finally:
                found = []
                self._let_go()
            if copies is None:
                commit_fault("target", "committing")
            self._place.board.finish.remote(self._place.epoch, self._place.rank, [(source, number)])
        begin()
        commit_fault("target", "move")
        if clashing := ties.find_clashing():
            return {"refused": clashing}
        reply = {"bytes": orders["bytes"], "saved": 0, "move_s": time.monotonic() - began - verify_s}
        return {**reply, "verify_s": verify_s} if self._verify else reply

    def _take(self, source: int, number: int) -> dict[str, Any]:
        place, task = self._place, self._tasks[source]
        channel: dict[str, Any] = take_bucket(place.board, place.epoch, source, number, task, self._deadline)
        return channel

    def _let_go(self) -> None:
        """Unmap what was read: shared memory counts as memory of this process as long as it is mapped."""
        for transport in self._context.transports.values():
            transport.release()
            transport.forget_others(())

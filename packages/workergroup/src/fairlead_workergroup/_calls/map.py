# SPDX-License-Identifier: Apache-2.0
"""Many items over few workers: each goes to one of them, whoever is to have it next."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import ray
from ray import ObjectRef

from .._arguments import Arguments
from .._display import Bar
from .._start.worker_class import Method
from ..exceptions import CallTimeoutError, WorkerFailureError
from .dispatch import dispatch
from .errors import retrieve_late, short_traceback
from .execution import Execution
from .plan import Column
from .results import REPORT_EVERY_S
from .sender import Sender
from .wait import ResultStream, result_of

Strategy = Literal["round_robin", "least_loaded"] | Callable[[Sequence[int]], int]

STRATEGIES = ("round_robin", "least_loaded")
# Items that are handed out ahead of the oldest that is not done, in multiples of what can be under way.
WINDOW = 8
# An item that takes its worker with it must not take all of them.
MOST_LOSSES = 3


def check_strategy(strategy: Any) -> Strategy:
    """Refuse what is no strategy.

    Raises:
        ValueError: neither one of the names nor a function.
    """
    if not callable(strategy) and strategy not in STRATEGIES:
        raise ValueError(f"a load balancing strategy is one of {list(STRATEGIES)} or a function, got {strategy!r}")
    return strategy  # type: ignore[no-any-return]


class _Sent(NamedTuple):
    position: int
    item: Any
    rank: int


def map_items(
    sender: Sender,
    owner: object,
    ranks: Sequence[int],
    method: str | Callable[..., Any],
    items: Iterable[Any],
    *,
    max_in_flight: int,
    ordered: bool,
    strategy: Strategy,
    timeout_s: float | None,
    retries: int,
    return_exceptions: bool,
    move_items: bool,
) -> ResultStream[Any]:
    """Check everything, then return the results as they come; see `RayWorkerGroup.map`."""
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight must be a positive number of items, got {max_in_flight!r}")
    found = sender.method(method)
    if found.result == "items":
        raise TypeError(f"{found.name!r} is a generator method; map needs one result for each item: call it and stream")
    found.check([None], {})
    sender.check_retries(retries)
    stored = Arguments()  # a large function is stored once, not with each item
    found = replace(found, function=stored.prepare(found.function))
    sender.counters.add(puts=stored.puts, bytes_put=stored.bytes_put)
    total = len(items) if isinstance(items, Sized) else None
    how = _How(found, max_in_flight, check_strategy(strategy), timeout_s, retries, return_exceptions, move_items)
    balancer = _Balancer(sender, owner, ranks, how)
    order = _Order(WINDOW * balancer.capacity if ordered else math.inf)
    return ResultStream(
        lambda: _results(balancer, iter(items), total, order),
        lambda: _async_results(balancer, iter(items), total, order),
    )


class _How(NamedTuple):
    """How each item is handled."""

    method: Method
    max_in_flight: int
    strategy: Strategy
    timeout_s: float | None
    retries: int
    return_exceptions: bool
    move_items: bool


class _Order:
    """Puts results in order; a slow item holds up those behind it, of which only so many wait here."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._position = 0
        self._kept: dict[int, Any] = {}

    @property
    def until(self) -> float:
        """The first position that is not to be handed out yet."""
        return self._position + self._window

    def ready(self, finished: Sequence[tuple[int, Any]]) -> Iterator[Any]:
        """Yield what can be given now that these items have finished, and raise the error of one in its turn."""
        if self._window == math.inf:
            yield from (_checked(value) for _, value in finished)
            return
        self._kept.update(finished)
        while self._position in self._kept:
            self._position += 1
            yield _checked(self._kept.pop(self._position - 1))


class _Failure(NamedTuple):
    """The error of an item, to be raised in its turn."""

    error: Exception


def _checked(value: Any) -> Any:
    if isinstance(value, _Failure):
        raise value.error
    return value


def _results(balancer: "_Balancer", items: Iterator[Any], total: int | None, order: _Order) -> Generator[Any]:
    done = 0
    try:
        with short_traceback(), Bar(f"Mapping {balancer.method}", total) as bar:
            while balancer.fill(items, until=order.until, may_wait=False):
                finished = balancer.finished()
                done += len(finished)
                bar.show(done)
                yield from order.ready(finished)
    finally:
        balancer.close()


async def _async_results(
    balancer: "_Balancer", items: Iterator[Any], total: int | None, order: _Order
) -> AsyncGenerator[Any]:
    done = 0
    tasks: dict[asyncio.Task[Any], Execution] = {}
    try:
        with short_traceback(), Bar(f"Mapping {balancer.method}", total) as bar:
            while balancer.fill(items, until=order.until, may_wait=True):
                for call in balancer.new():
                    tasks[asyncio.ensure_future(result_of(call))] = call
                finished = balancer.given_up()
                if tasks and not finished:
                    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in tasks if task in ended]:
                        finished += balancer.settled(tasks.pop(task), task.result)
                done += len(finished)
                bar.show(done)
                for value in order.ready(finished):
                    yield value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(balancer.close)


class _Balancer:
    """Which worker has which items now."""

    def __init__(self, sender: Sender, owner: object, ranks: Sequence[int], how: _How) -> None:
        self.method = how.method.name
        self._sender = sender
        self._owner = owner
        self._how = how
        self._max = how.max_in_flight
        self._strategy = how.strategy
        # Items that each worker has now, by rank; a worker that was lost is not in it.
        self._loads = dict.fromkeys(ranks, 0)
        self._turn = 0
        self._position = 0
        # Keyed by the call, because a call that waits to be sent has no futures yet.
        self._sent: dict[Execution, _Sent] = {}
        self._new: list[Execution] = []
        self._given_up: list[tuple[int, Any]] = []
        self._failed = False
        self._again: deque[tuple[int, Any]] = deque()
        self._losses: Counter[int] = Counter()

    @property
    def capacity(self) -> int:
        """How many items can be under way."""
        return self._max * len(self._loads)

    def fill(self, items: Iterator[Any], *, until: float, may_wait: bool) -> bool:
        """Hand out items before `until` while the worker whose turn it is has room; whether anything is under way.

        With `may_wait` a call on an event loop is sent later instead of blocking the loop.
        """
        while (self._again or (self._position < until and not self._failed)) and (rank := self._next()) is not None:
            if self._again:
                position, item = self._again.popleft()
            else:
                try:
                    item = next(items)
                except StopIteration:
                    break
                position, self._position = self._position, self._position + 1
            self._send(position, item, rank, may_wait=may_wait)
        return bool(self._sent or self._given_up)

    def _next(self) -> int | None:
        """The rank whose turn it is; None if that one has no room now."""
        ranks = list(self._loads)
        if self._strategy == "round_robin":
            at = self._turn % len(ranks)
        elif self._strategy == "least_loaded":
            at = min(range(len(ranks)), key=lambda one: self._loads[ranks[one]])
        else:
            at = self._strategy(tuple(self._loads.values()))
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(ranks):
                raise ValueError(
                    f"the load balancing strategy returned {at!r}; it must return which of {len(ranks)} workers gets "
                    "the next item"
                )
        return ranks[at] if self._loads[ranks[at]] < self._max else None

    def _send(self, position: int, item: Any, rank: int, *, may_wait: bool) -> None:
        try:
            call = dispatch(
                self._sender,
                self._owner,
                self._how.method,
                [rank],
                [Column([item])],
                {},
                returned=[rank],
                timeout_s=self._how.timeout_s,
                single=True,
                retries=self._how.retries,
                may_wait=may_wait,
            )
        except WorkerFailureError as error:
            self._given_up += self._lost(position, item, rank, error)
            return
        self._turn += 1
        self._loads[rank] += 1
        self._sent[call] = _Sent(position, item, rank)
        self._new.append(call)

    def new(self) -> list[Execution]:
        """Return the calls that have been made since this was last asked."""
        new, self._new = self._new, []
        return new

    def given_up(self) -> list[tuple[int, Any]]:
        """Return the positions and errors of items that could not be sent."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def finished(self) -> list[tuple[int, Any]]:
        """Wait until an item is done; the positions and results of all that are by then."""
        self._new.clear()
        if given_up := self.given_up():
            return given_up
        calls = {call.futures[0]: call for call in self._sent}
        refs = list(calls)
        oldest = calls[refs[0]]
        self._sender.roster.check_connected()
        done, _ = ray.wait(refs, num_returns=1, timeout=oldest.deadline.left(at_most=REPORT_EVERY_S))
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        # Also when others are done: an item that hangs must not go unnoticed for as long as they are.
        if not done or (oldest.deadline.passed and refs[0] not in {*done, *ready}):
            try:
                oldest.check_late(oldest.deadline)
            except CallTimeoutError as error:
                return self.settled(oldest, partial(_raise, error))
        finished = sorted({calls[ref] for ref in (*done, *ready)}, key=lambda call: self._sent[call].position)
        return [found for call in finished for found in self.settled(call, call.result)]

    def settled(self, call: Execution, result: Callable[[], Any]) -> list[tuple[int, Any]]:
        """Return the position and the result of an item that is done; nothing if it has to be repeated.

        What its call raised is its result if exceptions are returned, and otherwise a `_Failure`, after which no more
        items are handed out.
        """
        sent = self._sent.pop(call)
        if sent.rank in self._loads:
            self._loads[sent.rank] -= 1
        try:
            return [(sent.position, result())]
        except WorkerFailureError as error:
            return self._lost(sent.position, sent.item, sent.rank, error)
        except Exception as error:  # noqa: BLE001  whatever the worker raised
            error.add_note(f"item {sent.position} of map({self.method!r})")
            if not self._how.return_exceptions:
                self._failed = True
                return [(sent.position, _Failure(error))]
            if not call.withdraw(force=False):
                retrieve_late(call.futures, call)  # of an item that has run out of time
            return [(sent.position, error)]

    def _lost(self, position: int, item: Any, rank: int, error: WorkerFailureError) -> list[tuple[int, Any]]:
        """An item's worker is gone: the item goes to the others, if there are any and they may have it."""
        self._loads.pop(rank, None)
        self._losses[position] += 1
        if self._how.move_items and self._loads and self._losses[position] < MOST_LOSSES:
            self._again.append((position, item))
            return []
        error.add_note(f"item {position} of map({self.method!r}); workers lost with it: {self._losses[position]}")
        if not self._how.return_exceptions or not self._loads:
            raise error
        return [(position, error)]

    def close(self) -> None:
        """Nobody wants the rest."""
        if not self._sender.roster.connected:
            return
        waiting: dict[int, list[ObjectRef]] = {}
        for call, sent in self._sent.items():
            if not call.withdraw(force=False):
                waiting.setdefault(sent.rank, []).append(call.futures[0])
        retrieve_late([ref for refs in waiting.values() for ref in refs], self)
        self._sent.clear()
        while waiting:  # an item of every worker at a time: one request a node
            self._sender.cancel({rank: refs.pop() for rank, refs in waiting.items()}, self.method, force=False)
            waiting = {rank: refs for rank, refs in waiting.items() if refs}


def _raise(error: BaseException) -> NoReturn:
    raise error

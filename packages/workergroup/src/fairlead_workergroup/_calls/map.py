# SPDX-License-Identifier: Apache-2.0
"""The distribution of many items over few workers, one worker for each item."""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from .. import _world
from .._arguments import Arguments
from .._membership.core import Core
from .._observe.progress_bar import Bar
from .._replies import wait_for_news
from .._world import Deadline
from ..exceptions import CallTimeoutError, StaleGroupError, WorkerFailureError
from .call import Call
from .plan import CallOptions, Recipients, prepare_call
from .results import cancel, check_late

Strategy = Literal["round_robin", "least_loaded"] | Callable[[Sequence[int]], int]

STRATEGIES = ("round_robin", "least_loaded")
# The number of items that are sent ahead of the oldest unfinished one, in multiples of those that run at a time.
WINDOW = 8
# An item that kills its worker must not kill all of them.
MOST_LOSSES = 3


@dataclass(frozen=True)
class MapOptions:
    """The options of `map`; with `move_items`, the items of a worker that dies go to the others."""

    strategy: Strategy
    move_items: bool
    max_in_flight: int = 2
    ordered: bool = True
    return_exceptions: bool = False
    each: CallOptions = field(default_factory=CallOptions)

    def __post_init__(self) -> None:
        most, strategy = self.max_in_flight, self.strategy
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_in_flight must be a positive number of items, got {most!r}")
        if not callable(strategy) and strategy not in STRATEGIES:
            raise ValueError(f"a load balancing strategy is one of {list(STRATEGIES)} or a function, got {strategy!r}")


class _Item(NamedTuple):
    """One item of `map`, and the worker that it is sent to."""

    position: int
    value: Any
    rank: int
    began: float
    deadline: Deadline


class _Failure(NamedTuple):
    """The error of an item, to be raised in its turn."""

    error: Exception


class ItemMap:
    """The items of one `map`: those that workers have, those that have finished, and those that are sent again."""

    def __init__(
        self,
        core: Core,
        owner: object,
        ranks: Sequence[int],
        method: str | Callable[..., Any],
        items: Iterable[Any],
        options: MapOptions,
    ) -> None:
        called = core.worker_class.method(method)
        if called.result == "items":
            raise TypeError(
                f"{called.name!r} is a generator method; map needs one result for each item: call it and stream"
            )
        called.check(1, ())
        core.check_retries(options.each.retries)
        self._core = core
        self._owner = owner
        # A large function is stored once, not with each item.
        self._method = replace(called, function=Arguments().prepare(called.function))
        self._total = len(items) if isinstance(items, Sized) else None
        self._items = iter(items)
        self._options = options
        # In order, a slow item delays the items behind it, of which only so many wait here.
        self._window = WINDOW * options.max_in_flight * len(ranks) if options.ordered else math.inf
        # How many items each worker has, by ascending rank, without the workers that were lost.
        self._loads = dict.fromkeys(ranks, 0)
        self._taken = 0  # how many items were taken
        self._turn = 0  # how many items were sent
        self._next = 0  # the position of the next result in order
        self._sent: dict[Call, _Item] = {}  # in the order of the items
        # The positions of items that have just finished, with results or failures.
        self._news: list[tuple[int, Any]] = []
        self._early: dict[int, Any] = {}  # those that have finished before an earlier item
        self._failed = False
        self._again: deque[tuple[int, Any]] = deque()
        self._losses: Counter[int] = Counter()

    def results(self, turn_s: float | None) -> Generator[list[Any]]:
        """Yield results; raise the error of an item in its turn."""
        done = 0
        try:
            with Bar(f"Mapping {self._method.name}", self._total) as bar:
                while self._fill():
                    if not self._news:
                        yield from self._wait_for_news(turn_s)
                    done += len(self._news)
                    bar.show(done)
                    for value in self._take_ready():
                        if isinstance(value, _Failure):
                            raise value.error
                        yield [value]
        finally:
            self._close()

    def _take_ready(self) -> list[Any]:
        """Return the results and failures whose turn has come."""
        news, self._news = self._news, []
        if not self._options.ordered:
            return [value for _, value in news]
        self._early.update(news)
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    def _fill(self) -> bool:
        """Send items while a worker has room; return whether an item is unfinished."""
        while self._again or (self._taken < self._next + self._window and not self._failed):
            if (rank := self._choose()) is None:
                break
            if self._again:
                position, value = self._again.popleft()
            else:
                try:
                    value = next(self._items)
                except StopIteration:
                    break
                position, self._taken = self._taken, self._taken + 1
            self._send(position, value, rank)
        return bool(self._sent or self._news)

    def _choose(self) -> int | None:
        """Return the rank whose turn it is; None if it has no room now."""
        ranks, strategy = list(self._loads), self._options.strategy
        if strategy == "round_robin":
            rank = ranks[self._turn % len(ranks)]
        elif strategy == "least_loaded":
            rank = min(ranks, key=self._loads.__getitem__)
        else:
            index = strategy(tuple(self._loads.values()))
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(ranks):
                raise ValueError(
                    f"the load balancing strategy returned {index!r}; it must return which of {len(ranks)} workers "
                    "gets the next item"
                )
            rank = ranks[index]
        return rank if self._loads[rank] < self._options.max_in_flight else None

    def _send(self, position: int, value: Any, rank: int) -> None:
        each = self._options.each
        timeout_s = self._core.call_timeout_s if each.timeout is None else each.timeout
        item = _Item(position, value, rank, _world.current.now(), Deadline.after(timeout_s))
        try:
            call = prepare_call(self._core, self._method, Recipients([rank], [rank], None), [value], {}, each)
            self._sent[Call(self._core, self._owner, call, self._core.send(call))] = item
        except StaleGroupError:  # a resize has removed the rank; the items that it has are finished there
            del self._loads[rank]
            if not self._loads:
                raise
            self._again.appendleft((position, value))
        except WorkerFailureError as error:
            self._fail(item, error)
        else:
            self._turn += 1
            self._loads[rank] += 1

    def _wait_for_news(self, turn_s: float | None) -> Generator[list[Any]]:
        """Wait until an item has finished, and note all that have finished by then."""
        self._core.connection.check()  # a wait would start another Ray
        calls, oldest = {call.futures[0]: call for call in self._sent}, next(iter(self._sent))
        item = self._sent[oldest]
        check = partial(check_late, self._core, self._method.name, item.began, oldest.futures)
        try:
            news = yield from wait_for_news(list(calls), item.deadline, check, turn_s)
        except CallTimeoutError as error:
            self._fail(self._release(oldest), error)
            return
        for call in sorted((calls[reply] for reply in news), key=lambda call: self._sent[call].position):
            try:
                result = call.result()
            except Exception as error:  # noqa: BLE001  any exception of the worker
                self._fail(self._release(call), error)
            else:
                self._news.append((self._release(call).position, result))

    def _release(self, call: Call) -> _Item:
        item = self._sent.pop(call)
        if item.rank in self._loads:
            self._loads[item.rank] -= 1
        return item

    def _fail(self, item: _Item, error: Exception) -> None:
        """Note the error of an item, or send it again. After a failure that is to be raised, send no more."""
        note = f"item {item.position} of map({self._method.name!r})"
        if isinstance(error, WorkerFailureError):
            self._loads.pop(item.rank, None)
            self._losses[item.position] += 1
            losses = self._losses[item.position]
            if self._options.move_items and self._loads and losses < MOST_LOSSES:
                self._again.append((item.position, item.value))
                return
            note += f"; workers lost with it: {losses}"
        error.add_note(note)
        if not self._loads:
            raise error
        self._failed |= not self._options.return_exceptions
        self._news.append((item.position, error if self._options.return_exceptions else _Failure(error)))

    def _close(self) -> None:
        """Cancel the unfinished items."""
        sent, self._sent = self._sent, {}
        if not self._core.connected:
            return
        waiting: dict[int, list[Any]] = {}
        for call, item in sent.items():
            waiting.setdefault(item.rank, []).append(call.futures[0])
        while waiting:  # an item of each worker at a time: one request a node
            cancel(self._core, {rank: refs.pop() for rank, refs in waiting.items()}, self._method.name, force=False)
            waiting = {rank: refs for rank, refs in waiting.items() if refs}

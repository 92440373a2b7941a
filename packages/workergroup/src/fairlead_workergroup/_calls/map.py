# SPDX-License-Identifier: Apache-2.0
"""The distribution of many items over few workers, one worker for each item."""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ray.exceptions import RayError

from .._arguments import Arguments
from .._membership.core import Core
from .._observe.progress_bar import Bar
from .._replies import wait_for_news
from .._world import NEVER
from ..exceptions import CallTimeoutError, StaleGroupError, WorkerFailureError
from .plan import CallOptions, Recipients, prepare_call
from .results import Arrivals, cancel

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


class _Failure(NamedTuple):
    """The error of an item, to be raised in its turn."""

    error: BaseException


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
        self._sent: dict[Arrivals, _Item] = {}  # in the order of the items
        self._finished: dict[int, Any] = {}  # by position, the results and failures that have not had their turn
        self._failed = False
        self._again: deque[tuple[int, Any]] = deque()
        self._losses: Counter[int] = Counter()

    def results(self, turn_s: float | None) -> Generator[list[Any]]:
        """Yield results; raise the error of an item in its turn."""
        try:
            with Bar(f"Mapping {self._method.name}", self._total) as bar:
                while self._fill():
                    if not (ready := self._take_ready()):
                        self._wait_for_news(turn_s)
                        bar.show(self._taken - len(self._sent) - len(self._again))
                        yield []
                        ready = self._take_ready()
                    for value in ready:
                        if isinstance(value, _Failure):
                            raise value.error
                        yield [value]
        finally:
            self._close()

    def _take_ready(self) -> list[Any]:
        """Return the results and failures whose turn has come."""
        if not self._options.ordered:
            finished, self._finished = self._finished, {}
            return list(finished.values())
        ready = []
        while self._next in self._finished:
            ready.append(self._finished.pop(self._next))
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
        return bool(self._sent or self._finished)

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
        item, recipients = _Item(position, value, rank), Recipients([rank], [rank], None)
        try:
            call = prepare_call(self._core, self._method, recipients, [value], {}, self._options.each)
            self._sent[Arrivals(self._core, self._core.send(call), set())] = item
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

    def _wait_for_news(self, turn_s: float | None) -> None:
        """Wait until an item has finished, and note all that have finished by then."""
        self._core.connection.check()  # a wait would start another Ray
        waiting, oldest = {arrivals.sent.replies[0]: arrivals for arrivals in self._sent}, next(iter(self._sent))
        try:
            news = wait_for_news(list(waiting), oldest.sent.call.deadline, oldest.check_late, turn_s)
        except CallTimeoutError as error:
            self._fail(self._release(oldest), error)
            return
        for arrivals in sorted(map(waiting.__getitem__, news), key=lambda arrivals: self._sent[arrivals].position):
            try:
                value = arrivals.result(NEVER, arrivals.check_late)
            except RayError as error:  # every exception of a worker
                self._fail(self._release(arrivals), arrivals.failure(error, NEVER))
            else:
                self._finished[self._release(arrivals).position] = value

    def _release(self, arrivals: Arrivals) -> _Item:
        item = self._sent.pop(arrivals)
        if item.rank in self._loads:
            self._loads[item.rank] -= 1
        return item

    def _fail(self, item: _Item, error: BaseException) -> None:
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
        self._finished[item.position] = error if self._options.return_exceptions else _Failure(error)

    def _close(self) -> None:
        """Cancel the unfinished items."""
        sent, self._sent = self._sent, {}
        if self._core.connection.is_open:
            unfinished = [arrivals.sent.replies[0] for arrivals in sent]
            cancel(self._core, unfinished, self._method.name, force=False)

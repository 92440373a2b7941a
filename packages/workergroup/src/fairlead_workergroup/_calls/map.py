# SPDX-License-Identifier: Apache-2.0
"""The distribution of many items over few workers, one worker for each item."""

import logging
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from .._membership.core import Core
from .._observe.display import Bar
from .._start.worker_class import Method
from .._transport.arguments import Arguments
from .._transport.replies import REPORT_EVERY_S
from .._transport.wait import ResultStream, Waiter
from .._world import NEVER, Deadline
from ..exceptions import CallTimeoutError, StaleGroupError, WorkerFailureError
from .call import Call, cancel, dispatch
from .plan import CallOptions, Recipients

logger = logging.getLogger(__name__)

Strategy = Literal["round_robin", "least_loaded"] | Callable[[Sequence[int]], int]

STRATEGIES = ("round_robin", "least_loaded")
# The number of items that are sent ahead of the oldest unfinished one, in multiples of those that run at a time.
WINDOW = 8
# How often a wait looks whether Ray is still there.
CONNECTED_EVERY_S = 1.0
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
    deadline: Deadline = NEVER


class _Failure(NamedTuple):
    """The error of an item, to be raised in its turn."""

    error: Exception


# The positions of items with their results or errors.
_Finished = list[tuple[int, Any]]


def map_items(
    core: Core,
    owner: object,
    ranks: Sequence[int],
    method: str | Callable[..., Any],
    items: Iterable[Any],
    options: MapOptions,
) -> ResultStream[Any]:
    """Check the method, then return the results as they arrive; see `RayWorkerGroup.map`."""
    called = core.described.worker_class.method(method)
    if called.result == "items":
        raise TypeError(
            f"{called.name!r} is a generator method; map needs one result for each item: call it and stream"
        )
    called.check(1, ())
    core.check_retries(options.each.retries)
    stored = Arguments()  # a large function is stored once, not with each item
    called = replace(called, function=stored.prepare(called.function))
    total = len(items) if isinstance(items, Sized) else None
    balancer = _Balancer(core, owner, ranks, called, options)
    order = _Order(WINDOW * options.max_in_flight * len(ranks) if options.ordered else math.inf)
    return ResultStream(lambda on: _results(balancer, iter(items), total, order, on))


class _Order:
    """Puts results in order. A slow item delays the items behind it, of which only `window` wait here."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._position = 0
        self._kept: dict[int, Any] = {}

    @property
    def until(self) -> float:
        """The first position that must not be sent yet."""
        return self._position + self._window

    def take_ready(self, finished: _Finished) -> Iterator[Any]:
        """Yield the results whose turn has come, now that these items have finished; raise an item's error."""
        ready = [value for _, value in finished]
        if self._window != math.inf:
            self._kept.update(finished)
            ready = []
            while self._position in self._kept:
                ready.append(self._kept.pop(self._position))
                self._position += 1
        for value in ready:
            if isinstance(value, _Failure):
                raise value.error
            yield value


async def _results(
    balancer: "_Balancer", items: Iterator[Any], total: int | None, order: _Order, on: Waiter
) -> AsyncGenerator[Any]:
    done = 0
    try:
        with Bar(f"Mapping {balancer.method.name}", total) as bar:
            while balancer.fill(items, until=order.until, may_wait=not on.blocks):
                finished = await balancer.wait_for_finished(on)
                done += len(finished)
                bar.show(done)
                for value in order.take_ready(finished):
                    yield value
    finally:
        await on.apart(balancer.close)


class _Balancer:
    """Sends items to workers, and owns the record of the items that each worker has."""

    def __init__(self, core: Core, owner: object, ranks: Sequence[int], method: Method, options: MapOptions) -> None:
        self.method = method
        self._core = core
        self._owner = owner
        self._options = options
        # The number of items that each worker has, by ascending rank, without the workers that were lost.
        self._loads = dict.fromkeys(ranks, 0)
        self._members = core.now
        self._turn = 0
        self._position = 0
        self._sent: dict[Call, _Item] = {}  # in the order of the items
        self._unsent: _Finished = []
        self._failed = False
        self._again: deque[tuple[int, Any]] = deque()
        self._losses: Counter[int] = Counter()

    def fill(self, items: Iterator[Any], *, until: float, may_wait: bool) -> bool:
        """Send items before position `until` while a worker has room; return whether an item is unfinished."""
        self._drop_departed()
        while (self._again or (self._position < until and not self._failed)) and (rank := self._choose()) is not None:
            if self._again:
                position, value = self._again.popleft()
            else:
                try:
                    value = next(items)
                except StopIteration:
                    break
                position, self._position = self._position, self._position + 1
            self._send(_Item(position, value, rank), may_wait=may_wait)
        return bool(self._sent or self._unsent)

    def _drop_departed(self) -> None:
        """Send no more items to ranks that a resize has removed; items that they have are finished there."""
        now = self._core.now
        if now is self._members or now.has(list(self._loads)):
            self._members = now
            return
        self._loads = {rank: items for rank, items in self._loads.items() if now.has([rank])}
        if not self._loads:
            gone = now.resizes[-1]
            raise StaleGroupError(
                f"The group was resized {gone}, and all workers of this map have left it.", gone.epoch
            )

    def _choose(self) -> int | None:
        """Return the rank whose turn it is; None if it has no room now."""
        ranks, strategy = list(self._loads), self._options.strategy
        if strategy == "round_robin":
            rank = ranks[self._turn % len(ranks)]
        elif strategy == "least_loaded":
            rank = min(ranks, key=self._loads.__getitem__)
        else:
            at = strategy(tuple(self._loads.values()))
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(ranks):
                raise ValueError(
                    f"the load balancing strategy returned {at!r}; it must return which of {len(ranks)} workers gets "
                    "the next item"
                )
            rank = ranks[at]
        return rank if self._loads[rank] < self._options.max_in_flight else None

    def _send(self, item: _Item, *, may_wait: bool) -> None:
        recipients = Recipients([item.rank], [item.rank], None)
        args, each = [item.value], self._options.each
        timeout_s = self._core.call_timeout_s if each.timeout is None else each.timeout
        item = item._replace(deadline=Deadline.after(timeout_s))
        try:
            call = dispatch(self._core, self._owner, self.method, recipients, args, {}, each, blocks=not may_wait)
        except StaleGroupError:  # the worker has left since it was chosen
            self._again.appendleft((item.position, item.value))
            self._drop_departed()
            return
        except WorkerFailureError as error:
            self._unsent += self._handle_loss(item, error)
            return
        self._turn += 1
        self._loads[item.rank] += 1
        self._sent[call] = item

    async def wait_for_finished(self, on: Waiter) -> _Finished:
        """Wait until an item has finished; return all that have finished by then."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            return unsent
        oldest = next(iter(self._sent))
        until = self._deadline_of(oldest)
        report = Deadline.after(REPORT_EVERY_S)
        arrived: list[Call] = []
        while not arrived and not until.passed:
            self._core.connection.check()  # a Ray that has been shut down answers nothing
            arrived = await on.finished(self._sent, until.left(at_most=CONNECTED_EVERY_S) or 0.0)
            if not arrived and report.passed:
                report = Deadline.after(REPORT_EVERY_S)
                await on.apart(self._report, oldest)
        finished: _Finished = []
        # Also when others are done: an item that hangs must be noticed while the others continue.
        if until.passed and oldest not in arrived:
            arrived.append(oldest)
        for call in sorted(arrived, key=lambda call: self._sent[call].position):
            finished += await self.settle(call, on)
        return finished

    def _deadline_of(self, call: Call) -> Deadline:
        """Return the deadline of an item, which counts from its call."""
        return self._sent[call].deadline

    def _report(self, call: Call) -> None:
        """Log what the worker of an item is doing."""
        for outcome in call.outcomes(timeout=0.0):
            if isinstance(outcome.error, CallTimeoutError):
                logger.warning("%s", outcome.error)

    async def settle(self, call: Call, on: Waiter) -> _Finished:
        """Return the position and the result of an item that has finished; nothing if it has to be repeated."""
        try:
            result = call.result() if on.blocks else await call
        except Exception as error:  # noqa: BLE001  any exception of the worker
            return self._fail(call, error)
        return [(self._release(call).position, result)]

    def _release(self, call: Call) -> _Item:
        item = self._sent.pop(call)
        if item.rank in self._loads:
            self._loads[item.rank] -= 1
        return item

    def _fail(self, call: Call, error: Exception) -> _Finished:
        """Return the position and the error of an item; nothing if it is repeated. After a `_Failure`, send no more."""
        item = self._release(call)
        if isinstance(error, WorkerFailureError):
            return self._handle_loss(item, error)
        error.add_note(f"item {item.position} of map({self.method.name!r})")
        if not self._options.return_exceptions:
            self._failed = True
            return [(item.position, _Failure(error))]
        if isinstance(error, CallTimeoutError) and error.reason:  # it has not been sent
            call.cancel()
        return [(item.position, error)]

    def _handle_loss(self, item: _Item, error: WorkerFailureError) -> _Finished:
        """Move the item of a lost worker to the others, if there are any and the options allow it."""
        self._loads.pop(item.rank, None)
        self._losses[item.position] += 1
        losses = self._losses[item.position]
        if self._options.move_items and self._loads and losses < MOST_LOSSES:
            self._again.append((item.position, item.value))
            return []
        position = item.position
        if raises := not self._options.return_exceptions or not self._loads:
            # Its later items were lost with it, and may be known first.
            position = min([position, *(one.position for one in self._sent.values() if one.rank == item.rank)])
            losses = max(1, self._losses[position])
        error.add_note(f"item {position} of map({self.method.name!r}); workers lost with it: {losses}")
        if raises:
            raise error
        return [(item.position, error)]

    def close(self) -> None:
        """Cancel the unfinished items."""
        sent, self._sent = self._sent, {}
        if not self._core.connected:
            return
        waiting: dict[int, list[Any]] = {}
        for call, item in sent.items():
            if call.sending is not None and not call.done():
                call.cancel()  # it may not be sent yet
            elif call.sending is None:
                waiting.setdefault(item.rank, []).append(call.futures[0])
        while waiting:  # an item of each worker at a time: one request a node
            cancel(self._core, {rank: refs.pop() for rank, refs in waiting.items()}, self.method.name, force=False)
            waiting = {rank: refs for rank, refs in waiting.items() if refs}

# SPDX-License-Identifier: Apache-2.0
"""Many items over few workers: each goes to one of them, whoever is to have it next."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ray
from ray import ObjectRef

from ._arguments import Arguments
from ._bar import Bar
from ._call import Call
from ._planning import Column
from ._results import REPORT_EVERY_S
from .exceptions import WorkerFailureError

if TYPE_CHECKING:
    from ._group import RayWorkerGroup
    from ._worker_class import Method

__all__ = ["Strategy", "check_strategy", "mapped"]

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
    call: Call


def mapped(
    group: RayWorkerGroup,
    ranks: Sequence[int],
    method: str | Callable[..., Any],
    items: Iterable[Any],
    *,
    max_in_flight: int,
    ordered: bool,
    strategy: Strategy,
    timeout_s: float | None,
) -> Iterator[Any]:
    """Check everything, then return the iterator of results; see `RayWorkerGroup.map`."""
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight must be a positive number of items, got {max_in_flight!r}")
    found = group._class.method(method)
    if found.result == "items":
        raise TypeError(f"{found.name!r} is a generator method; map needs one result for each item: call it and stream")
    found.check([None], {})
    stored = Arguments()  # a large function is stored once, not with each item
    found = replace(found, function=stored.prepared(found.function))
    group._count(puts=stored.puts, bytes_put=stored.bytes_put)
    total = len(items) if isinstance(items, Sized) else None
    balancer = _Balancer(group, ranks, found, max_in_flight, check_strategy(strategy), timeout_s)
    return _results(balancer, iter(items), total, ordered)


def _results(balancer: _Balancer, items: Iterator[Any], total: int | None, ordered: bool) -> Iterator[Any]:
    kept: dict[int, Any] = {}
    position = done = 0
    window = WINDOW * balancer.capacity
    try:
        with Bar(f"Mapping {balancer.method}", total) as bar:
            # A slow item holds up those behind it: what is done waits here, and not too much of it.
            while balancer.fill(items, until=position + window if ordered else math.inf):
                for at, value in balancer.finished():
                    done += 1
                    bar.show(done)
                    if not ordered:
                        yield value
                    else:
                        kept[at] = value
                while position in kept:
                    yield kept.pop(position)
                    position += 1
    finally:
        balancer.close()


class _Balancer:
    """Which worker has which items now."""

    def __init__(
        self,
        group: RayWorkerGroup,
        ranks: Sequence[int],
        method: Method,
        max_in_flight: int,
        strategy: Strategy,
        timeout_s: float | None,
    ) -> None:
        self.method = method.name
        self._called = method
        self._group = group
        self._max = max_in_flight
        self._strategy = strategy
        self._timeout_s = timeout_s
        # Items that each worker has now, by rank; a worker that was lost is not in it.
        self._loads = dict.fromkeys(ranks, 0)
        self._turn = 0
        self._position = 0
        self._sent: dict[ObjectRef, _Sent] = {}
        self._again: deque[tuple[int, Any]] = deque()
        self._losses: Counter[int] = Counter()

    @property
    def capacity(self) -> int:
        """How many items can be under way."""
        return self._max * len(self._loads)

    def fill(self, items: Iterator[Any], *, until: float) -> bool:
        """Hand out items before `until` while the worker whose turn it is has room; whether anything is under way."""
        while (self._again or self._position < until) and (rank := self._next()) is not None:
            if self._again:
                position, item = self._again.popleft()
            else:
                try:
                    item = next(items)
                except StopIteration:
                    break
                position, self._position = self._position, self._position + 1
            self._send(position, item, rank)
        return bool(self._sent)

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

    def _send(self, position: int, item: Any, rank: int) -> None:
        try:
            call = self._group._dispatch(
                self._called, [rank], [Column([item])], {}, returned=[rank], timeout_s=self._timeout_s, single=True
            )
        except WorkerFailureError as error:
            self._lost(position, item, rank, error)
            return
        self._turn += 1
        self._loads[rank] += 1
        self._sent[call.futures[0]] = _Sent(position, item, rank, call)

    def finished(self) -> list[tuple[int, Any]]:
        """Wait until an item is done; the positions and results of all that are by then."""
        refs = list(self._sent)
        oldest = self._sent[refs[0]].call
        self._group._check_connected()
        done, _ = ray.wait(refs, num_returns=1, timeout=oldest._deadline.left(at_most=REPORT_EVERY_S))
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        # Also when others are done: an item that hangs must not go unnoticed for as long as they are.
        if not done or (oldest._deadline.passed and refs[0] not in {*done, *ready}):
            oldest._on_slow(oldest._deadline)
        values = []
        finished = [self._sent.pop(ref) for ref in dict.fromkeys([*done, *ready])]
        for sent in sorted(finished, key=lambda sent: sent.position):
            if sent.rank in self._loads:
                self._loads[sent.rank] -= 1
            try:
                values.append((sent.position, sent.call.result()))
            except WorkerFailureError as error:
                # A worker that was restarted with the whole group was not lost by this item, and takes part again.
                restarted = self._group._is_lost(sent.call.futures[0]) and sent.rank not in self._group._lost
                if restarted and self._group._enable_load_balancing:
                    self._again.append((sent.position, sent.item))
                else:
                    self._lost(sent.position, sent.item, sent.rank, error)
            except Exception as error:
                error.add_note(f"item {sent.position} of map({self.method!r})")
                raise
        return values

    def _lost(self, position: int, item: Any, rank: int, error: WorkerFailureError) -> None:
        """An item's worker is gone: the item goes to the others, if there are any and they may have it."""
        self._loads.pop(rank, None)
        self._losses[position] += 1
        if not self._group._enable_load_balancing or not self._loads or self._losses[position] >= MOST_LOSSES:
            error.add_note(f"item {position} of map({self.method!r}); workers lost with it: {self._losses[position]}")
            raise error
        self._again.append((position, item))

    def close(self) -> None:
        """Nobody wants the rest."""
        if not self._group._held.connected:
            return
        waiting: dict[int, list[ObjectRef]] = {}
        for ref, sent in self._sent.items():
            waiting.setdefault(sent.rank, []).append(ref)
        self._sent.clear()
        while waiting:  # an item of every worker at a time: one request a node
            self._group._cancel({rank: refs.pop() for rank, refs in waiting.items()}, self.method, force=False)
            waiting = {rank: refs for rank, refs in waiting.items() if refs}

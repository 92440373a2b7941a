# SPDX-License-Identifier: Apache-2.0
"""One call of a group: who answers, when it is fetched, and what became of it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray import ObjectRef, ObjectRefGenerator

from ._arguments import Gathered
from ._awaiting import as_completed, awaited
from ._deadline import Deadline, check_timeout
from ._marks import PassedOn
from ._outcome import CallStatistics, Outcome
from ._results import REPORT_EVERY_S, MultiWorkerFuture, not_here_yet, positions, what_failed
from ._submit import Request
from .exceptions import CallCancelledError, CallTimeoutError, WorkerFailureError

if TYPE_CHECKING:
    from ._group import RayWorkerGroup
    from ._worker_class import Method

__all__ = ["Call", "Repeats"]

logger = logging.getLogger(__name__)


@dataclass
class Repeats:
    """What is needed to repeat a call on workers that were lost.

    Attributes:
        left: how often it still may be.
        requests: what each called worker was asked.
    """

    left: int
    requests: Sequence[Request]


class Call(MultiWorkerFuture, PassedOn):
    """A call under way. `RayWorkerGroup.call` makes it; it is also a value that can be passed to another call.

    `result()` waits; `outcomes()` tells about every worker; iterating, also with `async for`, gives an `Outcome` as
    each worker finishes; `await` gives what `result()` would. None of them consumes anything: what timed out can be
    asked for again. As an argument of another call it stands for its answers, which go from worker to worker: a `Call`
    made with `collect=()` for the one answer, `Shard(call, axis)` and `PerWorker(call)` for a piece each, and any
    other for the list of them.
    """

    def __init__(
        self,
        futures: list[Any],
        called: list[int],
        returned: list[int],
        *,
        group: RayWorkerGroup,
        method: Method,
        began: float,
        timeout_s: float | None = None,
        single: bool = False,
        discard: bool = False,
        puts: int = 0,
        bytes_put: int = 0,
        repeats: Repeats | None = None,
    ) -> None:
        super().__init__(futures, returned, called)
        self._repeats = repeats
        self._group = group
        self._ranks = called
        self._method = method
        self._began = began
        self._deadline = Deadline(None if timeout_s is None else began + timeout_s)
        self._single = single
        self._discard = discard
        self._stored = (puts, bytes_put)
        self._submit_s = time.monotonic() - began
        self._items: dict[int, list[ObjectRef]] = {}
        self._counted: set[int] = set()
        self._fetched = (0, 0)
        self._cancelled: tuple[int, ...] = ()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        done = len(self.futures) - len(self._pending())
        state = "cancelled" if self._cancelled else f"{done} of {len(self.futures)} workers done"
        return f"Call({self._method.name!r}, {state}, {len(self.refs)} answer)"

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the answers, in the order of `result()`; of a generator method, its generators."""
        return [self.futures[at] for at in self._positions[0]]

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all workers called and fetch the answers, and nothing else.

        Args:
            timeout: seconds to wait for the workers from now; None: until the deadline the call was made with, if
                any. Asking again later goes on waiting.

        Returns:
            A list of answers, by rank or row-major over the collected axes; with `collect=()` the one answer; with
            `discard=True` None. A generator method's answer is the list of its items.

        Raises:
            CallTimeoutError: some workers have not finished by then.
            WorkerFailureError: a worker was lost. The first failure ends the wait.
            CallCancelledError: it was cancelled before all workers had finished.
            Exception: a worker's own exception, with its type and a note for each failing rank.
        """
        deadline = self._until(timeout)
        while True:
            try:
                return self._shaped(self._collected(deadline))
            except WorkerFailureError as error:
                if not self._repeated(error):
                    raise

    def _collected(self, deadline: Deadline) -> list[Any]:
        self._check_cancelled()
        wanted, others = self._positions
        if self._streams:
            self._get([*self._completions.values()], deadline)
            values = [self._values_of_items(at) for at in wanted]
        else:
            refs = self.refs
            values = self._get([*refs, *(self.futures[at] for at in others)], deadline)[: len(refs)]
            self._count_once(wanted, refs)
        return values

    def _repeated(self, error: WorkerFailureError) -> bool:
        """Repeat what was lost, if it may be: on the workers that were, or on all that were started again."""
        if self._repeats is None or not self._repeats.left:
            return False
        self._repeats.left -= 1
        lost = [at for at, ref in self._completions.items() if self._group._is_lost(ref)]
        if self._group._restart_scope == "group":
            lost = list(range(len(self.futures)))
        asked = [self._repeats.requests[at] for at in lost]
        again = self._group._send_again([self._ranks[at] for at in lost], asked)
        for at, future in zip(lost, again, strict=True):
            self.futures[at] = future
            self._items.pop(at, None)
        self.__dict__.pop("_completions", None)
        return True

    def _shaped(self, values: list[Any]) -> Any:
        if self._discard:
            return None
        return values[0] if self._single else values

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """What every worker made of the call; never raises what a worker raised.

        Args:
            timeout: as of `result`. The error of a worker that has not finished is a `CallTimeoutError`.

        Returns:
            The outcomes of the workers that answer, in the order of `result()`, then those of others that failed.
        """
        self.wait(timeout)
        pending = set(self._pending())
        wanted, others = self._positions
        of_others = [self._outcome(at, pending) for at in others]
        return [*(self._outcome(at, pending) for at in wanted), *(one for one in of_others if one.error is not None)]

    def done(self) -> bool:
        """Whether all workers called have finished, or failed."""
        return not self._pending()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all workers called have finished, or failed; whether they have by `timeout` or the deadline."""
        deadline = self._until(timeout)
        while pending := self._pending():
            left = deadline.left(at_most=REPORT_EVERY_S)
            refs = [self._completions[at] for at in pending]
            ray.wait(refs, num_returns=len(refs), timeout=left, fetch_local=False)
            if deadline.passed:
                return self.done()
            self._report_slow()
        return True

    def __iter__(self) -> Iterator[Outcome]:
        """Outcomes as workers finish: of those that answer, and of others that failed.

        Raises:
            CallTimeoutError: the deadline the call was made with has passed.
        """
        answering = set(self._positions[0])
        pending = dict.fromkeys(range(len(self.futures)))
        while pending:
            refs = {self._completions[at]: at for at in pending}
            done, _ = ray.wait(
                list(refs), num_returns=1, timeout=self._deadline.left(at_most=REPORT_EVERY_S), fetch_local=False
            )
            if not done:
                self._on_slow(self._deadline)
            more, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
            for ref in dict.fromkeys([*done, *more]):
                del pending[refs[ref]]
                outcome = self._outcome(refs[ref], ())
                if refs[ref] in answering or outcome.error is not None:
                    yield outcome

    def stream(self, timeout: float | None = None) -> Iterator[Outcome]:
        """The items of a generator method as they arrive, those of all workers interleaved.

        Each item is handed out once: nothing keeps it in the object store afterwards.

        Args:
            timeout: seconds to wait for the next item; None: until the deadline the call was made with, if any.

        Raises:
            TypeError: the method is no generator.
            CallTimeoutError: no item came in time; streaming again goes on where this ended.
            WorkerFailureError, Exception: as of `result`.
        """
        check_timeout("timeout", timeout)
        if not self._streams:
            raise TypeError(f"{self._method.name!r} is no generator method; its result comes in one piece")
        return self._arriving(timeout)

    def _arriving(self, timeout: float | None) -> Iterator[Outcome]:
        self._check_cancelled()
        ranks = self._ranks
        for at in self._positions[0]:
            while kept := self._items.get(at):
                yield Outcome(ranks[at], self._coords(at), self._get([kept.pop(0)], self._deadline)[0])
        open_streams = {self.futures[at]: at for at in self._positions[0]}
        deadline = self._until(timeout)
        while open_streams:
            ready, _ = ray.wait(list(open_streams), num_returns=1, timeout=deadline.left(at_most=REPORT_EVERY_S))
            if not ready:
                self._on_slow(deadline)
            for stream in ready:
                at = open_streams[stream]
                ref = next(stream, None)
                if ref is None:
                    del open_streams[stream]
                    continue
                (value,) = self._get([ref], deadline)
                self._count([ref])
                yield Outcome(ranks[at], self._coords(at), value)
                del ref, value
        # A stream that was cut off by a worker's end just stops; its completion tells.
        self._get([*self._completions.values()], self._until(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        return awaited(self).__await__()

    def __aiter__(self) -> AsyncIterator[Outcome]:
        return as_completed(self)

    def cancel(self, force: bool = False) -> list[int]:
        """Give the call up: what is queued is dropped, async methods that overlap with others are cancelled.

        A method that is running otherwise cannot be interrupted: it runs on and its value is dropped.

        Args:
            force: end the workers that are running it (kind "cancelled"); the group has lost them then.

        Returns:
            The ranks that are still running it; with `force`, those that were, and have been ended.
        """
        pending = self._pending()
        if not pending:
            return []
        ranks = self._ranks
        self._cancelled = tuple(ranks[at] for at in pending)
        return self._group._cancel({ranks[at]: self.futures[at] for at in pending}, self._method.name, force=force)

    def statistics(self) -> CallStatistics:
        """What it has cost so far."""
        puts, bytes_put = self._stored
        return CallStatistics(len(self.futures), puts, bytes_put, *self._fetched, self._submit_s)

    def get_results(
        self, worker_group: RayWorkerGroup | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """What `result` fetches, as a list however few answer; a generator's items stand at its place, flat.

        Args:
            worker_group: not needed: a call knows its group.
            return_generators_as_proxies: leave generators as they are: each an iterator of ObjectRefs.
        """
        if self._streams and return_generators_as_proxies:
            self._check_cancelled()
            return self.refs
        values = self.result()
        values = [] if self._discard else [values] if self._single else values
        return [item for items in values for item in items] if self._streams else values

    def as_argument(self) -> ObjectRef | Gathered:
        """What travels to another call's workers in its place."""
        self._check_passable()
        return self.refs[0] if self._single else Gathered(tuple(self.refs))

    def as_pieces(self) -> list[ObjectRef]:
        """What travels to another call's workers in place of each answer."""
        self._check_passable()
        if self._single:
            raise ValueError(f"the call of {self._method.name!r} has one answer (collect=()): pass it as it is")
        return self.refs

    def _check_passable(self) -> None:
        if self._discard:
            raise ValueError(f"the call of {self._method.name!r} has no answer to pass on (discard=True)")
        if self._streams:
            raise TypeError(f"{self._method.name!r} is a generator method: stream or collect its items, pass these on")

    @cached_property
    def _positions(self) -> tuple[list[int], list[int]]:
        return positions(self)

    @cached_property
    def _answering(self) -> frozenset[int]:
        return frozenset(self._positions[0])

    @property
    def _streams(self) -> bool:
        return self._method.result == "items"

    @cached_property
    def _completions(self) -> dict[int, ObjectRef]:
        """What is ready when a worker has finished: the value itself, or a generator's end."""
        return {
            at: future.completed() if isinstance(future, ObjectRefGenerator) else future
            for at, future in enumerate(self.futures)
        }

    def _pending(self) -> list[int]:
        at_of = {ref: at for at, ref in self._completions.items()}
        _, pending = ray.wait(list(at_of), num_returns=len(at_of), timeout=0, fetch_local=False)
        return [at_of[ref] for ref in pending]

    def _coords(self, at: int) -> Mapping[str, int]:
        return self._group._coords[self._ranks[at]]

    def _until(self, timeout: float | None) -> Deadline:
        return self._deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise CallCancelledError(self._method.name, self._cancelled)

    def _get(self, refs: Sequence[ObjectRef], deadline: Deadline) -> list[Any]:
        """The values, once the workers have finished; moving them to the driver is not counted against the deadline."""
        while True:
            try:
                values: list[Any] = ray.get(list(refs), timeout=deadline.left(at_most=REPORT_EVERY_S))
                return values
            except Exception as error:  # noqa: BLE001  whatever a worker raised
                if not not_here_yet(error):
                    raise what_failed([*self._completions.values()], error, self._group)  # noqa: B904  chained there
            if not self._pending():
                deadline = Deadline()
            else:
                self._on_slow(deadline)

    def _on_slow(self, deadline: Deadline) -> None:
        if deadline.passed:
            self._raise_late()
        self._report_slow()

    def _raise_late(self) -> NoReturn:
        raise self._late(self._pending())

    def _late(self, pending: Sequence[int]) -> CallTimeoutError:
        late = self._group._late_workers([self._ranks[at] for at in pending])
        return CallTimeoutError(self._method.name, time.monotonic() - self._began, len(self.futures), late)

    def _report_slow(self) -> None:
        if pending := self._pending():
            logger.warning("%s", self._late(pending))

    def _outcome(self, at: int, pending: Sequence[int] | set[int]) -> Outcome:
        if at in pending:
            rank = self._ranks[at]
            error = CallCancelledError(self._method.name, (rank,)) if self._cancelled else self._late([at])
            return Outcome(rank, self._coords(at), error=error)
        try:
            if self._streams and at in self._answering:
                value: Any = self._values_of_items(at)
            else:
                value = ray.get(self.futures[at])
                if at in self._answering:
                    self._count_once([at], [self.futures[at]])
        except Exception as error:  # noqa: BLE001  whatever the worker raised
            return self._failed(at, error)
        return Outcome(self._ranks[at], self._coords(at), value)

    def _failed(self, at: int, error: BaseException) -> Outcome:
        own = [self._completions[at], *self._items.get(at, ())[-1:]]
        return Outcome(self._ranks[at], self._coords(at), error=what_failed(own, error, self._group))

    def _values_of_items(self, at: int) -> list[Any]:
        """The items of a generator that has ended."""
        items = self._items.setdefault(at, [])
        items.extend(self.futures[at])
        try:
            ray.get(self._completions[at])
            values: list[Any] = ray.get(items)
        except Exception as error:  # noqa: BLE001  whatever the worker raised
            raise what_failed([self._completions[at], *items[-1:]], error, self._group)  # noqa: B904  chained there
        self._count_once([at], items)
        return values

    def _count_once(self, answers: Sequence[int], refs: Sequence[ObjectRef]) -> None:
        """Count answers as fetched, unless they have been fetched before."""
        if not self._counted.issuperset(answers):
            self._counted.update(answers)
            self._count(refs)

    def _count(self, refs: Sequence[ObjectRef]) -> None:
        self._fetched = (self._fetched[0] + len(refs), self._fetched[1] + self._group._count_fetched(refs))

# SPDX-License-Identifier: Apache-2.0
"""What a call has under way: whom it waits for, what has come, what went wrong, what is done again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray import ObjectRef, ObjectRefGenerator

from .._deadline import Deadline, check_timeout
from ..exceptions import CallCancelledError, CallTimeoutError, WorkerGroupError
from .errors import retrieve_late, short_traceback
from .outcome import Outcome
from .requests import Request
from .results import REPORT_EVERY_S, MultiWorkerFuture, drain, not_here_yet, positions, what_failed
from .sources import Source, describe_missing

if TYPE_CHECKING:
    from .._group import RayWorkerGroup
    from .._start.worker_class import Method

__all__ = ["Repeats", "Underway"]

logger = logging.getLogger(__name__)


@dataclass
class Repeats:
    """What is needed to repeat a call on workers that were lost.

    Attributes:
        left: how often it still may be.
        requests: what each called worker was asked.
        made: how often it has been.
        lock: held while it is: others that wait for the same call are not to do it again.
    """

    left: int
    requests: Sequence[Request]
    made: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Underway(MultiWorkerFuture):
    """The part of a `Call` that its users do not see."""

    def __init__(
        self,
        futures: list[Any] | Future[list[Any]],
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
        sources: Sequence[Source] = (),
    ) -> None:
        # Set while a call waits to be sent, and afterwards; see `futures`.
        self._sending: Future[list[Any]] | None = None
        # Copies: a plan is kept for later calls, and a user may change the lists of this one.
        if isinstance(futures, list):
            super().__init__(futures, list(returned), list(called))
        else:
            self._sending = futures
            self.return_from_workers: list[int] | None = list(returned)
            self.called_workers: list[int] | None = list(called)
        self._repeats = repeats
        self._group = group
        self._ranks = called
        self._method = method
        self._began = began
        self._deadline = Deadline(None if timeout_s is None else began + timeout_s)
        self._single = single
        self._discard = discard
        self._stored = (puts, bytes_put)
        self._sources = sources
        self._submit_s = time.monotonic() - began
        self._items: dict[int, list[ObjectRef]] = {}
        self._handed_out: Counter[int] = Counter()
        self._counted: set[int] = set()
        self._fetched = (0, 0)
        self._cancelled: tuple[int, ...] = ()
        # The attempt whose late errors are being retrieved.
        self._looked_for_late = -1

    @cached_property
    def futures(self) -> list[Any]:  # type: ignore[override]
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        self._until_sent(self._deadline)
        assert self._sending is not None  # otherwise __init__ has set the list, and this function is not used
        return self._sending.result()

    @property
    def _unsent(self) -> bool:
        """Whether the call waits to be sent."""
        return self._sending is not None and not self._sending.done()

    @property
    def _failed_to_send(self) -> bool:
        """Whether the call was never sent: it was cancelled first, or its workers could not be restarted."""
        sending = self._sending
        return sending is not None and sending.done() and (sending.cancelled() or sending.exception() is not None)

    def _until_sent(self, deadline: Deadline) -> None:
        """Wait until the call has been sent.

        Raises:
            CallCancelledError: it was cancelled before it was sent.
            CallTimeoutError: the deadline passed before it was sent.
            WorkerFailureError, WorkerGroupError: it could not be sent.
        """
        if self._sending is None:
            return
        try:
            error = self._sending.exception(deadline.left())
        except CancelledError:
            raise CallCancelledError(self._method.name, self._cancelled) from None
        except TimeoutError:
            raise self._group._not_sent(self._method.name, self._ranks, self._began) from None
        if error is not None:
            raise error.with_traceback(None)

    def _withdrawn(self, *, force: bool) -> bool:
        """Give up a call that has not been sent; return False, and do nothing, if it has been."""
        sending = self._sending
        if sending is None or not (self._unsent or self._failed_to_send):
            return False
        if self._unsent:
            self._cancelled = tuple(self._ranks)
        if not sending.cancel():  # it is being sent now

            def drop(sent: Future[list[Any]]) -> None:
                if sent.exception() is None:
                    retrieve_late(sent.result(), self)
                    futures = dict(zip(self._ranks, sent.result(), strict=True))
                    self._group._cancel(futures, self._method.name, force=force)

            sending.add_done_callback(drop)
        return True

    def _collected(self, deadline: Deadline) -> list[Any]:
        self._check_open()
        self._until_sent(deadline)
        wanted, others = self._positions
        if self._streams:
            self._drain(deadline)
            values = [self._values_of_items(at) for at in wanted]
        else:
            refs = [self.futures[at] for at in wanted]
            values = self._get([*refs, *(self.futures[at] for at in others)], deadline)[: len(refs)]
            self._count_once(wanted, refs)
        return values

    @property
    def _attempt(self) -> int:
        """How often it has been repeated."""
        return 0 if self._repeats is None else self._repeats.made

    def _repeated(self, attempt: int, deadline: Deadline | None = None) -> bool:
        """Repeat what was lost in an attempt, unless another thread has; whether there is another attempt.

        On the workers that were lost, or on all that were started again.
        """
        self._check_open()
        self._until_sent(Deadline.after(0.0))
        if self._repeats is None:
            return False
        limit = deadline or self._deadline
        if not self._repeats.lock.acquire(timeout=limit.left(at_most=threading.TIMEOUT_MAX) or 0.0):
            self._raise_late()
        try:
            if self._repeats.made != attempt:
                return True
            if not self._repeats.left:
                return False
            lost = [at for at, ref in self._completions.items() if self._group._is_lost(ref)]
            if not lost:  # it is a worker's own error, of a group of its own
                return False
            if self._group._restart_scope == "group":
                lost = list(range(len(self.futures)))
            asked = [self._repeats.requests[at] for at in lost]
            again = self._group._send(self._method.name, [self._ranks[at] for at in lost], asked, self._began, limit)
            self._repeats.left -= 1
            for at, future in zip(lost, again, strict=True):
                self.futures[at] = future
                self._items.pop(at, None)
                self._handed_out.pop(at, None)
            self.__dict__.pop("_completions", None)
            self._repeats.made += 1
        finally:
            self._repeats.lock.release()
        return True

    def _shaped(self, values: list[Any]) -> Any:
        if self._discard:
            return None
        return values[0] if self._single else values

    def _drain(self, deadline: Deadline) -> None:
        """Take the items of all generators until each has ended; the first failure ends the wait."""
        streams = {self.futures[at]: self._items.setdefault(at, []) for at in self._positions[0]}
        singles = [self.futures[at] for at in self._positions[1]]
        try:
            drain(streams, singles, lambda futures: self._until_some_are_ready(futures, deadline))
        except CallTimeoutError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a worker raised
            raise self._failure(error)  # noqa: B904  chained there

    def _until_some_are_ready(self, futures: list[Any], deadline: Deadline, *, fetch_local: bool = False) -> list[Any]:
        while True:
            ready, _ = ray.wait(
                futures, num_returns=1, timeout=deadline.left(at_most=REPORT_EVERY_S), fetch_local=fetch_local
            )
            if ready:
                if deadline.passed and (pending := self._pending()):
                    raise self._late(pending)
                more, _ = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=fetch_local)
                return list(dict.fromkeys([*ready, *more]))
            self._on_slow(deadline)

    def _arriving(self, timeout: float | None) -> Generator[Outcome]:
        with short_traceback():
            self._check_open()
            deadline = self._until(timeout)
            self._until_sent(deadline)
            streams = {self.futures[at]: at for at in self._positions[0]}
            while streams:
                # One item of every worker that has one, then the next round: Ray prefers some workers to others.
                ready = [stream for stream, at in streams.items() if self._items.get(at)]
                for stream in ready or self._until_some_are_ready(list(streams), deadline, fetch_local=True):
                    at = streams[stream]
                    kept = self._items.setdefault(at, [])
                    if not kept and (ref := next(stream, None)) is not None:
                        kept.append(ref)
                        del ref
                    if not kept:
                        del streams[stream]
                        continue
                    # What cannot be fetched stays where it is: an error is raised again, and a timeout loses nothing.
                    (value,) = self._get(kept[:1], deadline)
                    yield self._handed(at, kept, value)
                    del value
                    deadline = self._until(timeout)  # of the next item
            # A stream that was cut off by a worker's end just stops; its completion tells.
            self._get([*self._completions.values()], self._until(timeout))

    def _handed(self, at: int, kept: list[ObjectRef], value: Any) -> Outcome:
        """Return an item of a generator, which is kept no longer."""
        self._count(kept[:1])
        self._handed_out[at] += 1
        del kept[0]
        return Outcome(self._ranks[at], self._coords(at), value)

    def _read_out(self, deadline: Deadline) -> Iterator[int]:
        """Take the items of generators with back-pressure as they come, since these do not end before.

        Ends when all of them have ended, or at the deadline.

        Yields:
            The position of each worker whose generator has ended.
        """
        if self._method.backpressure is None:
            return
        unread = {self.futures[at]: at for at in self._positions[0]}
        while unread and not deadline.passed:
            self._group._check_connected()
            first, _ = ray.wait(list(unread), num_returns=1, timeout=deadline.left(at_most=REPORT_EVERY_S))
            if not first:
                self._report_slow()
                continue
            # All of those that are ready: the first ones alone would keep the others waiting.
            ready, _ = ray.wait(list(unread), num_returns=len(unread), timeout=0)
            for stream in ready:
                ref = next(stream, None)
                if ref is not None:
                    self._items.setdefault(unread[stream], []).append(ref)
                else:
                    yield unread.pop(stream)

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
        self._group._check_connected()
        at_of = {ref: at for at, ref in self._completions.items()}
        _, pending = ray.wait(list(at_of), num_returns=len(at_of), timeout=0, fetch_local=False)
        return [at_of[ref] for ref in pending]

    def _coords(self, at: int) -> Mapping[str, int]:
        return dict(self._group._coords[self._ranks[at]])

    def _until(self, timeout: float | None) -> Deadline:
        return self._deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def _check_open(self) -> None:
        if self._cancelled:
            raise CallCancelledError(self._method.name, self._cancelled)
        self._group._check_connected()

    def _get(self, refs: Sequence[ObjectRef], deadline: Deadline) -> list[Any]:
        """The values, once the workers have finished; moving them to the driver is not counted against the deadline."""
        while True:
            try:
                values: list[Any] = ray.get(list(refs), timeout=deadline.left(at_most=REPORT_EVERY_S))
                return values
            except Exception as error:  # noqa: BLE001  whatever a worker raised
                if not not_here_yet(error):
                    raise self._failure(error)  # noqa: B904  chained there
            if not self._pending():
                deadline = Deadline()
            else:
                self._on_slow(deadline)

    def _failure(self, error: BaseException) -> BaseException:
        """The exception to raise for what Ray raised, which names all ranks that have failed by now.

        Raises:
            CallCancelledError: the call has been cancelled.
        """
        self._check_open()
        failure = what_failed(self._ends(), error, self._group)
        if self._looked_for_late != self._attempt:
            self._looked_for_late = self._attempt
            retrieve_late(self.futures, self)
        return failure

    def _ends(self) -> list[ObjectRef]:
        """The refs that say how each worker has ended."""
        # A generator that raises gives its error as its last item.
        last_items = [items[-1] for items in self._items.values() if items]
        return list(dict.fromkeys([*self._completions.values(), *last_items]))

    def _on_slow(self, deadline: Deadline) -> None:
        if deadline.passed:
            self._raise_late()
        self._report_slow()

    def _raise_late(self) -> NoReturn:
        raise self._late(self._pending())

    def _late(self, pending: Sequence[int]) -> CallTimeoutError:
        late = self._group._late_workers([self._ranks[at] for at in pending])
        waited_s = time.monotonic() - self._began
        return CallTimeoutError(
            self._method.name, waited_s, len(self.futures), late, describe_missing(self._sources) if late else ""
        )

    def _report_slow(self) -> None:
        if pending := self._pending():
            logger.warning("%s", self._late(pending))

    def _unfinished(self) -> dict[int, BaseException]:
        """Why each worker that has not finished has no outcome yet; one look at all of them."""
        pending = self._pending()
        if self._cancelled or not pending:
            return {at: CallCancelledError(self._method.name, (self._ranks[at],)) for at in pending}
        late = self._late(pending)
        return {
            at: CallTimeoutError(late.method, late.waited_s, late.called, (worker,), late.reason)
            for at, worker in zip(pending, late.late, strict=True)
        }

    def _outcome(self, at: int, unfinished: Mapping[int, BaseException]) -> Outcome:
        if at in unfinished:
            return Outcome(self._ranks[at], self._coords(at), error=unfinished[at])
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
        if self._ranks[at] in self._cancelled:
            error = CallCancelledError(self._method.name, (self._ranks[at],))
            return Outcome(self._ranks[at], self._coords(at), error=error)
        own = [self._completions[at], *self._items.get(at, ())[-1:]]
        return Outcome(self._ranks[at], self._coords(at), error=what_failed(own, error, self._group))

    def _values_of_items(self, at: int) -> list[Any]:
        """The items of a generator that has ended."""
        items = self._items.setdefault(at, [])
        items.extend(self.futures[at])
        try:
            ray.get(self._completions[at])
            values: list[Any] = ray.get(items)
        except Exception as error:  # noqa: BLE001  whatever a worker raised
            raise what_failed(self._ends(), error, self._group)  # noqa: B904  chained there
        self._check_complete(at)
        self._count_once([at], items)
        return values

    def _check_complete(self, at: int) -> None:
        """Refuse to return a part of a generator's items as if it were all."""
        if count := self._handed_out[at]:
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self._method.name!r} of rank {self._ranks[at]}, and they "
                "are not kept. Take the rest from stream() too, or make the call again and ask for its result only."
            )

    def _count_once(self, answers: Sequence[int], refs: Sequence[ObjectRef]) -> None:
        """Count answers as fetched, unless they have been fetched before."""
        if not self._counted.issuperset(answers):
            self._counted.update(answers)
            self._count(refs)

    def _count(self, refs: Sequence[ObjectRef]) -> None:
        self._fetched = (self._fetched[0] + len(refs), self._fetched[1] + self._group._count_fetched(refs))

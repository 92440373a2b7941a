# SPDX-License-Identifier: Apache-2.0
"""One call on its way: waiting for its workers, fetching, failures, repetition."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn

import ray
from ray import ObjectRef, ObjectRefGenerator

from .._arguments import Source
from .._deadline import Deadline, check_timeout
from .._members import WorkerFacts, find_worker
from .._observe.query import late_workers
from .._observe.statistics import Outcome
from .._ray_private import actor_id_of_ref, still_referenced
from .._start.worker_class import Method
from ..exceptions import CallCancelledError, CallTimeoutError, WorkerFailureError, WorkerGroupError, format_lines
from .errors import retrieve_late, short_traceback
from .results import REPORT_EVERY_S, drain, explain_failure, is_not_ready, positions
from .sender import Order, Request, Sender

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


class SendState(Enum):
    """How far the sending of a call is."""

    WAITING = "waits to be sent"
    SENT = "sent"
    # It was cancelled first, or its workers could not be restarted.
    FAILED = "could not be sent"


class Execution:
    """One call on its way: its requests, what has arrived, its failures and its repetitions.

    Args:
        sent: the futures of the requests, or a future of them while the call waits to be sent.
        order: what was sent; its `counts` have what was stored.
        returned: the ranks that answer, in the order their results are wanted.
        sender: of the group.
        owner: the group, which must live as long as somebody waits for the call.
        method: what was called.
        single: whether there is one answer, which is not in a list.
        discard: whether nobody answers.
        repeats: what is needed to repeat it; None if it must not be repeated.
        sources: the calls that have to make its arguments.

    Attributes:
        ranks: of the called workers.
        began: when the call was made.
        deadline: by when it has to be done.
        stored: how many values it has stored, and their bytes.
        fetched: how many results have been fetched, and their bytes.
        submit_s: seconds from the call to the last request.
        cancelled: the ranks that had not finished when it was cancelled; empty if it was not.
        items: references to what generators have yielded, by position.
        sending: what becomes the list of futures, of a call that had to wait; None for one that was sent at once.
    """

    def __init__(
        self,
        sent: list[Any] | Future[list[Any]],
        order: Order,
        returned: list[int],
        *,
        sender: Sender,
        owner: object,
        method: Method,
        single: bool = False,
        discard: bool = False,
        repeats: Repeats | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        self.sending: Future[list[Any]] | None = None
        if isinstance(sent, list):
            self.futures = sent
        else:
            self.sending = sent
        self.sender = sender
        self.ranks: list[int] = list(order.ranks)
        self.positions: list[int]
        self.others: list[int]
        self.positions, self.others = positions(self.ranks, returned)
        self.answering: frozenset[int] = frozenset(self.positions)
        self.method = method
        self.began: float = order.began
        self.deadline: Deadline = order.deadline
        self.single = single
        self.discard = discard
        self.stored: tuple[int, int] = (order.counts.get("puts", 0), order.counts.get("bytes_put", 0))
        self.submit_s: float = time.monotonic() - order.began
        self.items: dict[int, list[ObjectRef[Any]]] = {}
        self.fetched: tuple[int, int] = (0, 0)
        self.cancelled: tuple[int, ...] = ()
        self._owner = owner
        self._repeats = repeats
        self._sources = sources
        self._handed_out: Counter[int] = Counter()
        self._counted: set[int] = set()
        # The attempt whose late errors are being retrieved.
        self._looked_for_late = -1

    @cached_property
    def futures(self) -> list[Any]:
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        self.wait_until_sent(self.deadline)
        assert self.sending is not None  # otherwise __init__ has set the list, and this function is not used
        return self.sending.result()

    @property
    def send_state(self) -> SendState:
        """How far the sending is."""
        sending = self.sending
        if sending is None:
            return SendState.SENT
        if not sending.done():
            return SendState.WAITING
        return SendState.FAILED if sending.cancelled() or sending.exception() is not None else SendState.SENT

    def wait_until_sent(self, deadline: Deadline) -> None:
        """Wait until the call has been sent.

        Raises:
            CallCancelledError: it was cancelled before it was sent.
            CallTimeoutError: the deadline passed before it was sent.
            WorkerFailureError, WorkerGroupError: it could not be sent.
        """
        if self.sending is None:
            return
        try:
            error = self.sending.exception(deadline.left())
        except CancelledError:
            raise CallCancelledError(self.method.name, self.cancelled) from None
        except TimeoutError:
            raise self.sender.unsent_error(self.method.name, self.ranks, self.began) from None
        if error is not None:
            raise error.with_traceback(None)

    def withdraw(self, *, force: bool) -> bool:
        """Give up a call that has not been sent; return False, and do nothing, if it has been."""
        sending = self.sending
        if sending is None or (state := self.send_state) is SendState.SENT:
            return False
        if state is SendState.WAITING:
            self.cancelled = tuple(self.ranks)
        if not sending.cancel():  # it is being sent now

            def drop(sent: Future[list[Any]]) -> None:
                if sent.exception() is None:
                    retrieve_late(sent.result(), self)
                    futures = dict(zip(self.ranks, sent.result(), strict=True))
                    self.sender.cancel(futures, self.method.name, force=force)

            sending.add_done_callback(drop)
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all workers called and fetch the answers; see `Call.result`."""
        deadline = self.until(timeout)
        with short_traceback():
            while True:
                attempt = self.attempt
                try:
                    return self.shape(self.collect(deadline))
                except WorkerFailureError:
                    if not self.repeat(attempt, deadline):
                        raise

    def cancel(self, *, force: bool = False) -> list[int]:
        """Give the call up; see `Call.cancel`."""
        if self.withdraw(force=force):
            return []
        pending = self.pending()
        if not pending:
            return []
        self.cancelled = tuple(self.ranks[at] for at in pending)
        retrieve_late(self.futures, self)
        return self.sender.cancel({self.ranks[at]: self.futures[at] for at in pending}, self.method.name, force=force)

    def collect(self, deadline: Deadline) -> list[Any]:
        self.check_open()
        self.wait_until_sent(deadline)
        wanted, others = self.positions, self.others
        if self.yields_items:
            self._drain(deadline)
            values = [self._values_of_items(at) for at in wanted]
        else:
            refs = [self.futures[at] for at in wanted]
            values = self._get([*refs, *(self.futures[at] for at in others)], deadline)[: len(refs)]
            self.count_once(wanted, refs)
        return values

    @property
    def attempt(self) -> int:
        """How often it has been repeated."""
        return 0 if self._repeats is None else self._repeats.made

    def repeat(self, attempt: int, deadline: Deadline | None = None) -> bool:
        """Repeat what was lost in an attempt, unless another thread has; whether there is another attempt.

        On the workers that were lost, or on all that were started again.
        """
        self.check_open()
        self.wait_until_sent(Deadline.after(0.0))
        if self._repeats is None:
            return False
        limit = deadline or self.deadline
        if not self._repeats.lock.acquire(timeout=limit.left(at_most=threading.TIMEOUT_MAX) or 0.0):
            self._raise_late()
        try:
            if self._repeats.made != attempt:
                return True
            if not self._repeats.left:
                return False
            lost = [at for at, ref in self.completions.items() if self.sender.is_lost(ref)]
            if not lost:  # it is a worker's own error, of a group of its own
                return False
            if self.sender.policy.restarts_all:
                lost = list(range(len(self.futures)))
            asked = [self._repeats.requests[at] for at in lost]
            order = Order(self.method.name, [self.ranks[at] for at in lost], asked, self.began, limit)
            again = self.sender.send(order)
            self._repeats.left -= 1
            for at, future in zip(lost, again, strict=True):
                self.futures[at] = future
                self.items.pop(at, None)
                self._handed_out.pop(at, None)
            self.__dict__.pop("completions", None)
            self._repeats.made += 1
        finally:
            self._repeats.lock.release()
        return True

    def shape(self, values: list[Any]) -> Any:
        if self.discard:
            return None
        return values[0] if self.single else values

    def _drain(self, deadline: Deadline) -> None:
        """Take the items of all generators until each has ended; the first failure ends the wait."""
        streams = {self.futures[at]: self.items.setdefault(at, []) for at in self.positions}
        singles = [self.futures[at] for at in self.others]
        try:
            drain(streams, singles, lambda futures: self._until_some_are_ready(futures, deadline))
        except CallTimeoutError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a worker raised
            raise self.failure(error)  # noqa: B904  chained there

    def _until_some_are_ready(self, futures: list[Any], deadline: Deadline, *, fetch_local: bool = False) -> list[Any]:
        while True:
            ready, _ = ray.wait(
                futures, num_returns=1, timeout=deadline.left(at_most=REPORT_EVERY_S), fetch_local=fetch_local
            )
            if ready:
                if deadline.passed and (pending := self.pending()):
                    raise self._late(pending)
                more, _ = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=fetch_local)
                return list(dict.fromkeys([*ready, *more]))
            self.check_late(deadline)

    def iterate_items(self, timeout: float | None) -> Generator[Outcome]:
        with short_traceback():
            self.check_open()
            deadline = self.until(timeout)
            self.wait_until_sent(deadline)
            streams = {self.futures[at]: at for at in self.positions}
            while streams:
                # One item of every worker that has one, then the next round: Ray prefers some workers to others.
                ready = [stream for stream, at in streams.items() if self.items.get(at)]
                for stream in ready or self._until_some_are_ready(list(streams), deadline, fetch_local=True):
                    at = streams[stream]
                    kept = self.items.setdefault(at, [])
                    if not kept and (ref := next(stream, None)) is not None:
                        kept.append(ref)
                        del ref
                    if not kept:
                        del streams[stream]
                        continue
                    # What cannot be fetched stays where it is: an error is raised again, and a timeout loses nothing.
                    (value,) = self._get(kept[:1], deadline)
                    yield self.hand_out(at, kept, value)
                    del value
                    deadline = self.until(timeout)  # of the next item
            # A stream that was cut off by a worker's end just stops; its completion tells.
            self._get([*self.completions.values()], self.until(timeout))

    def hand_out(self, at: int, kept: list[ObjectRef[Any]], value: Any) -> Outcome:
        """Return an item of a generator, which is kept no longer."""
        self._count(kept[:1])
        self._handed_out[at] += 1
        del kept[0]
        return Outcome(self.ranks[at], self.coords(at), value)

    def drain_limited(self, deadline: Deadline) -> Iterator[int]:
        """Take the items of generators with back-pressure as they come, since these do not end before.

        Ends when all of them have ended, or at the deadline.

        Yields:
            The position of each worker whose generator has ended.
        """
        if self.method.backpressure is None:
            return
        unread = {self.futures[at]: at for at in self.positions}
        while unread and not deadline.passed:
            self.sender.roster.check_connected()
            first, _ = ray.wait(list(unread), num_returns=1, timeout=deadline.left(at_most=REPORT_EVERY_S))
            if not first:
                self.report_slow()
                continue
            # All of those that are ready: the first ones alone would keep the others waiting.
            ready, _ = ray.wait(list(unread), num_returns=len(unread), timeout=0)
            for stream in ready:
                ref = next(stream, None)
                if ref is not None:
                    self.items.setdefault(unread[stream], []).append(ref)
                else:
                    yield unread.pop(stream)

    @property
    def yields_items(self) -> bool:
        return self.method.result == "items"

    @cached_property
    def completions(self) -> dict[int, ObjectRef[Any]]:
        """What is ready when a worker has finished: the value itself, or a generator's end."""
        return {
            at: future.completed() if isinstance(future, ObjectRefGenerator) else future
            for at, future in enumerate(self.futures)
        }

    def pending(self) -> list[int]:
        self.sender.roster.check_connected()
        at_of = {ref: at for at, ref in self.completions.items()}
        _, pending = ray.wait(list(at_of), num_returns=len(at_of), timeout=0, fetch_local=False)
        return [at_of[ref] for ref in pending]

    def coords(self, at: int) -> Mapping[str, int]:
        return dict(self.sender.roster.snapshot()[self.ranks[at]].coords)

    def until(self, timeout: float | None) -> Deadline:
        return self.deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def check_open(self) -> None:
        if self.cancelled:
            raise CallCancelledError(self.method.name, self.cancelled)
        self.sender.roster.check_connected()

    def _get(self, refs: Sequence[ObjectRef[Any]], deadline: Deadline) -> list[Any]:
        """The values, once the workers have finished; moving them to the driver is not counted against the deadline."""
        while True:
            try:
                values: list[Any] = ray.get(list(refs), timeout=deadline.left(at_most=REPORT_EVERY_S))
                return values
            except Exception as error:  # noqa: BLE001  whatever a worker raised
                if not is_not_ready(error):
                    raise self.failure(error)  # noqa: B904  chained there
            if not self.pending():
                deadline = Deadline()
            else:
                self.check_late(deadline)

    def failure(self, error: BaseException) -> BaseException:
        """The exception to raise for what Ray raised, which names all ranks that have failed by now.

        Raises:
            CallCancelledError: the call has been cancelled.
        """
        self.check_open()
        failure = explain_failure(self._ends(), error, self.sender)
        if self._looked_for_late != self.attempt:
            self._looked_for_late = self.attempt
            retrieve_late(self.futures, self)
        return failure

    def _ends(self) -> list[ObjectRef[Any]]:
        """The refs that say how each worker has ended."""
        # A generator that raises gives its error as its last item.
        last_items = [items[-1] for items in self.items.values() if items]
        return list(dict.fromkeys([*self.completions.values(), *last_items]))

    def check_late(self, deadline: Deadline) -> None:
        if deadline.passed:
            self._raise_late()
        self.report_slow()

    def _raise_late(self) -> NoReturn:
        raise self._late(self.pending())

    def _late(self, pending: Sequence[int]) -> CallTimeoutError:
        late = self.sender.late_workers([self.ranks[at] for at in pending])
        waited_s = time.monotonic() - self.began
        return CallTimeoutError(
            self.method.name, waited_s, len(self.futures), late, describe_missing(self._sources) if late else ""
        )

    def report_slow(self) -> None:
        if pending := self.pending():
            logger.warning("%s", self._late(pending))

    def unfinished_errors(self) -> dict[int, BaseException]:
        """Why each worker that has not finished has no outcome yet; one look at all of them."""
        pending = self.pending()
        if self.cancelled or not pending:
            return {at: CallCancelledError(self.method.name, (self.ranks[at],)) for at in pending}
        late = self._late(pending)
        return {
            at: CallTimeoutError(late.method, late.waited_s, late.called, (worker,), late.reason)
            for at, worker in zip(pending, late.late, strict=True)
        }

    def outcome(self, at: int, unfinished: Mapping[int, BaseException]) -> Outcome:
        if at in unfinished:
            return Outcome(self.ranks[at], self.coords(at), error=unfinished[at])
        try:
            if self.yields_items and at in self.answering:
                value: Any = self._values_of_items(at)
            else:
                value = ray.get(self.futures[at])
                if at in self.answering:
                    self.count_once([at], [self.futures[at]])
        except Exception as error:  # noqa: BLE001  whatever the worker raised
            return self.failed_outcome(at, error)
        return Outcome(self.ranks[at], self.coords(at), value)

    def failed_outcome(self, at: int, error: BaseException) -> Outcome:
        if self.ranks[at] in self.cancelled:
            error = CallCancelledError(self.method.name, (self.ranks[at],))
            return Outcome(self.ranks[at], self.coords(at), error=error)
        own = [self.completions[at], *self.items.get(at, ())[-1:]]
        return Outcome(self.ranks[at], self.coords(at), error=explain_failure(own, error, self.sender))

    def _values_of_items(self, at: int) -> list[Any]:
        """The items of a generator that has ended."""
        items = self.items.setdefault(at, [])
        items.extend(self.futures[at])
        try:
            ray.get(self.completions[at])
            values: list[Any] = ray.get(items)
        except Exception as error:  # noqa: BLE001  whatever a worker raised
            raise explain_failure(self._ends(), error, self.sender)  # noqa: B904  chained there
        self.check_complete(at)
        self.count_once([at], items)
        return values

    def check_complete(self, at: int) -> None:
        """Refuse to return a part of a generator's items as if it were all."""
        if count := self._handed_out[at]:
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self.method.name!r} of rank {self.ranks[at]}, and they "
                "are not kept. Take the rest from stream() too, or make the call again and ask for its result only."
            )

    def count_once(self, answers: Sequence[int], refs: Sequence[ObjectRef[Any]]) -> None:
        """Count answers as fetched, unless they have been fetched before."""
        if not self._counted.issuperset(answers):
            self._counted.update(answers)
            self._count(refs)

    def _count(self, refs: Sequence[ObjectRef[Any]]) -> None:
        self.fetched = (self.fetched[0] + len(refs), self.fetched[1] + self.sender.counters.add_fetched(refs))


def describe_missing(sources: Iterable[Source]) -> str:
    """Return which calls have not made their objects yet and which of their ranks are late; empty if all are there."""
    pending: dict[tuple[str | None, str], dict[int, WorkerFacts]] = {}
    others = 0
    for method, ref in _find_missing(sources):
        found = find_worker(actor_id_of_ref(ref))
        if found is None:
            others += 1
        else:
            roster, facts = found
            pending.setdefault((method, roster.name_prefix), {})[facts.rank] = facts
    lines = []
    for (method, name), workers in pending.items():
        what = "a call" if method is None else f"the call of {method!r}"
        late = late_workers([facts for _, facts in sorted(workers.items())])
        lines.append(f"{what} of group {name!r}, not finished by:{format_lines(late)}")
    if others:
        lines.append(f"{others} object(s) that no worker of a group makes")
    return "They wait for an argument that is not there yet, from " + "\nand from ".join(lines) if lines else ""


def _find_missing(sources: Iterable[Source]) -> list[tuple[str | None, ObjectRef[Any]]]:
    """Return the objects that do not exist yet, each with the method that makes it."""
    method_of = {one: source.method for source in sources for one in source.ids}
    refs = still_referenced(method_of) if method_of else []
    if not refs:
        return []
    _, pending = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return [(method_of[ref.binary()], ref) for ref in pending]

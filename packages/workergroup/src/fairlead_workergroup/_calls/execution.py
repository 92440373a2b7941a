# SPDX-License-Identifier: Apache-2.0
"""The state of one call: its requests, the results that have arrived, its failures and its repetitions."""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any

from ray import ObjectRef

from .._deadline import Deadline, check_timeout
from .._futures import end_of, get, get_one, wait
from .._membership.gate import wait_for_event
from .._observe.statistics import Outcome
from .._start.worker_class import Method
from .._world import Event, Lock, now, world
from ..exceptions import CallCancelledError, CallTimeoutError, WorkerFailureError, WorkerGroupError
from .errors import Refused, describe_missing, explain_failure, retrieve_late, short_traceback
from .plan import CallOptions
from .results import REPORT_EVERY_S, drain, get_values, split_positions, wait_for_some
from .sender import Order, Sender, Sent

logger = logging.getLogger(__name__)


class SendState(Enum):
    """The progress of the sending of a call."""

    WAITING = "waits to be sent"
    SENT = "sent"
    # It was cancelled first, or its workers could not be restarted.
    FAILED = "could not be sent"


@dataclass(eq=False, repr=False)
class Execution:
    """The state of one call.

    Attributes:
        owner: the group, which stays alive as long as a caller waits for the call.
        sent: the futures of the requests, or a future of them for a call that had to wait.
        returned: the ranks that return a result, in the order of the results.
        fetched: the number of results that have been fetched, and their bytes.
        cancelled: the ranks that had not finished when the call was cancelled; empty if it was not cancelled.
        items: references to the items of generators that have arrived, by position.
        is_single: whether the result is one worker's value, and not a list.
    """

    sender: Sender
    owner: object
    order: Order
    sent: Sent | Future[Sent]
    returned: list[int]
    options: CallOptions
    submit_s: float = 0.0
    fetched: tuple[int, int] = (0, 0)
    cancelled: tuple[int, ...] = ()
    items: dict[int, list[ObjectRef[Any]]] = field(default_factory=dict)
    attempt: int = 0
    positions: list[int] = field(init=False)
    others: list[int] = field(init=False)
    _handed_out: dict[int, int] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)
    # The attempt whose late errors are being retrieved.
    _retrieved_attempt: int = -1
    _repeated_in: int | None = None
    # One thread repeats the call, and others that wait for the call wait until this has happened.
    _lock: Lock = field(default_factory=lambda: world().lock())
    _repeated: Event | None = None

    def __post_init__(self) -> None:
        self.submit_s = now() - self.order.began
        self.ranks: list[int] = list(self.order.ranks)
        self.method: Method = self.order.method
        self.is_single: bool = self.options.collect == ()
        self.positions, self.others = split_positions(self.ranks, self.returned)
        if not isinstance(self.sent, Future):
            self.futures, self.entries = self.sent.futures, [self.sent.entry]
        elif not self.options.retries:
            # Only retries need the requests again. Those of a call that is sent at once are made one by one.
            self.order = self.order._replace(requests=())

    @property
    def sending(self) -> Future[Sent] | None:
        """The future of what has been sent, for a call that had to wait; None for one that was sent at once."""
        return self.sent if isinstance(self.sent, Future) else None

    @cached_property
    def futures(self) -> list[Any]:
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        self.wait_until_sent(self.order.deadline)
        return self._result_of_sending.futures

    @cached_property
    def entries(self) -> list[int]:
        """The numbers of the call, which has been sent, and of its repetitions in the log."""
        return [self._result_of_sending.entry]

    @cached_property
    def answering(self) -> frozenset[int]:
        """The same as `positions`, as a set."""
        return frozenset(self.positions)

    @property
    def epoch(self) -> int:
        """The epoch in which the workers run the call, of the latest attempt; wait as for `futures`."""
        if self._repeated_in is not None:
            return self._repeated_in
        self.wait_until_sent(self.order.deadline)
        return self._result_of_sending.epoch

    @property
    def _result_of_sending(self) -> Sent:
        return self.sent.result() if isinstance(self.sent, Future) else self.sent

    @property
    def send_state(self) -> SendState:
        """The progress of the sending."""
        sending = self.sending
        if sending is None:
            return SendState.SENT
        if not sending.done():
            return SendState.WAITING
        return SendState.FAILED if sending.cancelled() or sending.exception() is not None else SendState.SENT

    def wait_until_sent(self, deadline: Deadline) -> None:
        """Wait until the call has been sent."""
        if (sending := self.sending) is None:
            return
        try:
            error = sending.exception(deadline.left())
        except CancelledError:
            raise CallCancelledError(self.method.name, self.cancelled) from None
        except TimeoutError:
            raise self.sender.unsent_error(self.order) from None
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

            def drop(sent: Future[Sent]) -> None:
                if sent.exception() is None:
                    retrieve_late(sent.result().futures, self)
                    futures = dict(zip(self.ranks, sent.result().futures, strict=True))
                    self.sender.cancel(futures, self.method.name, force=force)

            sending.add_done_callback(drop)
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all called workers and fetch the results; see `Call.result`."""
        deadline = self.until(timeout)
        while True:
            attempt = self.attempt
            try:
                return self.shape(self._collect(deadline))
            except WorkerFailureError as error:
                if not self.repeat(attempt, deadline):
                    self.sender.save_trace(error)
                    raise
            except Refused:
                self.follow(attempt, deadline)

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

    def _collect(self, deadline: Deadline) -> list[Any]:
        self.check_open()
        self.wait_until_sent(deadline)
        futures = self.futures
        wanted, others = [futures[at] for at in self.positions], [futures[at] for at in self.others]
        if not self.yields_items:
            values = self._get([*wanted, *others], deadline)[: len(wanted)]
            self.count_once(self.positions, wanted, values)
            return values
        streams = {self.futures[at]: self.items.setdefault(at, []) for at in self.positions}
        try:
            drain(streams, others, lambda futures: wait_for_some(futures, deadline, self.check_late))
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise self._translate(error)  # noqa: B904  chained there
        return [self._get_items(at) for at in self.positions]

    def repeat(self, attempt: int, deadline: Deadline | None = None) -> bool:
        """Repeat an attempt on the workers that were lost, or on all workers if all were restarted.

        Returns:
            Whether there is another attempt, of this thread or of another one.
        """
        self.check_open()
        self.wait_until_sent(Deadline.after(0.0))
        if not self.options.retries:
            return False
        return self._repeat_once(attempt, deadline or self.order.deadline, self._repeat)

    def _repeat_once(self, attempt: int, limit: Deadline, repeat: Callable[[Deadline], bool]) -> bool:
        """Repeat an attempt, unless another thread does; return whether there is another attempt."""
        mine = world().event()
        try:
            while True:
                with self._lock:
                    if self.attempt != attempt:
                        return True
                    if self._repeated is None:
                        self._repeated = mine
                    other = self._repeated
                if other is mine:
                    return repeat(limit)
                if not wait_for_event(other, limit):
                    raise self._late_error(self.pending())
        finally:
            with self._lock:
                if self._repeated is mine:
                    self._repeated = None
            mine.set()

    def _repeat(self, limit: Deadline) -> bool:
        lost = [at for at, ref in self.completions.items() if self.sender.is_lost(ref)]
        # Without a lost worker the error is the worker's own, about a group that it uses.
        if self.attempt == self.options.retries or not lost:
            return False
        if self.sender.policy.restarts_all:
            lost = list(range(len(self.futures)))
        requests = list(self.order.requests)
        again = self.order._replace(
            ranks=[self.ranks[at] for at in lost],
            requests=[requests[at] for at in lost],
            deadline=limit,
            counts={},
        )
        with self.sender.traced():
            sent = self.sender.send(again)
        self._repeated_in = sent.epoch
        self.entries.append(sent.entry)
        for at, future in zip(lost, sent.futures, strict=True):
            self.futures[at] = future
            self.items.pop(at, None)
            self._handed_out.pop(at, None)
        self.__dict__.pop("completions", None)
        self.attempt += 1
        return True

    def follow(self, attempt: int, deadline: Deadline | None = None) -> None:
        """Send a call that all of its workers have refused again; only calls of handles are refused."""
        if (again := self.order.follow) is not None:
            self._repeat_once(attempt, deadline or self.order.deadline, partial(again, self))

    def begin_again(self, order: Order, returned: list[int], sent: Sent) -> None:
        """Start anew with a call that has been sent again, as no worker has run it."""
        self.order, self.returned, self.ranks = order, returned, list(order.ranks)
        self.positions, self.others = split_positions(self.ranks, returned)
        self.futures, self._repeated_in = sent.futures, sent.epoch
        self.entries.append(sent.entry)
        self.items.clear()
        for name in ("completions", "answering"):
            self.__dict__.pop(name, None)
        self.attempt += 1

    def shape(self, values: list[Any]) -> Any:
        """Return the result of the call for the values of the workers."""
        self.sender.log.end(self.entries)
        if self.options.discard:
            return None
        return values[0] if self.is_single else values

    def iterate_items(self, timeout: float | None) -> Generator[Outcome]:
        """Yield the items of generators as they arrive; see `Call.stream`."""
        with short_traceback():
            self.check_open()
            deadline = self.until(timeout)
            self.wait_until_sent(deadline)
            streams = {self.futures[at]: at for at in self.positions}
            while streams:
                # One item of each worker that has one, then the next round: Ray prefers some workers to others.
                ready = [stream for stream, at in streams.items() if self.items.get(at)]
                for stream in ready or wait_for_some(list(streams), deadline, self.check_late, fetch_local=True):
                    at = streams[stream]
                    kept = self.items.setdefault(at, [])
                    if not kept and (ref := next(stream, None)) is not None:
                        kept.append(ref)
                        del ref
                    if not kept:
                        del streams[stream]
                        continue
                    # An item that cannot be fetched is kept: an error is raised again, and a timeout loses nothing.
                    (value,) = self._get(kept[:1], deadline)
                    yield self.hand_out(at, value)
                    del value
                    deadline = self.until(timeout)  # of the next item
            # A stream whose worker has died just stops; the completion has the error.
            self._get([*self.completions.values()], self.until(timeout))

    def hand_out(self, at: int, value: Any) -> Outcome:
        """Return the first item of a generator as an outcome, and release it."""
        kept = self.items[at]
        self._count(kept[:1], [value])
        self._handed_out[at] = self._handed_out.get(at, 0) + 1
        del kept[0]
        return Outcome(self.ranks[at], self.coords(at), value)

    def drain_limited(self, deadline: Deadline) -> Iterator[int]:
        """Take the items of generators with back-pressure as they come; until then these do not end.

        Ends when all of them have ended, or at the deadline.

        Yields:
            The position of each worker whose generator has ended.
        """
        if self.method.backpressure is None:
            return
        unread = {self.futures[at]: at for at in self.positions}
        while unread and not deadline.passed:
            self.sender.roster.check_connected()
            first, _ = wait(list(unread), num_returns=1, timeout=deadline.left(at_most=REPORT_EVERY_S))
            if not first:
                self.check_late(Deadline())
                continue
            # All streams that are ready: with the first one alone the others would wait.
            ready, _ = wait(list(unread), num_returns=len(unread), timeout=0)
            for stream in ready:
                ref = next(stream, None)
                if ref is not None:
                    self.items.setdefault(unread[stream], []).append(ref)
                else:
                    yield unread.pop(stream)

    @property
    def yields_items(self) -> bool:
        """Whether the method is a generator."""
        return self.method.result == "items"

    @cached_property
    def completions(self) -> dict[int, ObjectRef[Any]]:
        """The ref that is ready when a worker has finished, by position."""
        return {at: end_of(future) for at, future in enumerate(self.futures)}

    def pending(self) -> list[int]:
        """Return the positions of the workers that have not finished."""
        self.sender.roster.check_connected()
        at_of = {ref: at for at, ref in self.completions.items()}
        _, pending = wait(list(at_of), num_returns=len(at_of), timeout=0, fetch_local=False)
        return [at_of[ref] for ref in pending]

    def coords(self, at: int) -> Mapping[str, int]:
        """Return the coordinates of a called worker."""
        return dict(self.sender.roster.snapshot()[self.ranks[at]].coords)

    def until(self, timeout: float | None) -> Deadline:
        """Return the deadline of a wait: that of the call, or `timeout` seconds from now if that is sooner."""
        deadline = self.order.deadline
        return deadline if timeout is None else deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def check_open(self) -> None:
        """Refuse to wait for a call that was cancelled, or whose Ray has ended."""
        if self.cancelled:
            raise CallCancelledError(self.method.name, self.cancelled)
        self.sender.roster.check_connected()

    def _get(self, refs: Sequence[ObjectRef[Any]], deadline: Deadline) -> list[Any]:
        try:
            return get_values(refs, deadline, self.check_late)
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise self._translate(error)  # noqa: B904  chained there

    def _translate(self, error: Exception) -> BaseException:
        # A worker's own CallTimeoutError arrives as an instance of a class that Ray derives from it.
        return error if type(error) is CallTimeoutError else self.failure(error)

    def failure(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of Ray, with all ranks that have failed so far."""
        self.check_open()
        self.sender.log.end(self.entries, failed=True)
        failure = explain_failure(self._ends(), error, self.sender)
        if self._retrieved_attempt != self.attempt:
            self._retrieved_attempt = self.attempt
            retrieve_late(self.futures, self)
        # An error that may be hidden by a repetition gets its trace when it is raised after all.
        if isinstance(failure, WorkerFailureError) and not self.options.retries:
            self.sender.save_trace(failure)
        return failure

    def _ends(self) -> list[ObjectRef[Any]]:
        """Return the refs that hold how each worker has ended."""
        # A generator that raises gives its error as its last item.
        last_items = [items[-1] for items in self.items.values() if items]
        return list(dict.fromkeys([*self.completions.values(), *last_items]))

    def check_late(self, deadline: Deadline) -> Deadline:
        """Log the workers that have not finished; return the deadline of the rest of the wait.

        When all have finished, only their values are on the way, which does not count against the deadline.
        """
        if not (pending := self.pending()):
            return Deadline()
        late = self._late_error(pending)
        if deadline.passed:
            self.sender.save_trace(late)
            raise late
        logger.warning("%s", late)
        return deadline

    def _late_error(self, pending: Sequence[int]) -> CallTimeoutError:
        late = self.sender.late_workers([self.ranks[at] for at in pending])
        waited_s = now() - self.order.began
        reason = describe_missing(self.order.sources) if late else ""
        return CallTimeoutError(self.method.name, waited_s, len(self.futures), late, reason)

    def unfinished_errors(self) -> dict[int, BaseException]:
        """Return the reason why each unfinished worker has no outcome yet, by position, from one request a node."""
        pending = self.pending()
        if self.cancelled or not pending:
            return {at: CallCancelledError(self.method.name, (self.ranks[at],)) for at in pending}
        late = self._late_error(pending)
        return {
            at: CallTimeoutError(late.method, late.waited_s, late.called, (worker,), late.reason)
            for at, worker in zip(pending, late.late, strict=True)
        }

    def outcome(self, at: int, unfinished: Mapping[int, BaseException]) -> Outcome:
        """Return the outcome of a called worker."""
        if at in unfinished:
            return Outcome(self.ranks[at], self.coords(at), error=unfinished[at])
        try:
            if self.yields_items and at in self.answering:
                value: Any = self._get_items(at)
            else:
                value = get_one(self.futures[at])
                if at in self.answering:
                    self.count_once([at], [self.futures[at]], [value])
        except Exception as error:  # noqa: BLE001  any exception of the worker
            return self.failed_outcome(at, error)
        return Outcome(self.ranks[at], self.coords(at), value)

    def failed_outcome(self, at: int, error: BaseException) -> Outcome:
        """Return the outcome of a worker whose fetch raised an error."""
        if self.ranks[at] in self.cancelled:
            error = CallCancelledError(self.method.name, (self.ranks[at],))
        else:
            own = [self.completions[at], *self.items.get(at, ())[-1:]]
            error = explain_failure(own, error, self.sender)
            if isinstance(error, Refused):
                raise error
        return Outcome(self.ranks[at], self.coords(at), error=error)

    def _get_items(self, at: int) -> list[Any]:
        """Return the items of a generator that has ended."""
        items = self.items.setdefault(at, [])
        items.extend(self.futures[at])
        try:
            get_one(self.completions[at])
            values = get(items)
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise explain_failure(self._ends(), error, self.sender)  # noqa: B904  chained there
        self.check_complete(at)
        self.count_once([at], items, values)
        return values

    def check_complete(self, at: int) -> None:
        """Refuse to return some of a generator's items as if they were all."""
        if count := self._handed_out.get(at):
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self.method.name!r} of rank {self.ranks[at]}, and they "
                "are not kept. Take the rest from stream() too, or make the call again and ask for its result only."
            )

    def count_once(self, answers: Sequence[int], refs: Sequence[ObjectRef[Any]], values: Sequence[Any]) -> None:
        """Count results as fetched, unless they have been fetched before."""
        if not self._counted.issuperset(answers):
            self._counted.update(answers)
            self._count(refs, values)

    def _count(self, refs: Sequence[ObjectRef[Any]], values: Sequence[Any]) -> None:
        self.fetched = (self.fetched[0] + len(refs), self.fetched[1] + self.sender.counters.add_fetched(refs, values))

# SPDX-License-Identifier: Apache-2.0
"""One call: its requests, their cancellation and repetitions, and the collection of its results and failures."""

import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

from ray import ObjectRef

from fairlead_placement import PlacementError

from .. import _world
from .._observe.calls import Outcome
from .._start.worker_class import Method
from .._transport.futures import ON_THREAD, REPORT_EVERY_S, Waiter, block, end_of, is_not_ready, is_stream
from .._world import NEVER, Deadline, Event, check_timeout, wait_for_event
from ..exceptions import CallCancelledError, CallTimeoutError, EpochError, WorkerFailureError, WorkerGroupError
from .losses import diagnose, is_cancellation, refused_epochs, refused_error
from .plan import CallOptions, Recipients
from .sender import Order, Sender, Sent

logger = logging.getLogger(__name__)

# A request reaches a worker that is not busy within this time.
REFUSED_S = 1.0

T = TypeVar("T")


class SendState(Enum):
    """The progress of the sending of a call."""

    WAITING = "waits to be sent"
    SENT = "sent"
    # It was cancelled first, or its workers could not be restarted.
    FAILED = "could not be sent"


@dataclass(eq=False, repr=False)
class Execution:
    """One call: its requests, and what has arrived from its workers."""

    sender: Sender
    owner: object  # it stays alive as long as a caller waits for the call
    order: Order
    sent: Sent | Future[Sent]  # the futures of the requests, or a future of them for a call that had to wait
    recipients: Recipients
    options: CallOptions
    cancelled: tuple[int, ...] = ()  # the ranks that had not finished when the call was cancelled
    items: dict[int, list[ObjectRef[Any]]] = field(default_factory=dict)  # that have arrived, by position
    attempt: int = 0
    _handed_out: dict[int, int] = field(default_factory=dict)
    # Once workers have refused a call of a handle: the latest epoch among them, and the ranks that have not.
    _refused: tuple[int, tuple[int, ...]] | None = None
    # What happens when a thread has tried to repeat an attempt, by the attempt and the number of the try. `setdefault`
    # lets one thread at a time try, without a lock.
    _repeating: dict[tuple[int, int], Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.method: Method = self.order.method
        self.yields_items: bool = self.method.result == "items"  # whether the method is a generator
        self.is_single: bool = self.options.collect == ()
        # The future of what has been sent, for a call that had to wait; None for one that was sent at once.
        self.sending: Future[Sent] | None = self.sent if isinstance(self.sent, Future) else None
        if not isinstance(self.sent, Future):
            self.futures, self.epoch = self.sent.futures, self.sent.epoch
        elif not self.options.retries:
            # Only retries need the requests again. Those of a call that is sent at once are made one by one.
            self.order = self.order._replace(requests=())

    @cached_property
    def futures(self) -> list[Any]:
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        return self.wait_until_sent(self.order.deadline).futures

    @cached_property
    def epoch(self) -> int:
        """The epoch in which the workers run the call, of the latest attempt; wait as for `futures`."""
        return self.wait_until_sent(self.order.deadline).epoch

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that are called."""
        return self.recipients.called

    @property
    def positions(self) -> Sequence[int]:
        """The positions of the workers that return a result, in the order of the results."""
        return self.recipients.positions[0]

    @cached_property
    def answering(self) -> frozenset[int]:
        """The same as `positions`, as a set."""
        return frozenset(self.positions)

    @property
    def send_state(self) -> SendState:
        """The progress of the sending."""
        sending = self.sending
        if sending is None:
            return SendState.SENT
        if not sending.done():
            return SendState.WAITING
        return SendState.FAILED if sending.cancelled() or sending.exception() is not None else SendState.SENT

    @property
    def connected(self) -> bool:
        """Whether the Ray of the group is still there."""
        return self.sender.roster.connected

    def done(self) -> bool:
        """Return whether all called workers have finished or failed, or could not be called."""
        return (state := self.send_state) is SendState.FAILED or (state is SendState.SENT and not self.pending())

    def describe(self) -> str:
        """Return the state of the call in words."""
        if self.cancelled:
            return "cancelled"
        if not self.connected:
            return "its Ray has been shut down"
        if (sending := self.send_state) is not SendState.SENT:
            return str(sending.value)
        return f"{len(self.futures) - len(self.pending())} of {len(self.futures)} workers done"

    def wait_until_sent(self, deadline: Deadline) -> Sent:
        """Wait until the call has been sent, and return what has been."""
        if not isinstance(self.sent, Future):
            return self.sent
        try:
            error = self.sent.exception(deadline.left())
        except CancelledError:
            raise CallCancelledError(self.method.name, self.cancelled) from None
        except TimeoutError:
            raise self.sender.unsent_error(self.order) from None
        if error is not None:
            raise error.with_traceback(None)
        return self.sent.result()

    async def until_sent(self, on: Waiter, deadline: Deadline) -> None:
        """Wait until the call has been sent, on a thread or an event loop."""
        if self.sending is not None:
            await on.sent(self.sending, deadline.left())
            self.wait_until_sent(Deadline.after(0.0))

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
                    futures = dict(zip(self.ranks, sent.result().futures, strict=True))
                    self.sender.cancel(futures, self.method.name, force=force)

            sending.add_done_callback(drop)
        return True

    def cancel(self, *, force: bool = False) -> list[int]:
        """Give the call up; see `Call.cancel`."""
        if self.withdraw(force=force):
            return []
        pending = self.pending()
        if not pending:
            return []
        self.cancelled = tuple(self.ranks[at] for at in pending)
        return self.sender.cancel({self.ranks[at]: self.futures[at] for at in pending}, self.method.name, force=force)

    def repeat(self, attempt: int, deadline: Deadline) -> bool:
        """Repeat an attempt on lost workers, or on all if all were restarted; return whether there is another one."""
        self.check_open()
        self.wait_until_sent(Deadline.after(0.0))
        if not self.options.retries:
            return False
        mine, at = _world.current.event(), 0
        try:
            while self.attempt == attempt:
                if (other := self._repeating.setdefault((attempt, at), mine)) is mine:
                    return self._repeat(deadline)
                if not wait_for_event(other, deadline):  # another thread repeats it
                    raise self.late_error(self.pending())
                at += 1
            return True
        finally:
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
            ranks=[self.ranks[at] for at in lost], requests=[requests[at] for at in lost], deadline=limit
        )
        sent = self.sender.send(again)
        self.epoch = sent.epoch
        for at, future in zip(lost, sent.futures, strict=True):
            self.futures[at] = future
            self.items.pop(at, None)
            self._handed_out.pop(at, None)
        self.__dict__.pop("completions", None)
        self.attempt += 1
        return True

    @cached_property
    def completions(self) -> dict[int, ObjectRef[Any]]:
        """The ref that is ready when a worker has finished, by position."""
        return {at: end_of(future) for at, future in enumerate(self.futures)}

    def pending(self) -> list[int]:
        """Return the positions of the workers that have not finished."""
        self.sender.roster.check_connected()
        at_of = {ref: at for at, ref in self.completions.items()}
        _, pending = _world.current.wait(list(at_of), num_returns=len(at_of), timeout=0, fetch_local=False)
        return [at_of[ref] for ref in pending]

    def until(self, timeout: float | None) -> Deadline:
        """Return the deadline of a wait: that of the call, or `timeout` seconds from now if that is sooner."""
        deadline = self.order.deadline
        return deadline if timeout is None else deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def check_open(self) -> None:
        """Refuse to wait for a call that was cancelled, or whose Ray has ended."""
        if self.cancelled:
            raise CallCancelledError(self.method.name, self.cancelled)
        self.sender.roster.check_connected()

    def late_error(self, pending: Sequence[int]) -> CallTimeoutError:
        """Return the error that says what the workers at these positions are doing."""
        late = self.sender.late_workers([self.ranks[at] for at in pending])
        return CallTimeoutError(self.method.name, _world.current.now() - self.order.began, len(self.futures), late)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all called workers and fetch the results; see `Call.result`."""
        return block(self.results(ON_THREAD, timeout))

    async def results(self, on: Waiter, timeout: float | None = None) -> Any:
        """Do the same, on a thread or an event loop; the first failure ends the wait or repeats the call."""
        deadline = self.until(timeout)
        while True:
            self.check_open()
            if self.sending is not None:
                await self.until_sent(on, deadline)
            attempt = self.attempt
            try:
                if not self.yields_items:
                    return self.shape(await on.all(self.in_order(), deadline, self.check_late))
                await on.drain(self.unfinished(), lambda: deadline, self.check_late)
                return self.shape([await self._get_items(on, at) for at in self.positions])
            except Exception as error:  # noqa: BLE001  any exception of a worker
                failure = await on.apart(self._try_again, error, attempt, deadline)
                if failure is not None:
                    raise failure  # noqa: B904  chained there

    def _try_again(self, error: BaseException, attempt: int, deadline: Deadline) -> BaseException | None:
        """Repeat a call after the error of an attempt, if that is due; otherwise return the failure."""
        failure = self.failure(error)
        if isinstance(failure, WorkerFailureError) and self.repeat(attempt, deadline):  # a restart takes seconds
            return None
        return failure

    async def _explained(self, on: Waiter, waiting: Coroutine[Any, Any, T]) -> T:
        """Return what a wait returns, or raise the failure of the call."""
        try:
            return await waiting
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise (await on.apart(self.failure, error))  # noqa: B904  chained there

    def in_order(self) -> list[Any]:
        """Return the futures of the workers that return a result, in the order of the results, then the others."""
        wanted, others = self.recipients.positions
        return list(map(self.futures.__getitem__, [*wanted, *others]))

    def shape(self, values: list[Any]) -> Any:
        """Return the result of the call for the values of `in_order`, of which the first ones are the results."""
        wanted, others = self.recipients.positions
        if self.options.discard:
            return None
        return values[0] if self.is_single else values[: len(wanted)] if others else values

    async def stream(self, timeout: float | None, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield the items of generators as they arrive; see `Call.stream`."""
        self.check_open()
        deadline = self.until(timeout)
        await self.until_sent(on, deadline)
        streams = {self.futures[at]: at for at in self.positions}
        while streams:
            # One item of each worker that has one, then the next round: Ray prefers some workers to others.
            if not any(self.items.get(at) for at in streams.values()):
                kept = {stream: self.items.setdefault(at, []) for stream, at in streams.items()}
                news = await on.some(kept, deadline, self.check_late, here=True, most=1)
                streams = {stream: at for stream, at in streams.items() if not news.get(stream)}
            for at in [at for at in streams.values() if self.items.get(at)]:
                # An item that cannot be fetched is kept: an error is raised again, and a timeout loses nothing.
                (value,) = await self._explained(on, on.all(self.items[at][:1], deadline, self.check_late))
                self._handed_out[at] = self._handed_out.get(at, 0) + 1
                del self.items[at][0]
                yield self._make_outcome(at, value)
                del value
                deadline = self.until(timeout)  # of the next item
        # A stream whose worker has died just stops; the completion has the error.
        await self._explained(on, on.all([*self.completions.values()], self.until(timeout), self.check_late))

    async def iterate(self, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed."""
        deadline = self.order.deadline
        self.sender.roster.check_connected()
        await self.until_sent(on, deadline)
        at_of = {future: at for at, future in enumerate(self.futures)}
        waiting = self.unfinished()
        while waiting:
            news = await on.some(waiting, deadline, self.check_late)
            for future in [future for future, has_ended in news.items() if has_ended]:
                del waiting[future]
                outcome = await self.outcome(on, at := at_of[future], {})
                if at in self.answering or outcome.error is not None:
                    yield outcome

    async def outcomes(self, timeout: float | None, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield the outcome of every worker; see `Call.outcomes`."""
        await self.wait(on, timeout)
        unfinished = await on.apart(self.unfinished_errors)
        wanted, others = self.recipients.positions
        for at in (*wanted, *others):
            outcome = await self.outcome(on, at, unfinished)
            if at in self.answering or outcome.error is not None:
                yield outcome

    async def wait(self, on: Waiter, timeout: float | None) -> bool:
        """Wait until all called workers have finished; see `Call.wait`."""
        deadline = self.until(timeout)
        await self.until_sent(on, deadline)
        waiting = self.unfinished()
        if self.method.backpressure is None:  # otherwise the generators end only when their items are taken
            waiting = {end_of(future): None for future in waiting}
        while waiting:
            self.sender.roster.check_connected()
            news = await on.news(waiting, deadline.left(at_most=REPORT_EVERY_S))
            waiting = {future: items for future, items in waiting.items() if not news.get(future)}
            if deadline.passed:
                return not self.pending()
            if not news:
                await on.apart(self.check_late, Deadline())
        return True

    def unfinished(self) -> dict[Any, list[ObjectRef[Any]] | None]:
        """Return the futures of the call, each with the list that keeps its items if it is that of a generator."""
        return {
            future: self.items.setdefault(at, []) if is_stream(future) else None
            for at, future in enumerate(self.futures)
        }

    def coords(self, at: int) -> Mapping[str, int]:
        """Return the coordinates of a called worker."""
        return dict(self.sender.roster.now[self.ranks[at]].coords)

    def _make_outcome(self, at: int, value: Any = None, error: BaseException | None = None) -> Outcome:
        return Outcome(self.ranks[at], self.coords(at), value, error)

    def failure(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of Ray, with all ranks that have failed so far."""
        if type(error) is CallTimeoutError:  # that of a worker arrives as an instance of a class that Ray derives
            return error
        self.check_open()
        failure = diagnose(self._ends(), error, self.sender, self.method.name, self.order.deadline)
        if not isinstance(failure, WorkerFailureError) and not self.sender.is_owner and self._find_refusals():
            return self._refused_error()
        return failure

    def _find_errors(self) -> dict[int, BaseException | None]:
        """Return the error of each worker that has finished, by position; None if it has none, or had items before.

        Errors are here as soon as a worker has finished. The values of others stay where they are.
        """
        errors: dict[int, BaseException | None] = {}
        for at in set(self.completions).difference(self.pending()):
            items, errors[at] = self.items.setdefault(at, []), None
            if self.yields_items and at in self.answering and not items:
                items.extend(itertools.islice(self.futures[at], 1))
            try:
                if items:  # an item may still be on its way
                    _world.current.get(items[:1], timeout=REFUSED_S)
                _world.current.get([self.completions[at]], timeout=0)
            except Exception as error:  # noqa: BLE001  any exception of the worker
                errors[at] = None if is_not_ready(error) else error
        return errors

    def _find_refusals(self) -> list[tuple[int, int]]:
        """Return the epochs of the call and of the worker for each worker that has refused a call of a handle."""
        return [epochs for error in self._find_errors().values() if (epochs := refused_epochs(error)) is not None]

    def _refused_error(self) -> EpochError:
        """Return the error of a call of a handle that workers have refused; cancel the rest of the call.

        Even if the caller's timeout is shorter, this waits up to 1 s (`REFUSED_S`) for the other workers, so that the
        error can name those that have run the call, and up to 2 s more for the new roster.
        """
        if self._refused is None:
            ends = list(self.completions.values())
            _world.current.wait(ends, num_returns=len(ends), timeout=REFUSED_S, fetch_local=False)
            ran: list[int] = []
            if pending := self.pending():  # workers that run it may wait for those that have refused it
                parts = {self.ranks[at]: self.futures[at] for at in pending}
                ran += self.sender.cancel(parts, self.method.name, force=False)
            epoch = max([self.epoch, *(own for _, own in self._find_refusals())])
            for at, error in self._find_errors().items():
                dropped = at in pending and is_cancellation(error)
                if refused_epochs(error) is None and self.ranks[at] not in ran and not dropped:
                    ran.append(self.ranks[at])
            with contextlib.suppress(WorkerGroupError, PlacementError):  # the next call raises it
                self.sender.renew(epoch)
            self._refused = epoch, tuple(sorted(ran))
        return refused_error(self.method.name, self.epoch, self.ranks, *self._refused)

    def _ends(self) -> list[ObjectRef[Any]]:
        """Return the refs that hold how each worker has ended."""
        # A generator that raises gives its error as its last item.
        last_items = [items[-1] for items in self.items.values() if items]
        return list(dict.fromkeys([*self.completions.values(), *last_items]))

    def check_late(self, deadline: Deadline) -> Deadline:
        """Log the workers that have not finished; return the deadline of the rest of the wait.

        When all have finished, only their values are on the way, which does not count against the deadline.
        """
        if self.send_state is SendState.WAITING:
            if deadline.passed:
                raise self.sender.unsent_error(self.order)
            return deadline
        if not (pending := self.pending()):
            return Deadline()
        late = self.late_error(pending)
        if deadline.passed:
            raise late
        logger.warning("%s", late)
        return deadline

    def unfinished_errors(self) -> dict[int, BaseException]:
        """Return the reason why each unfinished worker has no outcome yet, by position, from one request a node."""
        pending = self.pending()
        if self.cancelled or not pending:
            return {at: CallCancelledError(self.method.name, (self.ranks[at],)) for at in pending}
        late = self.late_error(pending)
        return {
            at: CallTimeoutError(late.method, late.waited_s, late.called, (worker,))
            for at, worker in zip(pending, late.late, strict=True)
        }

    async def outcome(self, on: Waiter, at: int, unfinished: Mapping[int, BaseException]) -> Outcome:
        """Return the outcome of a called worker."""
        if at in unfinished:
            return self._make_outcome(at, error=unfinished[at])
        future = self.futures[at]
        try:
            if is_stream(future):
                value: Any = await self._get_items(on, at)
            else:
                (value,) = await on.all([future], NEVER, self.check_late)
        except Exception as error:  # noqa: BLE001  any exception of the worker
            if self.ranks[at] in self.cancelled:
                return self._make_outcome(at, error=CallCancelledError(self.method.name, (self.ranks[at],)))
            # A call of the owner is never refused; an argument of it may be.
            if not self.sender.is_owner and refused_epochs(error) is not None:
                raise (await on.apart(self._refused_error)) from None
            own = [self.completions[at], *self.items.get(at, ())[-1:]]
            found = await on.apart(diagnose, own, error, self.sender, self.method.name)
            return self._make_outcome(at, error=found)
        return self._make_outcome(at, value)

    async def _get_items(self, on: Waiter, at: int) -> list[Any]:
        """Return the items of a generator that has ended."""
        future, items = self.futures[at], self.items.setdefault(at, [])
        await on.drain({future: items}, lambda: NEVER, self.check_late)
        values = await on.all(items, NEVER, self.check_late)
        if count := self._handed_out.get(at):
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self.method.name!r} of rank {self.ranks[at]}, and they "
                "are not kept. Take the rest from stream() too, or make the call again and ask for its result only."
            )
        return values

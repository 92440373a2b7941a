# SPDX-License-Identifier: Apache-2.0
"""The requests of one call: their sending, their cancellation and their repetitions."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any

from ray import ObjectRef

from .._deadline import Deadline, check_timeout
from .._membership.gate import wait_for_event
from .._start.worker_class import Method
from .._transport.futures import end_of, wait
from .._world import Event, now, world
from ..exceptions import CallCancelledError, CallTimeoutError
from .errors import describe_missing, retrieve_late
from .plan import CallOptions, Recipients
from .sender import Order, Sender, Sent
from .wait import Waiter


class SendState(Enum):
    """The progress of the sending of a call."""

    WAITING = "waits to be sent"
    SENT = "sent"
    # It was cancelled first, or its workers could not be restarted.
    FAILED = "could not be sent"


@dataclass(eq=False, repr=False)
class Attempts:
    """The requests of one call."""

    sender: Sender
    owner: object  # it stays alive as long as a caller waits for the call
    order: Order
    sent: Sent | Future[Sent]  # the futures of the requests, or a future of them for a call that had to wait
    recipients: Recipients
    options: CallOptions
    submit_s: float = 0.0
    fetched_at: set[int] = field(default_factory=set)  # the positions of the workers whose results have been fetched
    cancelled: tuple[int, ...] = ()  # the ranks that had not finished when the call was cancelled
    items: dict[int, list[ObjectRef[Any]]] = field(default_factory=dict)  # that have arrived, by position
    attempt: int = 0
    _handed_out: dict[int, int] = field(default_factory=dict)
    _handed_out_bytes: int = 0
    # The attempt whose late errors are being retrieved.
    _retrieved_attempt: int = -1
    _repeated_in: int | None = None
    # What happens when the thread that repeats the call has done so; None if no thread does.
    _repeated: Event | None = None

    def __post_init__(self) -> None:
        self.submit_s = now() - self.order.began
        self.method: Method = self.order.method
        self.yields_items: bool = self.method.result == "items"  # whether the method is a generator
        self.is_single: bool = self.options.collect == ()
        # The future of what has been sent, for a call that had to wait; None for one that was sent at once.
        self.sending: Future[Sent] | None = self.sent if isinstance(self.sent, Future) else None
        if not isinstance(self.sent, Future):
            self.futures, self.entries = self.sent.futures, [self.sent.entry]
        elif not self.options.retries:
            # Only retries need the requests again. Those of a call that is sent at once are made one by one.
            self.order = self.order._replace(requests=())

    @cached_property
    def futures(self) -> list[Any]:
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        self.wait_until_sent(self.order.deadline)
        return self._result_of_sending.futures

    @cached_property
    def entries(self) -> list[int]:
        """The numbers of the call, which has been sent, and of its repetitions in the log."""
        return [self._result_of_sending.entry]

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
                    retrieve_late(sent.result().futures, self)
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
        retrieve_late(self.futures, self)
        return self.sender.cancel({self.ranks[at]: self.futures[at] for at in pending}, self.method.name, force=force)

    def repeat(self, attempt: int, deadline: Deadline | None = None) -> bool:
        """Repeat an attempt on lost workers, or on all if all were restarted; return whether there is another one."""
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
                with self.sender.repeating:
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
            with self.sender.repeating:
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
            ranks=[self.ranks[at] for at in lost], requests=[requests[at] for at in lost], deadline=limit
        )
        with self.sender.explained():
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

    def begin_again(self, order: Order, recipients: Recipients, sent: Sent) -> None:
        """Begin with the requests of a call that was sent again because no worker had run it."""
        self.order, self.recipients = order, recipients
        self.futures, self._repeated_in = sent.futures, sent.epoch
        self.entries.append(sent.entry)
        self.items.clear()
        for name in ("completions", "answering"):
            self.__dict__.pop(name, None)
        self.attempt += 1

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

    def until(self, timeout: float | None) -> Deadline:
        """Return the deadline of a wait: that of the call, or `timeout` seconds from now if that is sooner."""
        deadline = self.order.deadline
        return deadline if timeout is None else deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def check_open(self) -> None:
        """Refuse to wait for a call that was cancelled, or whose Ray has ended."""
        if self.cancelled:
            raise CallCancelledError(self.method.name, self.cancelled)
        self.sender.roster.check_connected()

    def _late_error(self, pending: Sequence[int]) -> CallTimeoutError:
        late = self.sender.late_workers([self.ranks[at] for at in pending])
        waited_s = now() - self.order.began
        reason = describe_missing(self.order.sources) if late else ""
        return CallTimeoutError(self.method.name, waited_s, len(self.futures), late, reason)

# SPDX-License-Identifier: Apache-2.0
"""One call: how it is made, its results, outcomes, items and repetition, and its use as an argument of other calls."""

import asyncio
import contextlib
import logging
from asyncio import _get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from ray import ObjectRef
from ray.exceptions import RayError

from .. import _world
from .._membership.core import Core, Sent
from .._observe.calls import Outcome
from .._ray_private import end_of
from .._transport import replies, wait
from .._transport.arguments import Gathered, PassedOn
from .._transport.replies import CheckLate, NotYet, short_traceback
from .._transport.wait import ResultStream, Waiter, iterate, iterate_on_loop
from .._world import NEVER, Deadline, Event, check_timeout, wait_for_event
from ..exceptions import CallCancelledError, WorkerFailureError
from .arrivals import Arrivals
from .plan import CallOptions, PlannedCall, Recipients, prepare_call
from .results import MultiWorkerFuture, ResultFetcher

if TYPE_CHECKING:
    # Only the one of typing_extensions has a default before Python 3.13.
    from typing_extensions import TypeVar

    Result = TypeVar("Result", default=Any, covariant=True)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)

logger = logging.getLogger(__name__)


def send_call(
    core: Core,
    owner: object,
    call: PlannedCall,
    *,
    blocks: bool = False,  # whether the thread waits although it runs an event loop
    queues: bool = True,  # whether a call of an event loop that has to wait is sent later, and not refused
) -> "Call[Any]":
    """Send a call. Its owner is the group, which stays alive as long as a caller waits for the call."""
    # The public function raises an exception if there is no loop, and every call asks.
    if blocks or _get_running_loop() is None:
        return Call(core, owner, call, core.send(call))
    return Call(core, owner, call, core.send_or_queue(call) if queues else core.send(call, Deadline.after(0.0)))


def call_hook(core: Core, method: str, ranks: Sequence[int], deadline: Deadline) -> "Call[Any]":
    """Send a method of the class to ranks, as a part of the change of membership that is under way."""
    options = CallOptions(timeout=deadline.left(), discard=True)
    recipients = Recipients(list(ranks), [], [False] * len(ranks))
    called = core.described.worker_class.find(method)
    return send_call(core, None, prepare_call(core, called, recipients, (), {}, options, is_hook=True), blocks=True)


class Call(PassedOn, MultiWorkerFuture, Generic[Result]):
    """A call of a method on the workers of a group. `RayWorkerGroup.call` makes it.

    `result()` waits for the result; `outcomes()` reports the outcome of every worker; iteration, also with `async for`,
    yields an `Outcome` as each worker finishes. `await` returns what `result()` returns, and the cancellation of the
    awaiting task cancels the call. None of these consumes anything: after a timeout you can ask again.

    A call can be an argument of another call. Then it stands for its results, which go from worker to worker: a `Call`
    made with `collect=()` stands for its one result, `Shard(call, axis)` and `PerWorker(call)` for one result each, and
    any other `Call` for the list of results.
    """

    def __init__(self, core: Core, owner: object, call: PlannedCall, sent: Sent | Future[Sent]) -> None:
        self._core = core
        self._owner = owner
        self._planned = call
        # What has been sent; None as long as the call waits for that, and then the future of it.
        self._sent: Sent | None = None if isinstance(sent, Future) else sent
        self.sending: Future[Sent] | None = sent if isinstance(sent, Future) else None
        self._yields_items = call.method.result == "items"  # whether the method is a generator
        self._is_single = call.options.collect == ()
        self._cancelled: set[int] = set()  # the ranks that had not finished when the call was cancelled
        self._seen: Arrivals | None = None  # what `_arrivals` has returned
        self._attempts = 0
        self._repeating: Event | None = None  # while a thread repeats the call

    def result(self, timeout: float | None = None) -> Result:
        """Wait for all called workers and fetch the results, and nothing else.

        Args:
            timeout: the seconds to wait for the workers from now, in place of the call's own timeout; None to wait
                until the deadline of the call, if it has one. After a timeout you can ask again.

        Returns:
            A list of results, by rank or row-major over the collected axes; with `collect=()` the one result; with
            `discard=True` None. The result of a generator method is the list of its items.

        Raises:
            CallTimeoutError: some workers have not finished by then.
            WorkerFailureError: a worker was lost. The first failure ends the wait.
            CallCancelledError: the call was cancelled before all workers had finished.
            WorkerGroupError: the group's Ray has been shut down, or `stream()` has handed out some of the items.
            Exception: a worker's own exception, with its type and a note for each failing rank.
        """
        with short_traceback():
            result: Result = self._result(self._until(timeout))
            return result

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """Return the outcome of every worker; never raise the exception of a worker.

        Args:
            timeout: as for `result`. The error of a worker that has not finished is a `CallTimeoutError`.

        Returns:
            The outcomes of the workers that return a result, in the order of `result()`, then those of other workers
            that failed.
        """
        with short_traceback():
            self.wait(timeout)
            return self._arrivals.outcomes()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all called workers have finished or failed.

        Args:
            timeout: as for `result`.

        Returns:
            Whether they have within that time.
        """
        deadline = self._until(timeout)
        self._wait_until_sent(deadline)
        return self._arrivals.wait(deadline)

    def __iter__(self) -> Iterator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed.

        Raises:
            CallTimeoutError: the deadline of the call has passed.
        """
        return iterate(self._iterate)

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait_on_loop().__await__()

    def __aiter__(self) -> AsyncIterator[Outcome]:
        return iterate_on_loop(self._iterate)

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:  # not that of a `MultiWorkerFuture`
        return self is other

    def __repr__(self) -> str:
        if self._cancelled:
            state = "cancelled"
        elif not self._core.connected:
            state = "its Ray has been shut down"
        elif not self._is_sent:
            state = "could not be sent" if self._has_failed_to_send else "waits to be sent"
        else:
            state = f"{len(self._ranks) - len(self._arrivals.pending())} of {len(self._ranks)} workers done"
        return f"Call({self._planned.method.name!r}, {state}, {len(self._positions)} results)"

    @property
    def futures(self) -> list[Any]:  # type: ignore[override]
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        return self._wait_until_sent(self._planned.deadline).replies

    # Copies: a plan is cached for later calls, and a user may change the lists of this one.
    @property
    def return_from_workers(self) -> list[int] | None:  # type: ignore[override]
        """The ranks that return a result, in the order of the results."""
        return [self._ranks[at] for at in self._positions]

    @property
    def called_workers(self) -> list[int] | None:  # type: ignore[override]
        """The ranks that are called, in the order of `futures`."""
        return list(self._ranks)

    @property
    def group_epoch(self) -> int:
        """The epoch of the group in which the workers run the call; see `GroupState`.

        If the call is not sent yet, wait for that until its deadline. Of a call that was repeated after a restart, it
        is the epoch of the last repetition.
        """
        return self._wait_until_sent(self._planned.deadline).epoch

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the results, in the order of `result()`; for a generator method, its generators."""
        futures = self.futures
        return [futures[at] for at in self._positions]

    def done(self) -> bool:
        """Return whether all called workers have finished or failed, or could not be called."""
        return self._has_failed_to_send or (self._is_sent and not self._arrivals.pending())

    def stream(self, timeout: float | None = None) -> ResultStream[Outcome]:
        """Return the items of a generator method as they arrive, each as an `Outcome`, for `for` and `async for`.

        All workers are served in turn. Each item is handed out once and then released from the object store, so that
        `result()` raises afterwards instead of returning some of the items. An error is raised again each time.

        Args:
            timeout: the seconds to wait for the next item; None to wait until the deadline of the call, if it has one.

        Returns:
            A stream that can be iterated once.

        Raises:
            TypeError: the method is not a generator.
            CallTimeoutError: no item arrived in time. A new stream continues at the same item.
            WorkerFailureError, Exception: as `result` does.
        """
        check_timeout("timeout", timeout)
        if not self._yields_items:
            name = self._planned.method.name
            raise TypeError(f"{name!r} is not a generator method: it returns its result in one piece")
        return ResultStream(partial(self._stream, timeout))

    def cancel(self, force: bool = False) -> list[int]:
        """Give the call up: drop its queued requests, and cancel async methods that overlap with others.

        Any other running method cannot be interrupted: it runs to its end, and its value is dropped.

        Args:
            force: kill the workers that are running the method. The group has lost them then, with kind "cancelled".

        Returns:
            The ranks that are still running the method, or may be, because their node does not answer; with `force`,
            the ranks that were killed.
        """
        sending = self.sending
        if sending is not None and not self._is_sent:
            if not self._has_failed_to_send:
                self._cancelled.update(self._ranks)
            if not sending.cancel():  # it is being sent now
                sending.add_done_callback(lambda sent: sent.exception() or self._arrivals.cancel(force=force))
            return []
        return self._arrivals.cancel(force=force)

    def get_results(
        self, worker_group: ResultFetcher | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Return what `result` fetches, always as a flat list; compatible with NeMo RL.

        Args:
            worker_group: not needed, because a call knows its group.
            return_generators_as_proxies: return each generator as it is, an iterator of ObjectRefs. Otherwise its items
                stand at its place.
        """
        if self._yields_items and return_generators_as_proxies:
            self._check_open()
            return self.refs
        values: Any = self.result()
        values = [] if self._planned.options.discard else [values] if self._is_single else values
        return [item for items in values for item in items] if self._yields_items else values

    def as_argument(self) -> ObjectRef[Any] | Gathered:
        self._check_passable()
        refs = self.refs
        return refs[0] if self._is_single else Gathered(tuple(refs))

    def as_arguments(self) -> list[ObjectRef[Any]]:
        self._check_passable()
        if self._is_single:
            raise ValueError(
                f"the call of {self._planned.method.name!r} has one result (collect=()): pass the call as it is"
            )
        return self.refs

    def _check_passable(self) -> None:
        name = self._planned.method.name
        if self._planned.options.discard:
            raise ValueError(f"the call of {name!r} has no result to pass on (discard=True)")
        if self._yields_items:
            raise TypeError(f"{name!r} is a generator method: stream or collect its items, and pass these on")

    @property
    def _call(self) -> PlannedCall:
        """The call as it was sent, which may have been planned again while it waited."""
        if self._sent is None and self._is_sent:
            self._wait_until_sent(NEVER)
        return self._planned if self._sent is None else self._sent.call

    @property
    def _ranks(self) -> Sequence[int]:
        return self._call.recipients.called

    @property
    def _positions(self) -> Sequence[int]:
        """The positions of the workers that return a result, in the order of the results."""
        return self._call.recipients.positions[0]

    @property
    def _is_sent(self) -> bool:
        return self.sending is None or (self.sending.done() and not self._has_failed_to_send)

    @property
    def _has_failed_to_send(self) -> bool:
        """Whether it was cancelled before it was sent, or its workers could not be restarted."""
        sending = self.sending
        return sending is not None and sending.done() and (sending.cancelled() or sending.exception() is not None)

    def _until(self, timeout: float | None) -> Deadline:
        """Return the deadline of a wait: `timeout` seconds from now, or without a timeout that of the call."""
        return self._planned.deadline if timeout is None else Deadline.after(check_timeout("timeout", timeout))

    def _check_open(self) -> None:
        """Refuse to wait for a call that was cancelled, or whose Ray has ended."""
        if self._cancelled:
            raise self._cancelled_error()
        self._core.connection.check()

    def _cancelled_error(self) -> CallCancelledError:
        return CallCancelledError(self._planned.method.name, tuple(sorted(self._cancelled)))

    @property
    def _arrivals(self) -> Arrivals:
        """What has come back of the call. If it is not sent yet, wait for that until its deadline."""
        sent = self._wait_until_sent(self._planned.deadline)
        if self._seen is None or self._seen.sent is not sent:
            self._seen = Arrivals(self._core, sent, self._cancelled)
        return self._seen

    def _check_late(self, deadline: Deadline) -> Deadline:
        return self._arrivals.check_late(deadline)

    def _wait_until_sent(self, deadline: Deadline) -> Sent:
        """Wait until the call has been sent, and return what has been."""
        if self._sent is not None:
            return self._sent
        assert self.sending is not None
        try:
            error = self.sending.exception(deadline.left())
        except CancelledError:
            raise self._cancelled_error() from None
        except TimeoutError:
            raise self._core.unsent_error(self._planned) from None
        if error is not None:
            raise error.with_traceback(None)
        self._sent = self.sending.result()
        return self._sent

    async def _until_sent(self, deadline: Deadline, *, blocks: bool) -> Sent:
        """Wait until the call has been sent, on a thread or an event loop."""
        if self._sent is None and self.sending is not None and not blocks:
            await wait.until(self.sending.add_done_callback, deadline)
        return self._wait_until_sent(deadline)

    def _result(self, deadline: Deadline) -> Any:
        """Wait for all called workers and fetch the results; the first failure ends the wait or repeats the call."""
        while True:
            self._check_open()
            sent = self._wait_until_sent(deadline)
            try:
                return self._fetch_result(sent, deadline, self._check_late)
            except RayError as error:  # every exception of a worker, and none of a signal handler here
                failure = self._arrivals.failure(error)
            # A restart takes seconds.
            if not isinstance(failure, WorkerFailureError) or not self._repeat(sent, deadline):
                raise failure

    async def _wait_on_loop(self) -> Any:
        with short_traceback():
            try:
                return await self._result_on_loop(self._until(None))
            except asyncio.CancelledError:
                if self._core.connected:
                    # A second cancellation ends this wait, but not the thread.
                    await asyncio.shield(asyncio.to_thread(self.cancel))
                raise

    async def _result_on_loop(self, deadline: Deadline) -> Any:
        """Wait for the last reply on the event loop. Whatever is not a plain success is settled by `_result`."""
        self._check_open()
        sent = await self._until_sent(deadline, blocks=False)
        if self._planned.method.backpressure is None:  # otherwise the generators end only when their items are taken
            await wait.until(partial(replies.watch, list(map(end_of, sent.replies))), deadline, self._check_late)
            if not self._yields_items:
                with contextlib.suppress(RayError, NotYet):
                    return self._fetch_result(sent, Deadline.after(0.0))
        return await asyncio.to_thread(self._result, deadline)

    def _fetch_result(self, sent: Sent, deadline: Deadline, check_late: CheckLate | None = None) -> Any:
        wanted, others = sent.call.recipients.positions
        if self._yields_items:
            wait.drain(sent.replies, deadline, self._check_late)
            values = [self._arrivals.value(sent.replies[at]) for at in wanted]
        else:
            in_order = list(map(sent.replies.__getitem__, [*wanted, *others]))
            values = replies.values(in_order, deadline, check_late)[: len(wanted)]
        if self._planned.options.discard:
            return None
        return values[0] if self._is_single else values

    async def _stream(self, timeout: float | None, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield the items of generators as they arrive; see `stream`."""
        self._check_open()
        deadline = self._until(timeout)
        sent = await self._until_sent(deadline, blocks=on.blocks)
        arrivals = self._arrivals
        streams = {sent.replies[at]: at for at in self._positions}
        while streams:
            # One item of each worker that has one, then the next round: Ray prefers some workers to others.
            if not any(map(wait.taken, streams)):
                news = await on.some(list(streams), deadline, self._check_late, here=True, most=1)
                streams = {stream: at for stream, at in streams.items() if not news.get(stream)}
            for stream, at in list(streams.items()):
                if not (items := wait.taken(stream)):
                    continue
                # An item that cannot be fetched is kept: an error is raised again, and a timeout loses nothing.
                value = await self._fetch(on, items[0], deadline)
                del items[0]
                items.handed_out += 1
                yield arrivals.make_outcome(at, value)
                del value
                deadline = self._until(timeout)  # of the next item
        # A stream whose worker has died just stops; the completion has the error.
        for end in map(end_of, sent.replies):
            await self._fetch(on, end, self._until(timeout))

    async def _fetch(self, on: Waiter, ref: Any, deadline: Deadline) -> Any:
        """Return the value of a reference that is here or will be soon, or raise the failure of the call."""
        if not on.blocks:
            await on.some([ref], deadline, self._check_late, here=True)
        try:
            (value,) = replies.values([ref], deadline, self._check_late)
        except RayError as error:
            raise (await on.apart(self._arrivals.failure, error))  # noqa: B904  chained there
        return value

    async def _iterate(self, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed."""
        deadline = self._planned.deadline
        self._core.connection.check()
        sent = await self._until_sent(deadline, blocks=on.blocks)
        waiting, answering = {reply: at for at, reply in enumerate(sent.replies)}, frozenset(self._positions)
        while waiting:
            news = await on.some(list(waiting), deadline, self._check_late)
            for at in [waiting.pop(reply) for reply, has_ended in news.items() if has_ended]:
                outcome = await on.apart(self._arrivals.outcome, at)
                if at in answering or outcome.error is not None:
                    yield outcome

    def _repeat(self, sent: Sent, deadline: Deadline) -> bool:
        """Repeat an attempt if retries are left; return whether there is another one. One thread repeats it."""
        self._check_open()
        if not self._planned.options.retries:
            return False
        mine = _world.current.event()
        while self._sent is sent:
            with self._core.turn:
                other = self._repeating
                self._repeating = other or mine
            if other is None:
                try:
                    return self._send_again(sent, deadline)
                finally:
                    self._repeating = None
                    mine.set()
            if not wait_for_event(other, deadline):
                raise self._arrivals.late_error(self._arrivals.pending())
        return True

    def _send_again(self, sent: Sent, deadline: Deadline) -> bool:
        """Send the requests to lost workers again, or to all if all were restarted; return whether that is due."""
        lost = [at for at, reply in enumerate(sent.replies) if self._core.is_lost(reply)]
        # Without a lost worker the error is the worker's own, about a group that it uses.
        if self._attempts == self._planned.options.retries or not lost:
            return False
        if self._core.policy.restarts_all:
            lost = list(range(len(sent.replies)))
        ranks = [sent.call.called[at] for at in lost]
        requests = [sent.call.requests[at] for at in lost]
        recipients = Recipients(ranks, ranks, None)
        again = self._core.send(
            replace(sent.call, recipients=recipients, requests=requests, deadline=deadline, replan=None)
        )
        replies_now = dict(enumerate(sent.replies)) | dict(zip(lost, again.replies, strict=True))
        self._sent = Sent(sent.call, list(replies_now.values()), again.epoch)
        self._attempts += 1
        return True

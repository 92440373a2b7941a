# SPDX-License-Identifier: Apache-2.0
"""One call: how it is made, its results, outcomes, items and repetition, and its use as an argument of other calls."""

import asyncio
import contextlib
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn

from ray import ObjectRef
from ray.exceptions import RayError

from .. import _world
from .._arguments import Gathered, PassedOn
from .._membership.core import Core, PlannedCall, Sent
from .._ray_private import end_of, is_stream
from .._replies import NotYet, ResultStream, short_traceback, taken, until, wait_for_news, watch
from .._start.worker_class import Method
from .._world import Deadline, Event, check_timeout, wait_for_event
from ..exceptions import WorkerFailureError
from .plan import CallOptions, Recipients, prepare_call
from .results import Arrivals, MultiWorkerFuture, Outcome, cancelled_error, flatten, recipients_of

if TYPE_CHECKING:
    # Only the one of typing_extensions has a default before Python 3.13.
    from typing_extensions import TypeVar

    Result = TypeVar("Result", default=Any, covariant=True)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)


def send_call(core: Core, owner: object, call: PlannedCall, *, queues: bool = True) -> "Call[Any]":
    """Send a call. Its owner is the group, which stays alive as long as a caller waits for the call.

    A call of an event loop that has to wait is sent later, or refused if it does not queue.
    """
    # The public function raises an exception if there is no loop, and every call asks.
    if _get_running_loop() is None:
        return Call(core, owner, call, core.send(call))
    return Call(core, owner, call, core.send_or_queue(call) if queues else core.send(call, Deadline.after(0.0)))


def call_hook(core: Core, method: str, ranks: Sequence[int], deadline: Deadline) -> "Call[Any]":
    """Send a method of the class to ranks, as a part of the change of membership that is under way."""
    options = CallOptions(timeout=deadline.left(), discard=True)
    recipients = Recipients(list(ranks), [], [False] * len(ranks))
    called = core.worker_class.method(method)
    call = prepare_call(core, called, recipients, (), {}, options, is_hook=True)
    return Call(core, None, call, core.send(call))


def as_call(
    core: Core, owner: object, futures: MultiWorkerFuture | Sequence[Any], timeout_s: float | None = None
) -> "Call[Any]":
    """Return a call; in place of futures, one that waits for them as if they were of a call that is made now."""
    if isinstance(futures, Call):
        return futures
    bundle = futures if isinstance(futures, MultiWorkerFuture) else MultiWorkerFuture(list(futures))
    kind = "generator" if any(map(is_stream, bundle.futures)) else "plain"
    began, deadline = _world.current.now(), Deadline.after(core.call_timeout_s if timeout_s is None else timeout_s)
    call = PlannedCall(Method("a method", kind, None), recipients_of(bundle), (), began, deadline, CallOptions())
    return Call(core, owner, call, Sent(call, bundle.futures, core.now.group_epoch))


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
        self._yields_items = call.method.result == "items"  # whether the method is a generator
        self._is_single = call.options.collect == ()
        self._cancelled: set[int] = set()  # the ranks that had not finished when the call was cancelled
        # What has come back of the last attempt; None as long as the call waits to be sent, and then the future of it.
        self._latest = None if isinstance(sent, Future) else Arrivals(core, sent, self._cancelled)
        self.sending: Future[Sent] | None = sent if isinstance(sent, Future) else None
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
            result: Result = self._result(self._planned.deadline if timeout is None else self._until(timeout))
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
        return self._wait_until_sent(deadline).wait(deadline)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(f"a Call has no items: write call.result()[{index!r}]")

    def __iter__(self) -> Iterator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed.

        Raises:
            CallTimeoutError: the deadline of the call has passed.
        """
        return ResultStream(self._iterate)

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait_on_loop().__await__()

    def __aiter__(self) -> AsyncIterator[Outcome]:
        return ResultStream(self._iterate)

    def __repr__(self) -> str:
        return f"Call({self._planned.method.name!r}, {len(self._ranks)} workers, {len(self._positions)} results)"

    @property
    def futures(self) -> list[Any]:  # type: ignore[override]
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        return self._arrivals.sent.replies

    # Copies: a plan is cached for later calls, and a user may change the lists of this one.
    @property
    def return_from_workers(self) -> list[int] | None:  # type: ignore[override]
        """The ranks that return a result, in the order of the results."""
        return [self._ranks[position] for position in self._positions]

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
        return self._arrivals.sent.epoch

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the results, in the order of `result()`; for a generator method, its generators."""
        futures = self.futures
        return [futures[position] for position in self._positions]

    def done(self) -> bool:
        """Return whether all called workers have finished or failed, or could not be called."""
        arrivals = self._poll()
        return not arrivals.pending() if arrivals is not None else self.sending is not None and self.sending.done()

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
        if sending is None or self._poll() is not None:
            return self._arrivals.cancel(force=force)
        if not sending.done():
            self._cancelled.update(self._ranks)
        if not sending.cancel():  # it is being sent now
            sending.add_done_callback(lambda sent: sent.exception() or self._arrivals.cancel(force=force))
        return []

    def get_results(self, worker_group: Any = None, return_generators_as_proxies: bool = False) -> list[Any]:
        """Return what `result` fetches, always as a flat list; compatible with NeMo RL.

        Args:
            worker_group: not needed, because a call knows its group.
            return_generators_as_proxies: return each generator as it is, an iterator of ObjectRefs. Otherwise its items
                stand at its place.
        """
        if self._yields_items and return_generators_as_proxies:
            self._check_open()
            return self.refs
        with short_traceback():
            result = self._result(self._until(None))
            return flatten(self.refs, [result] if self._is_single else result or [])

    def as_argument(self) -> ObjectRef[Any] | Gathered:
        self._check_passable()
        refs = self.refs
        return refs[0] if self._is_single else Gathered(refs)

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
    def _recipients(self) -> Recipients:
        """The workers that the call reaches, which may have been planned again while it waited."""
        arrivals = self._poll()
        recipients: Recipients = self._planned.recipients if arrivals is None else arrivals.sent.call.recipients
        return recipients

    @property
    def _ranks(self) -> Sequence[int]:
        return self._recipients.called

    @property
    def _positions(self) -> Sequence[int]:
        """The positions of the workers that return a result, in the order of the results."""
        return self._recipients.positions[0]

    def _until(self, timeout: float | None) -> Deadline:
        """Return the deadline of a wait: `timeout` seconds from now, or without a timeout that of the call."""
        return self._planned.deadline if timeout is None else Deadline.after(check_timeout("timeout", timeout))

    def _check_open(self) -> None:
        """Refuse to wait for a call that was cancelled, or whose Ray has ended."""
        if self._cancelled:
            raise cancelled_error(self._planned.method.name, self._cancelled)
        self._core.connection.check()

    @property
    def _arrivals(self) -> Arrivals:
        """What has come back of the call. If it is not sent yet, wait for that until its deadline."""
        return self._wait_until_sent(self._planned.deadline)

    def _poll(self) -> Arrivals | None:
        """Return what has come back; None if the call has not been sent yet, or could not be sent."""
        sending = self.sending
        if self._latest is not None or sending is None or not sending.done():
            return self._latest
        if not sending.cancelled() and sending.exception() is None:
            self._latest = Arrivals(self._core, sending.result(), self._cancelled)
        return self._latest

    def _wait_until_sent(self, deadline: Deadline) -> Arrivals:
        """Wait until the call has been sent, and return what has come back."""
        while (arrivals := self._latest or self._poll()) is None:
            assert self.sending is not None
            try:
                error = self.sending.exception(deadline.left())
            except CancelledError:
                raise cancelled_error(self._planned.method.name, self._cancelled) from None
            except TimeoutError:
                raise self._core.unsent_error(self._planned) from None
            if error is not None:
                raise error.with_traceback(None)
        return arrivals

    def _result(self, deadline: Deadline) -> Any:
        """Wait for all called workers and fetch the results; the first failure ends the wait or repeats the call."""
        while True:
            self._check_open()
            arrivals = self._wait_until_sent(deadline)
            try:
                return arrivals.result(deadline, arrivals.check_late)
            except RayError as error:  # every exception of a worker, and none of a signal handler here
                failure = arrivals.failure(error, deadline)
            # A restart takes seconds.
            if not isinstance(failure, WorkerFailureError) or not self._repeat(arrivals, deadline):
                raise failure

    async def _wait_on_loop(self) -> Any:
        with short_traceback():
            try:
                return await self._result_on_loop(self._until(None))
            except asyncio.CancelledError:
                if self._core.connection.is_open:
                    # A second cancellation ends this wait, but not the thread.
                    await asyncio.shield(asyncio.to_thread(self.cancel))
                raise

    async def _result_on_loop(self, deadline: Deadline) -> Any:
        """Wait for the last reply on the event loop. Whatever is not a plain success is settled by `_result`."""
        self._check_open()
        if self._poll() is None and self.sending is not None:
            await until(self.sending.add_done_callback, deadline)
        arrivals = self._wait_until_sent(deadline)
        ends = list(map(end_of, arrivals.sent.replies))
        await until(partial(watch, ends), deadline, arrivals.check_late)
        if not self._yields_items:
            with contextlib.suppress(RayError, NotYet):
                return arrivals.result(Deadline.after(0.0), None)
        return await asyncio.to_thread(self._result, deadline)

    def _stream(self, timeout: float | None, turn_s: float | None) -> Generator[list[Outcome]]:
        """Yield the items of generators as they arrive; see `stream`."""
        self._check_open()
        deadline = self._until(timeout)
        arrivals = self._wait_until_sent(deadline)
        streams = {arrivals.sent.replies[position]: position for position in self._positions}
        waiting = list(streams)
        while waiting or any(map(taken, streams)):
            # One item of each worker that has one, then the next round: Ray prefers some workers to others.
            if not any(map(taken, streams)):
                if not (news := wait_for_news(waiting, deadline, arrivals.check_late, turn_s)):
                    yield []
                waiting = [stream for stream in waiting if not news.get(stream)]
            for stream, position in streams.items():
                if not (items := taken(stream)):
                    continue
                # An item that cannot be fetched is kept: an error is raised again, and a timeout loses nothing.
                value = arrivals.value(items[0], deadline)
                del items[0]
                items.handed_out += 1
                yield [arrivals.make_outcome(position, value)]
                del value
                deadline = self._until(timeout)  # of the next item
        # A stream whose worker has died just stops; the completion has the error.
        for end in map(end_of, arrivals.sent.replies):
            arrivals.value(end, self._until(timeout))

    def _iterate(self, turn_s: float | None) -> Generator[list[Outcome]]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed."""
        deadline = self._planned.deadline
        self._core.connection.check()
        arrivals = self._wait_until_sent(deadline)
        waiting = {reply: position for position, reply in enumerate(arrivals.sent.replies)}
        answering = frozenset(self._positions)
        while waiting:
            if not (news := wait_for_news(list(waiting), deadline, arrivals.check_late, turn_s)):
                yield []
            for position in [waiting.pop(reply) for reply, has_ended in news.items() if has_ended]:
                outcome = arrivals.outcome(position)
                if position in answering or outcome.error is not None:
                    yield [outcome]

    def _repeat(self, arrivals: Arrivals, deadline: Deadline) -> bool:
        """Repeat an attempt if retries are left; return whether there is another one. One thread repeats it."""
        self._check_open()
        if not self._planned.options.retries:
            return False
        mine = _world.current.event()
        while self._latest is arrivals:
            with self._core.turn:
                other = self._repeating
                self._repeating = other or mine
            if other is None:
                try:
                    return self._send_again(arrivals.sent, deadline)
                finally:
                    self._repeating = None
                    mine.set()
            if not wait_for_event(other, deadline):
                raise arrivals.late_error(arrivals.pending())
        return True

    def _send_again(self, sent: Sent, deadline: Deadline) -> bool:
        """Send the requests to lost workers again, or to all if all were restarted; return whether that is due."""
        lost = [position for position, reply in enumerate(sent.replies) if self._core.is_lost(reply)]
        # Without a lost worker the error is the worker's own, about a group that it uses.
        if self._attempts == self._planned.options.retries or not lost:
            return False
        if self._core.restarts_all:
            lost = list(range(len(sent.replies)))
        ranks = [sent.call.called[position] for position in lost]
        requests = [sent.call.requests[position] for position in lost]
        recipients = Recipients(ranks, ranks, None)
        again = self._core.send(
            replace(sent.call, recipients=recipients, requests=requests, deadline=deadline, replan=None)
        )
        replies = dict(enumerate(sent.replies)) | dict(zip(lost, again.replies, strict=True))
        self._latest = Arrivals(self._core, Sent(sent.call, list(replies.values()), again.epoch), self._cancelled)
        self._attempts += 1
        return True

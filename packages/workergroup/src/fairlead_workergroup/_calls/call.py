# SPDX-License-Identifier: Apache-2.0
"""One call: its results, outcomes, items, cancellation and repetition, and its use as an argument of other calls."""

import asyncio
import contextlib
import itertools
import logging
from asyncio import _get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from fairlead_placement import PlacementError
from fairlead_sharding import NamedSharding

from .. import _world
from .._membership.core import Core, Sent
from .._membership.losses import diagnose
from .._observe.calls import Outcome
from .._observe.query import cancel_calls, late_workers
from .._ray_private import end_of, is_stream
from .._start.worker_class import Method
from .._transport import replies, wait
from .._transport.arguments import Arguments, Gathered, PassedOn
from .._transport.replies import NotYet, short_traceback
from .._transport.wait import ON_THREAD, ResultStream, Waiter, block, iterate, iterate_on_loop
from .._world import NEVER, Deadline, Event, check_timeout, wait_for_event
from ..exceptions import CallCancelledError, CallTimeoutError, StaleGroupError, WorkerFailureError, WorkerGroupError
from .plan import CallOptions, Column, PlannedCall, Recipients, make_columns, make_requests, replicate
from .refusals import is_cancellation, refused_epochs, refused_error
from .results import MultiWorkerFuture, ResultFetcher

if TYPE_CHECKING:
    # Only the one of typing_extensions has a default before Python 3.13.
    from typing_extensions import TypeVar

    Result = TypeVar("Result", default=Any, covariant=True)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)

logger = logging.getLogger(__name__)

# A request reaches a worker that is not busy within this time.
REFUSED_S = 1.0


def dispatch(
    core: Core,
    owner: object,  # the group, which stays alive as long as a caller waits for the call
    method: Method,
    recipients: Recipients,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CallOptions,
    *,
    column: Callable[[Any], Column] = replicate,  # returns who gets which part of an argument
    blocks: bool = False,  # whether the thread waits although it runs an event loop
    queues: bool = True,  # whether a call of an event loop that has to wait is sent later, and not refused
    sharding: NamedSharding | None = None,  # the axes that it was planned on; None if ranks were given by number
    is_hook: bool = False,  # whether it belongs to the change that is under way, and does not wait for it
    replan: Callable[[], tuple[Recipients, NamedSharding]] | None = None,  # if its values fit any size of the group
) -> "Call[Any]":
    """Check a call, store the values that have to be stored, and send it."""
    began = _world.current.now()
    if options.retries:
        core.check_retries(options.retries)
    timeout_s = core.call_timeout_s if options.timeout is None else options.timeout
    deadline = NEVER if timeout_s is None else Deadline(began + timeout_s)
    call = PlannedCall(method, recipients, (), began, deadline, options, sharding, is_hook=is_hook)
    if not is_hook:
        try:
            core.admit(call)  # before anything is stored
        except StaleGroupError:
            if replan is None:
                raise
    # Before this call's turn: storing a large value must not delay the calls of other threads.
    prepare, names = Arguments().prepare, list(kwargs)
    columns = make_columns(method, args, kwargs, column, prepare)
    if method.function is not None:
        columns = [Column([prepare(method.function)]), *columns]
    call = replace(call, requests=make_requests(method, recipients, columns, names))
    if replan is not None:

        def plan_again() -> PlannedCall:
            now, sharding = replan()
            return replace(call, recipients=now, requests=make_requests(method, now, columns, names), sharding=sharding)

        call = replace(call, replan=plan_again)
    # The public function raises an exception if there is no loop, and every call asks.
    if blocks or _get_running_loop() is None:
        return Call(core, owner, call, core.send(call))
    return Call(core, owner, call, core.send_or_queue(call) if queues else core.send(call, Deadline.after(0.0)))


def cancel(core: Core, sent: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
    """Drop the requests of a call that have not started; return the ranks that run it, which `force` kills.

    Args:
        core: of the group.
        sent: the reply of each rank.
        method: the name of the method, for the report of the losses.
        force: kill the workers that run it; not their successors, if they have been replaced in the meantime.
    """
    workers = {rank: core.find(replies.actor_of(reply)) or core.now[rank] for rank, reply in sent.items()}
    calls = [(workers[rank], reply) for rank, reply in sent.items()]
    running = cancel_calls(calls, in_order=not core.described.worker_class.concurrent)
    if force:  # a shutdown kills them anyway
        killed = [workers[rank] for rank in running if core.is_present(workers[rank])]
        for worker in killed:
            ray.kill(worker.handle)
        cause = f"its call of {method!r} was cancelled with force"
        core.note([(worker, worker.failure("cancelled", cause)) for worker in killed])
    return running


def call_hook(core: Core, method: str, ranks: Sequence[int], deadline: Deadline) -> "Call[Any]":
    """Send a method of the class to ranks, as a part of the change of membership that is under way."""
    options = CallOptions(timeout=deadline.left(), discard=True)
    recipients = Recipients(list(ranks), [], [False] * len(ranks))
    found = core.described.worker_class.find(method)
    return dispatch(core, None, found, recipients, (), {}, options, blocks=True, is_hook=True)


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
        self._cancelled: tuple[int, ...] = ()  # the ranks that had not finished when the call was cancelled
        self._items: dict[int, list[ObjectRef[Any]]] = {}  # that have arrived, by position
        self._handed_out: dict[int, int] = {}  # how many of them stream() has yielded, by position
        self._attempts = 0
        # Once workers have refused a call of a handle: the latest epoch among them, and the ranks that have not.
        self._refused: tuple[int, tuple[int, ...]] | None = None
        # What happens when a thread has tried to repeat an attempt, by the attempt and the number of the try.
        # `setdefault` lets one thread at a time try, without a lock.
        self._repeating: dict[tuple[int, int], Event] = {}

    def result(self, timeout: float | None = None) -> Result:
        """Wait for all called workers and fetch the results, and nothing else.

        Args:
            timeout: the seconds to wait for the workers from now; None to wait until the deadline of the call, if it
                has one. After a timeout you can ask again.

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
            self._wait(self._until(timeout))
            unfinished = self._unfinished_errors()
            wanted, others = self._call.recipients.positions
            outcomes = [
                self._make_outcome(at, error=unfinished[at]) if at in unfinished else self._outcome(at)
                for at in (*wanted, *others)
            ]
            return outcomes[: len(wanted)] + [one for one in outcomes[len(wanted) :] if one.error is not None]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all called workers have finished or failed.

        Args:
            timeout: as for `result`.

        Returns:
            Whether they have within that time.
        """
        return self._wait(self._until(timeout))

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
        return f"Call({self._planned.method.name!r}, {self._describe()}, {len(self._positions)} results)"

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
        return self._has_failed_to_send or (self._is_sent and not self._pending())

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
        if self._withdraw(force=force):
            return []
        pending, sent = self._pending(), self._wait_until_sent(NEVER)
        if not pending:
            return []
        self._cancelled = tuple(self._ranks[at] for at in pending)
        parts = {self._ranks[at]: sent.replies[at] for at in pending}
        return cancel(self._core, parts, self._planned.method.name, force=force)

    def get_results(
        self, worker_group: ResultFetcher | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Return what `result` fetches, always as a flat list; compatible with NeMo RL.

        Args:
            worker_group: not needed, because a call knows its group.
            return_generators_as_proxies: return each generator as it is, an iterator of ObjectRefs.

        Returns:
            The results in order. The items of a generator stand at its place.

        Raises:
            Exception: as `result` does.
        """
        if self._yields_items and return_generators_as_proxies:
            self._check_open()
            return self.refs
        values: Any = self.result()
        values = [] if self._planned.options.discard else [values] if self._is_single else values
        return [item for items in values for item in items] if self._yields_items else values

    def as_argument(self) -> ObjectRef[Any] | Gathered:
        """Return the reference that travels to the workers of another call.

        Raises:
            ValueError, TypeError: the call has no result that can be passed on.
        """
        self._check_passable()
        refs = self.refs
        return refs[0] if self._is_single else Gathered(tuple(refs))

    def as_arguments(self) -> list[ObjectRef[Any]]:
        """Return each result as an argument of another call.

        Raises:
            ValueError, TypeError: the call has no results that can be passed on, or only one.
        """
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
        sending = self.sending
        return sending is None or (sending.done() and not self._has_failed_to_send)

    @property
    def _has_failed_to_send(self) -> bool:
        """Whether it was cancelled before it was sent, or its workers could not be restarted."""
        sending = self.sending
        return sending is not None and sending.done() and (sending.cancelled() or sending.exception() is not None)

    def _describe(self) -> str:
        """Return the state of the call in words."""
        if self._cancelled:
            return "cancelled"
        if not self._core.connected:
            return "its Ray has been shut down"
        if not self._is_sent:
            return "could not be sent" if self._has_failed_to_send else "waits to be sent"
        return f"{len(self._ranks) - len(self._pending())} of {len(self._ranks)} workers done"

    def _until(self, timeout: float | None) -> Deadline:
        """Return the deadline of a wait: that of the call, or `timeout` seconds from now if that is sooner."""
        deadline = self._planned.deadline
        return deadline if timeout is None else deadline.sooner(Deadline.after(check_timeout("timeout", timeout)))

    def _check_open(self) -> None:
        """Refuse to wait for a call that was cancelled, or whose Ray has ended."""
        if self._cancelled:
            raise CallCancelledError(self._planned.method.name, self._cancelled)
        self._core.connection.check()

    def _wait_until_sent(self, deadline: Deadline) -> Sent:
        """Wait until the call has been sent, and return what has been."""
        if self._sent is not None:
            return self._sent
        assert self.sending is not None
        try:
            error = self.sending.exception(deadline.left())
        except CancelledError:
            raise CallCancelledError(self._planned.method.name, self._cancelled) from None
        except TimeoutError:
            raise self._core.unsent_error(self._planned) from None
        if error is not None:
            raise error.with_traceback(None)
        self._sent = self.sending.result()
        return self._sent

    async def _until_sent(self, on: Waiter, deadline: Deadline) -> Sent:
        """Wait until the call has been sent, on a thread or an event loop."""
        if self._sent is None and self.sending is not None:
            await on.sent(self.sending, deadline.left())
        return self._wait_until_sent(Deadline.after(0.0))

    def _result(self, deadline: Deadline) -> Any:
        """Wait for all called workers and fetch the results; the first failure ends the wait or repeats the call."""
        while True:
            self._check_open()
            sent = self._wait_until_sent(deadline)
            attempt = self._attempts
            try:
                if not self._yields_items:
                    return self._shape(sent, replies.values(self._in_order(sent), deadline, self._check_late))
                wait.drain(self._unfinished(sent), lambda: deadline, self._check_late)
                return self._shape(sent, [self._get_items(at) for at in self._positions])
            except RayError as error:  # every exception of a worker, and none of a signal handler here
                failure = self._failure(error)
            # A restart takes seconds.
            if not isinstance(failure, WorkerFailureError) or not self._repeat(attempt, deadline):
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
        async with wait.OnLoop() as on:
            sent = await self._until_sent(on, deadline)
        if self._planned.method.backpressure is None:  # otherwise the generators end only when their items are taken
            await wait.until_ended(list(map(end_of, sent.replies)), deadline, self._check_late)
            if not self._yields_items:
                with contextlib.suppress(RayError, NotYet):
                    return self._shape(sent, replies.values(self._in_order(sent), Deadline.after(0.0)))
        return await asyncio.to_thread(self._result, deadline)

    def _in_order(self, sent: Sent) -> list[Any]:
        """Return the replies of the workers that return a result, in the order of the results, then the others."""
        wanted, others = sent.call.recipients.positions
        return list(map(sent.replies.__getitem__, [*wanted, *others]))

    def _shape(self, sent: Sent, values: list[Any]) -> Any:
        """Return the result of the call for the values of `_in_order`, of which the first ones are the results."""
        wanted, others = sent.call.recipients.positions
        if self._planned.options.discard:
            return None
        return values[0] if self._is_single else values[: len(wanted)] if others else values

    def _unfinished(self, sent: Sent) -> dict[Any, list[ObjectRef[Any]] | None]:
        """Return the replies of the call, each with the list that keeps its items if it is that of a generator."""
        return {
            reply: self._items.setdefault(at, []) if is_stream(reply) else None for at, reply in enumerate(sent.replies)
        }

    def _get_items(self, at: int) -> list[Any]:
        """Return the items of a generator that has ended."""
        items = self._items.setdefault(at, [])
        wait.drain({self.futures[at]: items}, lambda: NEVER, self._check_late)
        values = replies.values(items)
        if count := self._handed_out.get(at):
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self._planned.method.name!r} of rank {self._ranks[at]}, "
                "and they are not kept. Take the rest from stream() too, or make the call again and ask for its result "
                "only."
            )
        return values

    async def _stream(self, timeout: float | None, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield the items of generators as they arrive; see `stream`."""
        self._check_open()
        deadline = self._until(timeout)
        sent = await self._until_sent(on, deadline)
        streams = {sent.replies[at]: at for at in self._positions}
        while streams:
            # One item of each worker that has one, then the next round: Ray prefers some workers to others.
            if not any(self._items.get(at) for at in streams.values()):
                kept = {stream: self._items.setdefault(at, []) for stream, at in streams.items()}
                news = await on.some(kept, deadline, self._check_late, here=True, most=1)
                streams = {stream: at for stream, at in streams.items() if not news.get(stream)}
            for at in [at for at in streams.values() if self._items.get(at)]:
                # An item that cannot be fetched is kept: an error is raised again, and a timeout loses nothing.
                value = await self._fetch(on, self._items[at][0], deadline)
                self._handed_out[at] = self._handed_out.get(at, 0) + 1
                del self._items[at][0]
                yield self._make_outcome(at, value)
                del value
                deadline = self._until(timeout)  # of the next item
        # A stream whose worker has died just stops; the completion has the error.
        for end in map(end_of, sent.replies):
            await self._fetch(on, end, self._until(timeout))

    async def _fetch(self, on: Waiter, ref: Any, deadline: Deadline) -> Any:
        """Return the value of a reference that is here or will be soon, or raise the failure of the call."""
        try:
            (value,) = replies.values([ref], deadline, self._check_late) if on.blocks else await on.values([ref])
        except RayError as error:
            raise (await on.apart(self._failure, error))  # noqa: B904  chained there
        return value

    async def _iterate(self, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed."""
        deadline = self._planned.deadline
        self._core.connection.check()
        sent = await self._until_sent(on, deadline)
        at_of, answering = {reply: at for at, reply in enumerate(sent.replies)}, frozenset(self._positions)
        waiting = self._unfinished(sent)
        while waiting:
            news = await on.some(waiting, deadline, self._check_late)
            for reply in [reply for reply, has_ended in news.items() if has_ended]:
                del waiting[reply]
                outcome = await on.apart(self._outcome, at := at_of[reply])
                if at in answering or outcome.error is not None:
                    yield outcome

    def _wait(self, deadline: Deadline) -> bool:
        """Wait until all called workers have finished; see `wait`."""
        waiting = self._unfinished(self._wait_until_sent(deadline))
        if self._planned.method.backpressure is None:  # otherwise the generators end only when their items are taken
            waiting = {end_of(reply): None for reply in waiting}
        while waiting:
            self._core.connection.check()
            news = block(ON_THREAD.news(waiting, deadline.left(at_most=replies.REPORT_EVERY_S)))
            waiting = {reply: items for reply, items in waiting.items() if not news.get(reply)}
            if deadline.passed:
                return not self._pending()
            if not news:
                self._check_late(Deadline())
        return True

    def _outcome(self, at: int) -> Outcome:
        """Return the outcome of a called worker that has finished."""
        reply = self.futures[at]
        try:
            value: Any = self._get_items(at) if is_stream(reply) else replies.values([reply])[0]
        except (RayError, WorkerGroupError) as error:
            if self._ranks[at] in self._cancelled:
                return self._make_outcome(at, error=CallCancelledError(self._planned.method.name, (self._ranks[at],)))
            # A call of the owner is never refused; an argument of it may be.
            if not self._core.is_owner and refused_epochs(error) is not None:
                raise self._refused_error() from None
            own = [end_of(reply), *self._items.get(at, ())[-1:]]
            return self._make_outcome(at, error=diagnose(own, error, self._core, self._planned.method.name))
        return self._make_outcome(at, value)

    def _make_outcome(self, at: int, value: Any = None, error: BaseException | None = None) -> Outcome:
        return Outcome(self._ranks[at], dict(self._core.now[self._ranks[at]].coords), value, error)

    def _unfinished_errors(self) -> dict[int, BaseException]:
        """Return the reason why each unfinished worker has no outcome yet, by position, from one request a node."""
        pending = self._pending()
        if self._cancelled or not pending:
            return {at: CallCancelledError(self._planned.method.name, (self._ranks[at],)) for at in pending}
        late = self._late_error(pending)
        return {
            at: CallTimeoutError(late.method, late.waited_s, late.called, (worker,))
            for at, worker in zip(pending, late.late, strict=True)
        }

    def _pending(self) -> list[int]:
        """Return the positions of the workers that have not finished."""
        self._core.connection.check()
        at_of = {end_of(reply): at for at, reply in enumerate(self.futures)}
        return [at_of[ref] for ref in replies.wait(list(at_of))[1]]

    def _check_late(self, deadline: Deadline) -> Deadline:
        """Log the workers that have not finished; return the deadline of the rest of the wait.

        When all have finished, only their values are on the way, which does not count against the deadline.
        """
        if not self._is_sent and not self._has_failed_to_send:
            if deadline.passed:
                raise self._core.unsent_error(self._planned)
            return deadline
        if not (pending := self._pending()):
            return Deadline()
        late = self._late_error(pending)
        if deadline.passed:
            raise late
        logger.warning("%s", late)
        return deadline

    def _late_error(self, pending: Sequence[int]) -> CallTimeoutError:
        """Return the error that says what the workers at these positions are doing."""
        late = late_workers([self._core.now[self._ranks[at]] for at in pending])
        waited_s = _world.current.now() - self._planned.began
        return CallTimeoutError(self._planned.method.name, waited_s, len(self._ranks), late)

    def _withdraw(self, *, force: bool) -> bool:
        """Give up a call that has not been sent; return False, and do nothing, if it has been."""
        sending = self.sending
        if sending is None or self._is_sent:
            return False
        if not self._has_failed_to_send:
            self._cancelled = tuple(self._ranks)
        if not sending.cancel():  # it is being sent now

            def drop(sent: Future[Sent]) -> None:
                if sent.exception() is None:
                    parts = dict(zip(sent.result().call.recipients.called, sent.result().replies, strict=True))
                    cancel(self._core, parts, self._planned.method.name, force=force)

            sending.add_done_callback(drop)
        return True

    def _repeat(self, attempt: int, deadline: Deadline) -> bool:
        """Repeat an attempt on lost workers, or on all if all were restarted; return whether there is another one."""
        self._check_open()
        if not self._planned.options.retries:
            return False
        mine, at = _world.current.event(), 0
        try:
            while self._attempts == attempt:
                if (other := self._repeating.setdefault((attempt, at), mine)) is mine:
                    return self._send_again(deadline)
                if not wait_for_event(other, deadline):  # another thread repeats it
                    raise self._late_error(self._pending())
                at += 1
            return True
        finally:
            mine.set()

    def _send_again(self, deadline: Deadline) -> bool:
        sent = self._wait_until_sent(deadline)
        lost = [at for at, reply in enumerate(sent.replies) if self._core.is_lost(reply)]
        # Without a lost worker the error is the worker's own, about a group that it uses.
        if self._attempts == self._planned.options.retries or not lost:
            return False
        if self._core.policy.restarts_all:
            lost = list(range(len(sent.replies)))
        ranks = [sent.call.recipients.called[at] for at in lost]
        requests = [sent.call.requests[at] for at in lost]
        part = replace(sent.call, recipients=Recipients(ranks, ranks, None), requests=requests, deadline=deadline)
        again, merged = self._core.send(replace(part, replan=None)), list(sent.replies)
        for at, reply in zip(lost, again.replies, strict=True):
            merged[at] = reply
            self._items.pop(at, None)
            self._handed_out.pop(at, None)
        self._sent = Sent(sent.call, merged, again.epoch)
        self._attempts += 1
        return True

    def _failure(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of Ray, with all ranks that have failed so far."""
        if type(error) is CallTimeoutError:  # that of a worker arrives as an instance of a class that Ray derives
            return error
        self._check_open()
        # A generator that raises gives its error as its last item.
        ends = [*map(end_of, self.futures), *(items[-1] for items in self._items.values() if items)]
        name = self._planned.method.name
        failure = diagnose(list(dict.fromkeys(ends)), error, self._core, name, self._planned.deadline)
        if isinstance(failure, WorkerFailureError) or self._core.is_owner:
            return failure
        # The error of an item may be here before its generator has ended.
        is_refused = refused_epochs(error) is not None or self._find_refusals()
        return self._refused_error() if is_refused else failure

    def _find_errors(self) -> dict[int, BaseException | None]:
        """Return the error of each worker that has finished, by position; None if it has none, or had items before.

        Errors are here as soon as a worker has finished. The values of others stay where they are.
        """
        errors: dict[int, BaseException | None] = {}
        futures, pending = self.futures, set(self._pending())
        for at in set(range(len(futures))) - pending:
            items = self._items.setdefault(at, [])
            if self._yields_items and at in self._positions and not items:
                items.extend(itertools.islice(futures[at], 1))
            # An item may still be on its way.
            errors[at] = replies.error_of(items[0], REFUSED_S) if items else None
            errors[at] = errors[at] or replies.error_of(end_of(futures[at]))
        return errors

    def _find_refusals(self) -> list[tuple[int, int]]:
        """Return the epochs of the call and of the worker for each worker that has refused a call of a handle."""
        return [epochs for error in self._find_errors().values() if (epochs := refused_epochs(error)) is not None]

    def _refused_error(self) -> StaleGroupError:
        """Return the error of a call of a handle that workers have refused; cancel the rest of the call.

        Even if the caller's timeout is shorter, this waits up to 1 s (`REFUSED_S`) for the other workers, so that the
        error can name those that have run the call, and up to 2 s more for the new roster.
        """
        sent, name = self._wait_until_sent(NEVER), self._planned.method.name
        if self._refused is None:
            replies.wait(list(map(end_of, sent.replies)), REFUSED_S)
            ran: list[int] = []
            if pending := self._pending():  # workers that run it may wait for those that have refused it
                ran += cancel(self._core, {self._ranks[at]: sent.replies[at] for at in pending}, name, force=False)
            epoch = max([sent.epoch, *(own for _, own in self._find_refusals())])
            for at, error in self._find_errors().items():
                dropped = at in pending and is_cancellation(error)
                if refused_epochs(error) is None and self._ranks[at] not in ran and not dropped:
                    ran.append(self._ranks[at])
            with contextlib.suppress(WorkerGroupError, PlacementError):  # the next call raises it
                self._core.renew(epoch)
            self._refused = epoch, tuple(sorted(ran))
        return refused_error(name, sent.epoch, self._ranks, *self._refused)

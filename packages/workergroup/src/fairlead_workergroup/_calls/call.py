# SPDX-License-Identifier: Apache-2.0
"""The handle of one call: its results, outcomes and cancellation, and its use as an argument of other calls."""

import asyncio
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from ray import ObjectRef

from fairlead_sharding import NamedSharding

from .. import _world
from .._observe.calls import Outcome
from .._start.worker_class import Method
from .._transport.arguments import Arguments, Gathered, PassedOn
from .._transport.futures import (
    ON_THREAD,
    OnLoop,
    ResultStream,
    block,
    iterate,
    iterate_on_loop,
    short_traceback,
)
from .._world import NEVER, Deadline, check_timeout
from .execution import Execution
from .plan import CallOptions, Column, Recipients
from .results import MultiWorkerFuture, ResultFetcher
from .sender import Order, Sender, make_requests, store_columns

if TYPE_CHECKING:
    # Only the one of typing_extensions has a default before Python 3.13.
    from typing_extensions import TypeVar

    Result = TypeVar("Result", default=Any, covariant=True)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)


def dispatch(
    sender: Sender,
    owner: object,  # the group, which stays alive as long as a caller waits for the call
    method: str | Callable[..., Any] | Method,
    recipients: Recipients,
    args: Sequence[Column],
    kwargs: Mapping[str, Column],
    options: CallOptions,
    *,
    may_wait: bool = True,  # on an event loop, send the call later instead of blocking the loop
    sharding: NamedSharding | None = None,  # the axes that it was planned on; None if ranks were given by number
    passes: bool = False,  # whether it belongs to the change that is under way, and does not wait for it
) -> Execution:
    """Check a call, store the values that have to be stored, and send it."""
    began = _world.current.now()
    if options.retries:
        sender.check_retries(options.retries)
    method = sender.described.worker_class.find(method)
    timeout_s = sender.call_timeout_s if options.timeout is None else options.timeout
    deadline = NEVER if timeout_s is None else Deadline(began + timeout_s)
    order = Order(method, recipients.called, (), began, deadline, sharding, passes=passes)
    if not passes:
        sender.admit(order, early=True)  # before anything is stored
    # Before this call's turn: storing a large value must not delay the calls of other threads.
    columns = store_columns(method, args, kwargs, Arguments())
    requests = make_requests(method, recipients, columns, list(kwargs))
    order = order._replace(requests=list(requests) if options.retries else requests)
    # The public function raises an exception if there is no loop, and every call asks.
    blocking = not may_wait or _get_running_loop() is None
    sent = sender.send(order) if blocking else sender.send_or_queue(order)
    return Execution(sender, owner, order, sent, recipients, options)


class Call(PassedOn, MultiWorkerFuture, Generic[Result]):
    """A call of a method on the workers of a group. `RayWorkerGroup.call` makes it.

    `result()` waits for the result; `outcomes()` reports the outcome of every worker; iteration, also with `async for`,
    yields an `Outcome` as each worker finishes. `await` returns what `result()` returns, and the cancellation of the
    awaiting task cancels the call. None of these consumes anything: after a timeout you can ask again.

    A call can be an argument of another call. Then it stands for its results, which go from worker to worker: a `Call`
    made with `collect=()` stands for its one result, `Shard(call, axis)` and `PerWorker(call)` for one result each, and
    any other `Call` for the list of results.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

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
            result: Result = block(self._execution.results(ON_THREAD, timeout))
            return result

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """Return the outcome of every worker; never raise the exception of a worker.

        Args:
            timeout: as for `result`. The error of a worker that has not finished is a `CallTimeoutError`.

        Returns:
            The outcomes of the workers that return a result, in the order of `result()`, then those of other workers
            that failed.
        """
        return list(iterate(partial(self._execution.outcomes, timeout)))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all called workers have finished or failed.

        Args:
            timeout: as for `result`.

        Returns:
            Whether they have within that time.
        """
        return block(self._execution.wait(ON_THREAD, timeout))

    def __iter__(self) -> Iterator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed.

        Raises:
            CallTimeoutError: the deadline of the call has passed.
        """
        return iterate(self._execution.iterate)

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait_on_loop().__await__()

    async def _wait_on_loop(self) -> Result:
        with short_traceback():
            try:
                async with OnLoop() as loop:
                    result: Result = await self._execution.results(loop)
                    return result
            except asyncio.CancelledError:
                if self._execution.connected:
                    # A second cancellation ends this wait, but not the thread.
                    await asyncio.shield(asyncio.to_thread(self._execution.cancel))
                raise

    def __aiter__(self) -> AsyncIterator[Outcome]:
        return iterate_on_loop(self._execution.iterate)

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:  # not that of a `MultiWorkerFuture`
        return self is other

    def __repr__(self) -> str:
        execution = self._execution
        return f"Call({execution.method.name!r}, {execution.describe()}, {len(execution.positions)} results)"

    @property
    def futures(self) -> list[Any]:  # type: ignore[override]
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        return self._execution.futures

    # Copies: a plan is cached for later calls, and a user may change the lists of this one.
    @property
    def return_from_workers(self) -> list[int] | None:  # type: ignore[override]
        """The ranks that return a result, in the order of the results."""
        return [self._execution.ranks[at] for at in self._execution.positions]

    @property
    def called_workers(self) -> list[int] | None:  # type: ignore[override]
        """The ranks that are called, in the order of `futures`."""
        return list(self._execution.ranks)

    @property
    def epoch(self) -> int:
        """The epoch of the group in which the workers run the call; see `GroupState.epoch`.

        If the call is not sent yet, wait for that until its deadline. Of a call that was repeated after a restart, it
        is the epoch of the last repetition.
        """
        return self._execution.epoch

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the results, in the order of `result()`; for a generator method, its generators."""
        return [self.futures[at] for at in self._execution.positions]

    def done(self) -> bool:
        """Return whether all called workers have finished or failed, or could not be called."""
        return self._execution.done()

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
        execution = self._execution
        if not execution.yields_items:
            raise TypeError(f"{execution.method.name!r} is not a generator method: it returns its result in one piece")
        return ResultStream(partial(execution.stream, timeout))

    def cancel(self, force: bool = False) -> list[int]:
        """Give the call up: drop its queued requests, and cancel async methods that overlap with others.

        Any other running method cannot be interrupted: it runs to its end, and its value is dropped.

        Args:
            force: kill the workers that are running the method. The group has lost them then, with kind "cancelled".

        Returns:
            The ranks that are still running the method, or may be, because their node does not answer; with `force`,
            the ranks that were killed.
        """
        return self._execution.cancel(force=force)

    def get_results(
        self, worker_group: ResultFetcher | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Return what `result` fetches, always as a flat list; compatible with the original system.

        Args:
            worker_group: not needed, because a call knows its group.
            return_generators_as_proxies: return each generator as it is, an iterator of ObjectRefs.

        Returns:
            The results in order. The items of a generator stand at its place.

        Raises:
            Exception: as `result` does.
        """
        execution = self._execution
        if execution.yields_items and return_generators_as_proxies:
            execution.check_open()
            return self.refs
        values: Any = self.result()
        values = [] if execution.options.discard else [values] if execution.is_single else values
        return [item for items in values for item in items] if execution.yields_items else values

    def as_argument(self) -> ObjectRef[Any] | Gathered:
        """Return the reference that travels to the workers of another call.

        Raises:
            ValueError, TypeError: the call has no result that can be passed on.
        """
        self._check_passable()
        refs = self.refs
        return refs[0] if self._execution.is_single else Gathered(tuple(refs))

    def as_arguments(self) -> list[ObjectRef[Any]]:
        """Return each result as an argument of another call.

        Raises:
            ValueError, TypeError: the call has no results that can be passed on, or only one.
        """
        execution = self._execution
        self._check_passable()
        if execution.is_single:
            raise ValueError(
                f"the call of {execution.method.name!r} has one result (collect=()): pass the call as it is"
            )
        return self.refs

    def _check_passable(self) -> None:
        execution = self._execution
        if execution.options.discard:
            raise ValueError(f"the call of {execution.method.name!r} has no result to pass on (discard=True)")
        if execution.yields_items:
            raise TypeError(
                f"{execution.method.name!r} is a generator method: stream or collect its items, and pass these on"
            )

# SPDX-License-Identifier: Apache-2.0
"""The handle of one call: its results, outcomes, cancellation, and its use as an argument of other calls."""

from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic

import ray
from ray import ObjectRef

from .._arguments import Answer, Gathered, PassedOn
from .._deadline import check_timeout
from .._display import table_html
from .._observe.statistics import CallStatistics, Outcome
from .errors import short_traceback
from .execution import Execution, SendState
from .results import REPORT_EVERY_S, MultiWorkerFuture, ResultFetcher
from .wait import ResultStream, iterate_outcomes, stream_items, wait_for

if TYPE_CHECKING:
    # Only the one of typing_extensions has a default before Python 3.13.
    from typing_extensions import TypeVar

    Result = TypeVar("Result", default=Any, covariant=True)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)


class Call(MultiWorkerFuture, PassedOn, Generic[Result]):
    """A call under way. `RayWorkerGroup.call` makes it; it is also a value that can be passed to another call.

    `result()` waits; `outcomes()` tells about every worker; iterating, also with `async for`, gives an `Outcome` as
    each worker finishes; `await` gives what `result()` would, and cancelling the task that awaits cancels the call.
    None of them consumes anything: what timed out can be asked for again. As an argument of another call it stands for
    its answers, which go from worker to worker: a `Call` made with `collect=()` for the one answer,
    `Shard(call, axis)` and `PerWorker(call)` for a piece each, and any other for the list of them.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        # Copies: a plan is kept for later calls, and a user may change the lists of this one.
        ranks = execution.ranks
        self.return_from_workers: list[int] | None = [ranks[at] for at in execution.positions]
        self.called_workers: list[int] | None = list(ranks)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        execution = self._execution
        if execution.cancelled:
            state = "cancelled"
        elif not execution.sender.roster.connected:
            state = "its Ray has been shut down"
        elif (sending := execution.send_state) is not SendState.SENT:
            state = sending.value
        else:
            count = len(self.futures)
            state = f"{count - len(execution.pending())} of {count} workers done"
        return f"Call({execution.method.name!r}, {state}, {len(execution.positions)} answer)"

    def _repr_html_(self) -> str:
        execution = self._execution
        sent = execution.send_state is SendState.SENT
        pending = set(execution.pending()) if sent and execution.sender.roster.connected else set()
        rows = [
            (
                rank,
                execution.coords(at),
                "not sent" if not sent else "not finished" if at in pending else "done",
                "yes" if at in execution.answering else "no",
            )
            for at, rank in enumerate(execution.ranks)
        ]
        return table_html(repr(self), ("rank", "coords", "state", "answers"), rows)

    @property
    def futures(self) -> list[Any]:  # type: ignore[override]
        """One future for each called worker. If the call is not sent yet, wait for that until its deadline."""
        return self._execution.futures

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the answers, in the order of `result()`; of a generator method, its generators."""
        return [self.futures[at] for at in self._execution.positions]

    def result(self, timeout: float | None = None) -> Result:
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
            WorkerGroupError: the group's Ray has been shut down, or `stream()` has handed out a part of the items.
            Exception: a worker's own exception, with its type and a note for each failing rank.
        """
        with short_traceback():
            result: Result = self._execution.result(timeout)
            return result

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """What every worker made of the call; never raises what a worker raised.

        Args:
            timeout: as of `result`. The error of a worker that has not finished is a `CallTimeoutError`.

        Returns:
            The outcomes of the workers that answer, in the order of `result()`, then those of others that failed.
        """
        execution = self._execution
        self.wait(timeout)
        unfinished = execution.unfinished_errors()
        wanted, others = execution.positions, execution.others
        of_others = [execution.outcome(at, unfinished) for at in others]
        return [
            *(execution.outcome(at, unfinished) for at in wanted),
            *(one for one in of_others if one.error is not None),
        ]

    def done(self) -> bool:
        """Whether all workers called have finished, or failed, or could not be called."""
        return (state := self._execution.send_state) is SendState.FAILED or (
            state is SendState.SENT and not self._execution.pending()
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all workers called have finished, or failed; whether they have within `timeout` seconds.

        Args:
            timeout: as of `result`.
        """
        execution = self._execution
        deadline = execution.until(timeout)
        execution.wait_until_sent(deadline)
        for _ in execution.drain_limited(deadline):
            pass
        while pending := execution.pending():
            left = deadline.left(at_most=REPORT_EVERY_S)
            refs = [execution.completions[at] for at in pending]
            ray.wait(refs, num_returns=len(refs), timeout=left, fetch_local=False)
            if deadline.passed:
                return self.done()
            execution.report_slow()
        return True

    def __iter__(self) -> Iterator[Outcome]:
        """Outcomes as workers finish: of those that answer, and of others that failed.

        Raises:
            CallTimeoutError: the deadline the call was made with has passed.
        """
        execution = self._execution
        execution.sender.roster.check_connected()
        execution.wait_until_sent(execution.deadline)
        answering = set(execution.positions)
        pending = dict.fromkeys(range(len(self.futures)))
        for at in execution.drain_limited(execution.deadline):
            del pending[at]
            yield execution.outcome(at, {})
        while pending:
            refs = {execution.completions[at]: at for at in pending}
            done, _ = ray.wait(
                list(refs), num_returns=1, timeout=execution.deadline.left(at_most=REPORT_EVERY_S), fetch_local=False
            )
            if not done:
                execution.check_late(execution.deadline)
            more, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
            for ref in dict.fromkeys([*done, *more]):
                del pending[refs[ref]]
                outcome = execution.outcome(refs[ref], {})
                if refs[ref] in answering or outcome.error is not None:
                    yield outcome

    def stream(self, timeout: float | None = None) -> ResultStream[Outcome]:
        """Return the items of a generator method as they arrive, each as an `Outcome`, for `for` and `async for`.

        All workers are served in turn. Each item is handed out once, and nothing keeps it in the object store
        afterwards: `result()` then raises instead of returning a part of the items. An error is raised again each time.

        Args:
            timeout: seconds to wait for the next item; None: until the deadline the call was made with, if any.

        Raises:
            TypeError: the method is no generator.
            CallTimeoutError: no item came in time; streaming again goes on where this ended.
            WorkerFailureError, Exception: as of `result`.
        """
        check_timeout("timeout", timeout)
        execution = self._execution
        if not execution.yields_items:
            raise TypeError(f"{execution.method.name!r} is no generator method; its result comes in one piece")
        return ResultStream(lambda: execution.iterate_items(timeout), lambda: stream_items(execution, timeout))

    def __await__(self) -> Generator[Any, None, Result]:
        return wait_for(self._execution).__await__()

    def __aiter__(self) -> AsyncIterator[Outcome]:
        return iterate_outcomes(self._execution)

    def cancel(self, force: bool = False) -> list[int]:
        """Give the call up: what is queued is dropped, async methods that overlap with others are cancelled.

        A method that is running otherwise cannot be interrupted: it runs on and its value is dropped.

        Args:
            force: end the workers that are running it (kind "cancelled"); the group has lost them then.

        Returns:
            The ranks that are still running it; with `force`, those that were, and have been ended.
        """
        return self._execution.cancel(force=force)

    def statistics(self) -> CallStatistics:
        """What it has cost so far."""
        execution = self._execution
        puts, bytes_put = execution.stored
        return CallStatistics(len(execution.ranks), puts, bytes_put, *execution.fetched, execution.submit_s)

    def get_results(
        self, worker_group: ResultFetcher | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """What `result` fetches, as a list however few answer; a generator's items stand at its place, flat.

        Args:
            worker_group: not needed: a call knows its group.
            return_generators_as_proxies: leave generators as they are: each an iterator of ObjectRefs.

        Raises:
            Exception: as of `result`.
        """
        execution = self._execution
        if execution.yields_items and return_generators_as_proxies:
            execution.check_open()
            return self.refs
        values: Any = self.result()
        values = [] if execution.discard else [values] if execution.single else values
        return [item for items in values for item in items] if execution.yields_items else values

    def made_by(self) -> str:
        """Return the name of the method that was called."""
        return self._execution.method.name

    def as_argument(self) -> ObjectRef[Any] | Gathered:
        """What travels to another call's workers in its place; ValueError, TypeError: nothing that could."""
        self._check_passable()
        return self.refs[0] if self._execution.single else Gathered(tuple(self.refs))

    def as_pieces(self) -> list[ObjectRef[Any]]:
        """What travels to another call's workers in place of each answer; ValueError, TypeError: nothing that could."""
        return [answer.ref for answer in self.answers()]

    def answers(self) -> list[Answer]:
        """Return each answer as an argument of another call.

        Raises:
            ValueError, TypeError: there is nothing to pass on.
        """
        execution = self._execution
        self._check_passable()
        if execution.single:
            raise ValueError(f"the call of {execution.method.name!r} has one answer (collect=()): pass it as it is")
        return [Answer(execution.method.name, ref) for ref in self.refs]

    def _check_passable(self) -> None:
        execution = self._execution
        if execution.discard:
            raise ValueError(f"the call of {execution.method.name!r} has no answer to pass on (discard=True)")
        if execution.yields_items:
            raise TypeError(
                f"{execution.method.name!r} is a generator method: stream or collect its items, pass these on"
            )

# SPDX-License-Identifier: Apache-2.0
"""One call of a group: who answers, when it is fetched, and what became of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic

import ray
from ray import ObjectRef

from .._arguments import Gathered
from .._deadline import check_timeout
from .._display import table_html
from .._marks import Answer, PassedOn
from ..exceptions import WorkerFailureError
from .errors import retrieve_late, short_traceback
from .execution import Underway
from .outcome import CallStatistics, Outcome
from .results import REPORT_EVERY_S
from .wait import ResultStream, arriving, as_completed, awaited

if TYPE_CHECKING:
    # Only the one of typing_extensions has a default before Python 3.13.
    from typing_extensions import TypeVar

    from .._group import RayWorkerGroup

    Result = TypeVar("Result", default=Any, covariant=True)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)

__all__ = ["Call"]


class Call(Underway, PassedOn, Generic[Result]):
    """A call under way. `RayWorkerGroup.call` makes it; it is also a value that can be passed to another call.

    `result()` waits; `outcomes()` tells about every worker; iterating, also with `async for`, gives an `Outcome` as
    each worker finishes; `await` gives what `result()` would, and cancelling the task that awaits cancels the call.
    None of them consumes anything: what timed out can be asked for again. As an argument of another call it stands for
    its answers, which go from worker to worker: a `Call` made with `collect=()` for the one answer,
    `Shard(call, axis)` and `PerWorker(call)` for a piece each, and any other for the list of them.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        if self._cancelled:
            state = "cancelled"
        elif not self._group._held.connected:
            state = "its Ray has been shut down"
        elif self._unsent:
            state = "waits to be sent"
        elif self._failed_to_send:
            state = "could not be sent"
        else:
            state = f"{len(self.futures) - len(self._pending())} of {len(self.futures)} workers done"
        return f"Call({self._method.name!r}, {state}, {len(self._positions[0])} answer)"

    def _repr_html_(self) -> str:
        sent = not (self._unsent or self._failed_to_send)
        pending = set(self._pending()) if sent and self._group._held.connected else set()
        rows = [
            (
                rank,
                self._coords(at),
                "not sent" if not sent else "not finished" if at in pending else "done",
                "yes" if at in self._answering else "no",
            )
            for at, rank in enumerate(self._ranks)
        ]
        return table_html(repr(self), ("rank", "coords", "state", "answers"), rows)

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the answers, in the order of `result()`; of a generator method, its generators."""
        return [self.futures[at] for at in self._positions[0]]

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
        deadline = self._until(timeout)
        with short_traceback():
            while True:
                attempt = self._attempt
                try:
                    result: Result = self._shaped(self._collected(deadline))
                    return result
                except WorkerFailureError:
                    if not self._repeated(attempt, deadline):
                        raise

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """What every worker made of the call; never raises what a worker raised.

        Args:
            timeout: as of `result`. The error of a worker that has not finished is a `CallTimeoutError`.

        Returns:
            The outcomes of the workers that answer, in the order of `result()`, then those of others that failed.
        """
        self.wait(timeout)
        unfinished = self._unfinished()
        wanted, others = self._positions
        of_others = [self._outcome(at, unfinished) for at in others]
        return [*(self._outcome(at, unfinished) for at in wanted), *(one for one in of_others if one.error is not None)]

    def done(self) -> bool:
        """Whether all workers called have finished, or failed, or could not be called."""
        return self._failed_to_send or not (self._unsent or self._pending())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all workers called have finished, or failed; whether they have within `timeout` seconds.

        Args:
            timeout: as of `result`.
        """
        deadline = self._until(timeout)
        self._until_sent(deadline)
        for _ in self._read_out(deadline):
            pass
        while pending := self._pending():
            left = deadline.left(at_most=REPORT_EVERY_S)
            refs = [self._completions[at] for at in pending]
            ray.wait(refs, num_returns=len(refs), timeout=left, fetch_local=False)
            if deadline.passed:
                return self.done()
            self._report_slow()
        return True

    def __iter__(self) -> Iterator[Outcome]:
        """Outcomes as workers finish: of those that answer, and of others that failed.

        Raises:
            CallTimeoutError: the deadline the call was made with has passed.
        """
        self._group._check_connected()
        self._until_sent(self._deadline)
        answering = set(self._positions[0])
        pending = dict.fromkeys(range(len(self.futures)))
        for at in self._read_out(self._deadline):
            del pending[at]
            yield self._outcome(at, {})
        while pending:
            refs = {self._completions[at]: at for at in pending}
            done, _ = ray.wait(
                list(refs), num_returns=1, timeout=self._deadline.left(at_most=REPORT_EVERY_S), fetch_local=False
            )
            if not done:
                self._on_slow(self._deadline)
            more, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
            for ref in dict.fromkeys([*done, *more]):
                del pending[refs[ref]]
                outcome = self._outcome(refs[ref], {})
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
        if not self._streams:
            raise TypeError(f"{self._method.name!r} is no generator method; its result comes in one piece")
        return ResultStream(lambda: self._arriving(timeout), lambda: arriving(self, timeout))

    def __await__(self) -> Generator[Any, None, Result]:
        return awaited(self).__await__()

    def __aiter__(self) -> AsyncIterator[Outcome]:
        return as_completed(self)

    def cancel(self, force: bool = False) -> list[int]:
        """Give the call up: what is queued is dropped, async methods that overlap with others are cancelled.

        A method that is running otherwise cannot be interrupted: it runs on and its value is dropped.

        Args:
            force: end the workers that are running it (kind "cancelled"); the group has lost them then.

        Returns:
            The ranks that are still running it; with `force`, those that were, and have been ended.
        """
        if self._withdrawn(force=force):
            return []
        pending = self._pending()
        if not pending:
            return []
        ranks = self._ranks
        self._cancelled = tuple(ranks[at] for at in pending)
        retrieve_late(self.futures, self)
        return self._group._cancel({ranks[at]: self.futures[at] for at in pending}, self._method.name, force=force)

    def statistics(self) -> CallStatistics:
        """What it has cost so far."""
        puts, bytes_put = self._stored
        return CallStatistics(len(self._ranks), puts, bytes_put, *self._fetched, self._submit_s)

    def get_results(
        self, worker_group: RayWorkerGroup | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """What `result` fetches, as a list however few answer; a generator's items stand at its place, flat.

        Args:
            worker_group: not needed: a call knows its group.
            return_generators_as_proxies: leave generators as they are: each an iterator of ObjectRefs.

        Raises:
            Exception: as of `result`.
        """
        if self._streams and return_generators_as_proxies:
            self._check_open()
            return self.refs
        values: Any = self.result()
        values = [] if self._discard else [values] if self._single else values
        return [item for items in values for item in items] if self._streams else values

    def made_by(self) -> str:
        """Return the name of the method that was called."""
        return self._method.name

    def as_argument(self) -> ObjectRef[Any] | Gathered:
        """What travels to another call's workers in its place; ValueError, TypeError: nothing that could."""
        self._check_passable()
        return self.refs[0] if self._single else Gathered(tuple(self.refs))

    def as_pieces(self) -> list[ObjectRef[Any]]:
        """What travels to another call's workers in place of each answer; ValueError, TypeError: nothing that could."""
        return [answer.ref for answer in self.answers()]

    def answers(self) -> list[Answer]:
        """Return each answer as an argument of another call.

        Raises:
            ValueError, TypeError: there is nothing to pass on.
        """
        self._check_passable()
        if self._single:
            raise ValueError(f"the call of {self._method.name!r} has one answer (collect=()): pass it as it is")
        return [Answer(self._method.name, ref) for ref in self.refs]

    def _check_passable(self) -> None:
        if self._discard:
            raise ValueError(f"the call of {self._method.name!r} has no answer to pass on (discard=True)")
        if self._streams:
            raise TypeError(f"{self._method.name!r} is a generator method: stream or collect its items, pass these on")

# SPDX-License-Identifier: Apache-2.0
"""The collection of the results of one call, and of its failures."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from ray import ObjectRef

from .._deadline import NEVER, Deadline
from .._observe.statistics import Outcome
from .._transport.futures import end_of, is_stream, sum_sizes
from ..exceptions import CallCancelledError, CallTimeoutError, WorkerFailureError, WorkerGroupError
from .attempts import Attempts, SendState
from .errors import Refused, explain_failure, retrieve_late, short_traceback
from .wait import ON_THREAD, REPORT_EVERY_S, OnLoop, Waiter, block

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Execution(Attempts):
    """A call, and what has arrived from its workers."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all called workers and fetch the results; see `Call.result`."""
        return block(self.results(ON_THREAD, timeout))

    async def results(self, on: Waiter, timeout: float | None = None) -> Any:
        """Do the same, on a thread or an event loop; the first failure ends the wait or repeats the call."""
        deadline = self.until(timeout)
        while True:
            attempt = self.attempt
            try:
                self.check_open()
                if self.sending is not None:
                    await self.until_sent(on, deadline)
                if self.yields_items:
                    return self.shape(await self._collect_items(on, deadline))
                wanted, others = self.recipients.positions
                values = await self.fetch(on, [self.futures[at] for at in (*wanted, *others)], deadline)
                self.fetched_at.update(wanted)
                return self.shape(values[: len(wanted)])
            except WorkerFailureError as error:
                # A restart takes seconds.
                if not await on.apart(self.repeat, attempt, deadline):
                    await on.apart(self.sender.observed.explain, error)
                    raise
            except Refused:
                await on.apart(self.follow, attempt, deadline)

    async def awaited(self) -> Any:
        """Return the result; the cancellation of the waiting task cancels the call."""
        with short_traceback():
            try:
                async with OnLoop() as loop:
                    return await self.results(loop)
            except asyncio.CancelledError:
                if self.sender.roster.connected:
                    # A second cancellation ends this wait, but not the thread.
                    await asyncio.shield(asyncio.to_thread(self.cancel))
                raise

    async def _collect_items(self, on: Waiter, deadline: Deadline) -> list[Any]:
        try:
            await on.drain(self.unfinished(), lambda: deadline, self.check_late)
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise (await on.apart(self.failure, error))  # noqa: B904  chained there
        return [await self._get_items(on, at) for at in self.positions]

    def shape(self, values: list[Any]) -> Any:
        """Return the result of the call for the values of the workers."""
        self.sender.observed.end(self.entries)
        if self.options.discard:
            return None
        return values[0] if self.is_single else values

    async def following(
        self, on: Waiter, results: Callable[[Waiter], AsyncGenerator[T]], timeout: float | None = None
    ) -> AsyncGenerator[T]:
        """Yield results of the call; begin again if all workers have refused it."""
        deadline = self.until(timeout)
        while True:
            attempt = self.attempt
            try:
                async with aclosing(results(on)) as found:
                    async for result in found:
                        yield result
                        del result
                return
            except Refused:
                await on.apart(self.follow, attempt, deadline)

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
                for stream in (stream for stream, has_ended in news.items() if has_ended):
                    del streams[stream]
            for at in [at for at in streams.values() if self.items.get(at)]:
                # An item that cannot be fetched is kept: an error is raised again, and a timeout loses nothing.
                (value,) = await self.fetch(on, self.items[at][:1], deadline)
                yield self.hand_out(at, value)
                del value
                deadline = self.until(timeout)  # of the next item
        # A stream whose worker has died just stops; the completion has the error.
        await self.fetch(on, [*self.completions.values()], self.until(timeout))

    async def iterate(self, on: Waiter) -> AsyncGenerator[Outcome]:
        """Yield outcomes as workers finish: of workers that return a result, and of others that failed."""
        deadline = self.order.deadline
        self.sender.roster.check_connected()
        await self.until_sent(on, deadline)
        at_of = {future: at for at, future in enumerate(self.futures)}
        waiting = self.unfinished()
        while waiting:
            for future, has_ended in (await on.some(waiting, deadline, self.check_late)).items():
                if not has_ended:
                    continue
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

    def hand_out(self, at: int, value: Any) -> Outcome:
        """Return the first item of a generator as an outcome, and release it."""
        kept = self.items[at]
        self._handed_out_bytes += sum_sizes(kept[:1])
        self._handed_out[at] = self._handed_out.get(at, 0) + 1
        del kept[0]
        return Outcome(self.ranks[at], self.coords(at), value)

    def coords(self, at: int) -> Mapping[str, int]:
        """Return the coordinates of a called worker."""
        return dict(self.sender.roster.now[self.ranks[at]].coords)

    async def fetch(self, on: Waiter, refs: Sequence[ObjectRef[Any]], deadline: Deadline) -> list[Any]:
        """Return values, or raise the failure of the call."""
        try:
            return await on.all(refs, deadline, self.check_late)
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise (await on.apart(self.failure, error))  # noqa: B904  chained there

    def failure(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of Ray, with all ranks that have failed so far."""
        if type(error) is CallTimeoutError:  # that of a worker arrives as an instance of a class that Ray derives
            return error
        self.check_open()
        self.sender.observed.end(self.entries, failed=True)
        failure = explain_failure(self._ends(), error, self.sender)
        if self._retrieved_attempt != self.attempt:
            self._retrieved_attempt = self.attempt
            retrieve_late(self.futures, self)
        # An error that may be hidden by a repetition gets its trace when it is raised after all.
        if isinstance(failure, WorkerFailureError) and not self.options.retries:
            self.sender.observed.explain(failure)
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
        if self.send_state is SendState.WAITING:
            if deadline.passed:
                raise self.sender.unsent_error(self.order)
            return deadline
        if not (pending := self.pending()):
            return Deadline()
        late = self._late_error(pending)
        if deadline.passed:
            self.sender.observed.explain(late)
            raise late
        logger.warning("%s", late)
        return deadline

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

    async def outcome(self, on: Waiter, at: int, unfinished: Mapping[int, BaseException]) -> Outcome:
        """Return the outcome of a called worker."""
        if at in unfinished:
            return Outcome(self.ranks[at], self.coords(at), error=unfinished[at])
        future = self.futures[at]
        try:
            if is_stream(future):
                value: Any = await self._get_items(on, at)
            else:
                (value,) = await on.all([future], NEVER, self.check_late)
                if at in self.answering:
                    self.fetched_at.add(at)
        except Exception as error:  # noqa: BLE001  any exception of the worker
            return await on.apart(self.failed_outcome, at, error)
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

    async def _get_items(self, on: Waiter, at: int) -> list[Any]:
        """Return the items of a generator that has ended."""
        future, items = self.futures[at], self.items.setdefault(at, [])
        try:
            await on.drain({future: items}, lambda: NEVER, self.check_late)
            values = await on.all(items, NEVER, self.check_late)
        except Exception as error:  # noqa: BLE001  any exception of a worker
            raise (await on.apart(explain_failure, self._ends(), error, self.sender))  # noqa: B904
        self.check_complete(at)
        self.fetched_at.add(at)
        return values

    def check_complete(self, at: int) -> None:
        """Refuse to return some of a generator's items as if they were all."""
        if count := self._handed_out.get(at):
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self.method.name!r} of rank {self.ranks[at]}, and they "
                "are not kept. Take the rest from stream() too, or make the call again and ask for its result only."
            )

    @property
    def fetched(self) -> tuple[int, int]:
        """The number of results that have been fetched, and their bytes."""
        results = (self.items.get(at, ()) if self.yields_items else [self.futures[at]] for at in self.fetched_at)
        refs = [ref for of_worker in results for ref in of_worker]
        return len(refs) + sum(self._handed_out.values()), sum_sizes(refs) + self._handed_out_bytes

# SPDX-License-Identifier: Apache-2.0
"""Waiting for a call without blocking an event loop, and streams of results."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable
from typing import Any, Generic, Self, TypeVar

from ray import ObjectRef

from .._deadline import Deadline
from .._futures import is_stream
from .._observe.statistics import Outcome
from ..exceptions import WorkerFailureError
from .errors import Refused, short_traceback
from .execution import Execution
from .results import REPORT_EVERY_S

T = TypeVar("T")


async def wait_for_result(call: Execution) -> Any:
    """Return what `Call.result` returns; the cancellation of the waiting task cancels the call."""
    with short_traceback():
        try:
            return await get_result(call)
        except asyncio.CancelledError:
            if call.sender.roster.connected:
                # A second cancellation ends this wait, but not the thread.
                await asyncio.shield(asyncio.to_thread(call.cancel))
            raise


async def get_result(call: Execution) -> Any:
    """Return what `Call.result` returns; the first failure ends the wait or repeats the call."""
    await _wait_until_sent(call, call.order.deadline)
    while True:
        attempt = call.attempt
        try:
            return call.shape(await _collect(call))
        except WorkerFailureError as error:
            # A restart takes seconds.
            if not await asyncio.to_thread(call.repeat, attempt):
                await asyncio.to_thread(call.sender.save_trace, error)
                raise
        except Refused:
            await asyncio.to_thread(call.follow, attempt)


async def _wait_until_sent(call: Execution, deadline: Deadline) -> None:
    if call.sending is not None:
        sending = asyncio.wrap_future(call.sending)
        sending.add_done_callback(_mark_retrieved)
        await asyncio.wait([sending], timeout=deadline.left())
    call.wait_until_sent(Deadline.after(0.0))


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from printing an error that no task waits for any more."""
    if not future.cancelled():
        future.exception()


async def _collect(call: Execution) -> list[Any]:
    call.check_open()
    tasks = [asyncio.ensure_future(_get_value(call, at)) for at in range(len(call.futures))]
    await _wait_for_all(call, tasks, call.order.deadline)
    call.check_open()
    return [tasks[at].result() for at in call.positions]


async def _wait_for_all(call: Execution, tasks: Iterable[asyncio.Task[Any]], deadline: Deadline) -> None:
    """Wait until all workers have finished; the first failure ends the wait."""
    pending = set(tasks)
    try:
        while pending:
            left = deadline.left(at_most=REPORT_EVERY_S)
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            if errors := [error for task in done if (error := task.exception()) is not None]:
                raise await asyncio.to_thread(call.failure, errors[0])  # it may ask the nodes
            if pending and not done:
                deadline = await asyncio.to_thread(call.check_late, deadline)
    finally:
        await cancel_tasks(pending)


async def stream_items(call: Execution, timeout: float | None) -> AsyncGenerator[Outcome]:
    """Yield the items of a generator method as they arrive; see `Call.stream`."""
    with short_traceback():
        call.check_open()
        deadline = call.until(timeout)
        await _wait_until_sent(call, deadline)
        tasks = {at: asyncio.ensure_future(_has_item(call, at)) for at in call.positions}
        try:
            while tasks:
                left = deadline.left(at_most=REPORT_EVERY_S)
                done, _ = await asyncio.wait(tasks.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    deadline = await asyncio.to_thread(call.check_late, deadline)
                for at in [at for at, task in tasks.items() if task in done]:
                    if not tasks.pop(at).result():
                        continue
                    try:
                        value = await _fetch(call.items[at][0])
                    except Exception as error:  # noqa: BLE001  any exception of the worker
                        raise await asyncio.to_thread(call.failure, error)  # noqa: B904  chained there
                    yield call.hand_out(at, value)
                    del value
                    tasks[at] = asyncio.ensure_future(_has_item(call, at))
                    deadline = call.until(timeout)  # of the next item
        finally:
            await cancel_tasks(tasks.values())
        ends = [asyncio.ensure_future(_fetch(ref)) for ref in call.completions.values()]
        await _wait_for_all(call, ends, call.until(timeout))


async def _has_item(call: Execution, at: int) -> bool:
    """Wait for the next item of a generator and keep its ref with the call; return False if it has ended."""
    kept = call.items.setdefault(at, [])
    if not kept and (ref := await anext(call.futures[at], None)) is not None:
        kept.append(ref)
    return bool(kept)


async def _fetch(ref: ObjectRef[Any]) -> Any:
    return await asyncio.wrap_future(ref.future())


async def iterate_outcomes(call: Execution) -> AsyncGenerator[Outcome]:
    """Yield outcomes as workers finish: of workers that return a result, and of others that failed."""
    call.sender.roster.check_connected()
    deadline = call.order.deadline
    await _wait_until_sent(call, deadline)
    tasks = {asyncio.ensure_future(_get_value(call, at)): at for at in range(len(call.futures))}
    try:
        while tasks:
            left = deadline.left(at_most=REPORT_EVERY_S)
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                deadline = await asyncio.to_thread(call.check_late, deadline)
            for task in done:
                at, error = tasks.pop(task), task.exception()
                if error is not None:
                    yield await asyncio.to_thread(call.failed_outcome, at, error)
                elif at in call.answering:
                    yield Outcome(call.ranks[at], call.coords(at), task.result())
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks that nothing waits for any more; the calls of the workers continue."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _get_value(call: Execution, at: int) -> Any:
    """Return the result of a worker: its value, or the list of its items."""
    future = call.futures[at]
    if is_stream(future):
        items = call.items.setdefault(at, [])
        async for ref in future:
            items.append(ref)
        await _fetch(future.completed())
        values = [await _fetch(ref) for ref in items]
        call.check_complete(at)
        call.count_once([at], items, values)
        return values
    value = await _fetch(future)
    if at in call.answering:
        call.count_once([at], [future], [value])
    return value


class ResultStream(Generic[T]):
    """Results as they arrive, for `for`, and for `async for` in a coroutine. `Call.stream` and `map` return it.

    It can be iterated once, in one of the two ways.
    """

    def __init__(self, items: Callable[[], Generator[T]], async_items: Callable[[], AsyncGenerator[T]]) -> None:
        self._make: dict[str, Callable[[], Any]] = {"for": items, "async for": async_items}
        self._mode = ""
        self._iterator: Any = None

    def _start(self, mode: str) -> Any:
        if not self._mode:
            self._mode, self._iterator = mode, self._make[mode]()
        if self._mode != mode:
            raise RuntimeError(f"these results are being iterated with `{self._mode}`; continue with that")
        return self._iterator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Wait for the next result and return it.

        Raises:
            RuntimeError: an `async for` iterates over the stream.
        """
        item: T = next(self._start("for"))
        return item

    def close(self) -> None:
        """Give up the rest."""
        if self._mode == "for":
            self._iterator.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next result without blocking the event loop, and return it.

        Raises:
            RuntimeError: a `for` iterates over the stream.
        """
        item: T = await anext(self._start("async for"))
        return item

    async def aclose(self) -> None:
        """Give up the rest."""
        if self._mode == "async for":
            await self._iterator.aclose()

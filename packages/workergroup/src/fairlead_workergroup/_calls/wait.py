# SPDX-License-Identifier: Apache-2.0
"""Waiting for a call without blocking an event loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from typing import Any, Generic, Self, TypeVar

from ray import ObjectRef, ObjectRefGenerator

from .._deadline import Deadline
from .._observe.statistics import Outcome
from ..exceptions import WorkerFailureError
from .errors import short_traceback
from .execution import Execution
from .results import REPORT_EVERY_S

T = TypeVar("T")


async def wait_for(call: Execution) -> Any:
    """Return what `Call.result` returns; whoever cancels the wait cancels the call."""
    with short_traceback():
        try:
            return await result_of(call)
        except asyncio.CancelledError:
            if call.sender.roster.connected:
                # A second cancellation ends this wait, and not the thread.
                await asyncio.shield(asyncio.to_thread(call.cancel))
            raise


async def result_of(call: Execution) -> Any:
    """Return what `Call.result` returns; the first failure ends the wait, or has the call repeated."""
    await _sent(call, call.deadline)
    while True:
        attempt = call.attempt
        try:
            return call.shape(await _collected(call))
        except WorkerFailureError:
            # A restart takes seconds.
            if not await asyncio.to_thread(call.repeat, attempt):
                raise


async def _sent(call: Execution, deadline: Deadline) -> None:
    """Wait until a call has been sent; see `Call._until_sent`."""
    if call.sending is not None:
        sending = asyncio.wrap_future(call.sending)
        sending.add_done_callback(_looked_at)
        await asyncio.wait([sending], timeout=deadline.left())
    call.wait_until_sent(Deadline.after(0.0))


def _looked_at(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from printing an error that nobody waits for any more."""
    if not future.cancelled():
        future.exception()


async def _collected(call: Execution) -> list[Any]:
    call.check_open()
    tasks = [asyncio.ensure_future(_value_of(call, at)) for at in range(len(call.futures))]
    await _all_of(call, tasks, call.deadline)
    call.check_open()
    return [tasks[at].result() for at in call.positions]


async def _all_of(call: Execution, tasks: Sequence[asyncio.Task[Any]], deadline: Deadline) -> None:
    """Wait until all workers have finished; the first failure ends the wait."""
    pending = set(tasks)
    try:
        while pending:
            left = deadline.left(at_most=REPORT_EVERY_S)
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            if errors := [error for task in done if (error := task.exception()) is not None]:
                raise await asyncio.to_thread(call.failure, errors[0])  # it may look at the nodes
            if pending and not done:
                await asyncio.to_thread(call.check_late, deadline)
    finally:
        await _dropped(pending)


async def stream_items(call: Execution, timeout: float | None) -> AsyncGenerator[Outcome]:
    """Yield the items of a generator method as they arrive; see `Call.stream`."""
    with short_traceback():
        call.check_open()
        deadline = call.until(timeout)
        await _sent(call, deadline)
        tasks = {at: asyncio.ensure_future(_has_item(call, at)) for at in call.positions}
        try:
            while tasks:
                left = deadline.left(at_most=REPORT_EVERY_S)
                done, _ = await asyncio.wait(tasks.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    await asyncio.to_thread(call.check_late, deadline)
                for at in [at for at, task in tasks.items() if task in done]:
                    if not tasks.pop(at).result():
                        continue
                    kept = call.items[at]
                    try:
                        value = await asyncio.wrap_future(kept[0].future())
                    except Exception as error:  # noqa: BLE001  whatever the worker raised
                        raise await asyncio.to_thread(call.failure, error)  # noqa: B904  chained there
                    yield call.hand_out(at, kept, value)
                    del value
                    tasks[at] = asyncio.ensure_future(_has_item(call, at))
                    deadline = call.until(timeout)  # of the next item
        finally:
            await _dropped(set(tasks.values()))
        ends = [asyncio.ensure_future(_value(ref)) for ref in call.completions.values()]
        await _all_of(call, ends, call.until(timeout))


async def _has_item(call: Execution, at: int) -> bool:
    """Wait for the next item of a generator and keep its ref with the call; return False if it has ended."""
    kept = call.items.setdefault(at, [])
    if not kept and (ref := await anext(call.futures[at], None)) is not None:
        kept.append(ref)
    return bool(kept)


async def _value(ref: ObjectRef[Any]) -> Any:
    return await asyncio.wrap_future(ref.future())


class ResultStream(Generic[T]):
    """Results as they arrive, for `for`, and for `async for` in a coroutine. `Call.stream` and `map` return it.

    It can be iterated once, in one of the two ways.
    """

    def __init__(self, items: Callable[[], Generator[T]], async_items: Callable[[], AsyncGenerator[T]]) -> None:
        self._make = (items, async_items)
        self._items: Generator[T] | None = None
        self._async_items: AsyncGenerator[T] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Wait for the next result.

        Raises:
            RuntimeError: it is being iterated with `async for`.
        """
        if self._async_items is not None:
            raise RuntimeError("these results are being iterated with `async for`; go on with that")
        if self._items is None:
            self._items = self._make[0]()
        return next(self._items)

    def close(self) -> None:
        """Give up the rest."""
        if self._items is not None:
            self._items.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next result without blocking the event loop.

        Raises:
            RuntimeError: it is being iterated with `for`.
        """
        if self._items is not None:
            raise RuntimeError("these results are being iterated with `for`; go on with that")
        if self._async_items is None:
            self._async_items = self._make[1]()
        return await anext(self._async_items)

    async def aclose(self) -> None:
        """Give up the rest."""
        if self._async_items is not None:
            await self._async_items.aclose()


async def iterate_outcomes(call: Execution) -> AsyncIterator[Outcome]:
    """The outcomes of workers as they finish: of those that answer, and of others that failed."""
    call.sender.roster.check_connected()
    await _sent(call, call.deadline)
    tasks = {asyncio.ensure_future(_value_of(call, at)): at for at in range(len(call.futures))}
    try:
        while tasks:
            left = call.deadline.left(at_most=REPORT_EVERY_S)
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await asyncio.to_thread(call.check_late, call.deadline)
            for task in done:
                at, error = tasks.pop(task), task.exception()
                if error is not None:
                    yield await asyncio.to_thread(call.failed_outcome, at, error)
                elif at in call.answering:
                    yield Outcome(call.ranks[at], call.coords(at), task.result())
    finally:
        await _dropped(set(tasks))


async def _dropped(tasks: set[asyncio.Task[Any]]) -> None:
    """Nobody waits for these any more; what they wait for goes on."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _value_of(call: Execution, at: int) -> Any:
    """What a worker answers: its value, or the list of its items."""
    future = call.futures[at]
    if isinstance(future, ObjectRefGenerator):
        items = call.items.setdefault(at, [])
        async for ref in future:
            items.append(ref)
        await asyncio.wrap_future(future.completed().future())
        values = [await asyncio.wrap_future(ref.future()) for ref in items]
        call.check_complete(at)
        call.count_once([at], items)
        return values
    value = await asyncio.wrap_future(future.future())
    if at in call.answering:
        call.count_once([at], [future])
    return value

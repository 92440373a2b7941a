# SPDX-License-Identifier: Apache-2.0
"""The futures of requests, and the waits for them.

Each wait is written once, for threads and for event loops: it is a coroutine, and waits by the methods of a `Waiter`.
Those of a plain one block and never suspend it, so that a thread can run it to its end.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ray import ObjectRefGenerator
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from .. import _world
from .._ray_private import TASK_BYTES
from .._world import NEVER, Deadline
from ..exceptions import WorkerGroupError

T = TypeVar("T")
# Raises or logs a delay, and returns the deadline of the rest of a wait.
CheckLate = Callable[[Deadline], Deadline]
# Futures, each with the list to which the items of a generator are added; None for a future of another kind.
Futures = Mapping[Any, list[Any] | None]

# A generator that always has an item must not keep the others waiting.
MOST_IN_A_TURN = 100
# The interval at which a wait logs the ranks that it waits for.
REPORT_EVERY_S = 60.0
# Packages whose frames say nothing about the user's error.
INTERNAL = frozenset({"asyncio", "concurrent", "fairlead_placement", "fairlead_workergroup", "ray"})


def is_stream(future: Any) -> bool:
    """Return whether a future is that of a generator method."""
    return isinstance(future, ObjectRefGenerator)


def end_of(future: Any) -> Any:
    """Return the future that is ready when a worker has finished: the value itself, or the end of a generator."""
    return future.completed() if is_stream(future) else future


def task_of_future(future: Any) -> bytes:
    """Return the id of the task that creates an object, or the items of a generator."""
    task: bytes = end_of(future).binary()[:TASK_BYTES]
    return task


def is_not_ready(error: BaseException) -> bool:
    """Return whether Ray itself ran out of time; a worker's own GetTimeoutError arrives as a RayTaskError."""
    return isinstance(error, GetTimeoutError) and not isinstance(error, RayTaskError)


class Inbox(Generic[T]):
    """The results that other threads put here for one waiter."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.wake: Callable[[], object] = lambda: None

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.put(item)
        self.wake()

    def is_empty(self) -> bool:
        """Return whether nothing is here."""
        return self._items.empty()

    def take(self, seconds: float) -> list[T]:
        """Return all items, once there is one; none after some seconds."""
        items: list[T] = []
        with contextlib.suppress(queue.Empty):
            items.append(self._items.get(timeout=seconds))
            while True:
                items.append(self._items.get_nowait())
        return items


class Waiter:
    """Waits by blocking the thread."""

    blocks: bool = True  # whether it blocks the thread

    async def sent(self, sending: concurrent.futures.Future[Any], seconds: float | None) -> None:
        """Wait until a call has been sent, or could not be."""
        concurrent.futures.wait([sending], seconds)

    async def arrived(self, inbox: Inbox[T], seconds: float) -> list[T]:
        """Return what is in an inbox, once there is something; an empty list after some seconds."""
        return inbox.take(seconds)

    async def apart(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function that may block."""
        return work(*args)

    async def news(
        self, futures: Futures, seconds: float | None, *, here: bool = False, most: int = MOST_IN_A_TURN
    ) -> dict[Any, bool]:
        """Wait for news of some futures for some seconds; return which have news, and whether each has ended.

        With `here`, a value counts once it is on this node. At most `most` items of a generator are taken in one turn.
        """
        asked = list(futures)
        ready, _ = _world.current.wait(asked, num_returns=1, timeout=seconds, fetch_local=here)
        if ready and len(asked) > 1:
            ready += _world.current.wait(asked, num_returns=len(asked), timeout=0, fetch_local=here)[0]
        return {future: _take_ready(future, futures[future], most) for future in dict.fromkeys(ready)}

    async def some(
        self,
        futures: Futures,
        deadline: Deadline,
        check_late: CheckLate,
        *,
        here: bool = False,
        most: int = MOST_IN_A_TURN,
    ) -> dict[Any, bool]:
        """Return what `news` does, once there is news.

        `check_late` is called with the deadline when it has passed, and every `REPORT_EVERY_S` seconds without news.
        """
        while True:
            news = await self.news(futures, deadline.left(at_most=REPORT_EVERY_S), here=here, most=most)
            if not news or deadline.passed:
                deadline = await self.apart(check_late, deadline)
            if news:
                return news

    async def all(self, futures: Sequence[Any], deadline: Deadline, check_late: CheckLate) -> list[Any]:
        """Return the values of futures, or raise the first error.

        The transfer of values to the driver does not count against the deadline.
        """
        while True:
            seconds = REPORT_EVERY_S if deadline.at is None else deadline.left(at_most=REPORT_EVERY_S)
            try:
                # `ray.get` would start a Ray even for none.
                return _world.current.get(list(futures), timeout=seconds) if futures else []
            except Exception as error:
                if not is_not_ready(error):
                    raise
            deadline = check_late(deadline)

    async def drain(self, futures: Futures, deadline: Callable[[], Deadline], check_late: CheckLate) -> None:
        """Wait until all futures have ended, and take the items of generators as they arrive; raise the first error."""
        waiting = dict(futures)
        while waiting:
            for future, has_ended in (await self.some(waiting, deadline(), check_late)).items():
                if has_ended:
                    # A generator that raises gives its error as its last item; if its worker died, its completion.
                    items = waiting.pop(future)
                    ends = [future] if items is None else [*items[-1:], future.completed()]
                    await self.all(ends, NEVER, check_late)


def _take_ready(future: Any, items: list[Any] | None, most: int) -> bool:
    """Take the items of a generator that are there, at least one; return whether the future has ended."""
    if items is None:
        return True
    for _ in range(most):
        if (item := next(future, None)) is None:
            return True
        items.append(item)
        if not future.next_ready():
            break
    return False


class OnLoop(Waiter):
    """Leaves the event loop to others. `async with` cancels the tasks at the end; the calls of workers continue."""

    blocks = False

    def __init__(self) -> None:
        self._tasks: dict[Any, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def sent(self, sending: concurrent.futures.Future[Any], seconds: float | None) -> None:
        waiting = asyncio.wrap_future(sending)
        # Otherwise asyncio would print an error that no task waits for any more.
        waiting.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        await asyncio.wait([waiting], timeout=seconds)

    async def arrived(self, inbox: Inbox[T], seconds: float) -> list[T]:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        inbox.wake = partial(loop.call_soon_threadsafe, event.set)
        try:
            if inbox.is_empty():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), seconds)
        finally:
            inbox.wake = lambda: None
        return inbox.take(0.0)

    async def apart(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(work, *args)

    async def news(
        self, futures: Futures, seconds: float | None, *, here: bool = False, most: int = MOST_IN_A_TURN
    ) -> dict[Any, bool]:
        running = {self._start(future, items, most): future for future, items in futures.items()}
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        # The value of a future that is not a generator, or its error, is asked for next.
        return {one: futures[one] is None or self._tasks.pop(one).result() for one in (running[task] for task in done)}

    async def all(self, futures: Sequence[Any], deadline: Deadline, check_late: CheckLate) -> list[Any]:
        tasks = [self._start(future) for future in futures]
        late = set(tasks)
        while late:
            seconds = deadline.left(at_most=REPORT_EVERY_S)
            _, late = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in (task for task in tasks if task.done()):
                task.result()
            if late:
                deadline = await self.apart(check_late, deadline)
        for future in futures:
            self._tasks.pop(future, None)
        return [task.result() for task in tasks]

    def _start(self, future: Any, items: list[Any] | None = None, most: int = 0) -> asyncio.Future[Any]:
        """Return the task of a future, of which there is one."""
        if future not in self._tasks:
            made = asyncio.wrap_future(future.future()) if items is None else _take_next(future, items, most)
            self._tasks[future] = asyncio.ensure_future(made)
        return self._tasks[future]


async def _take_next(future: Any, items: list[Any], most: int) -> bool:
    """Wait for the next items of a generator; return whether it has ended."""
    for _ in range(most):
        if (item := await anext(future, None)) is None:
            return True
        items.append(item)
        if not future.next_ready():
            break
    return False


ON_THREAD = Waiter()


def block(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits on this thread."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a wait on a thread was suspended")


def iterate(results: Callable[[Waiter], AsyncGenerator[T]]) -> Generator[T]:
    """Yield the results of an asynchronous generator that waits on this thread."""
    results_here = results(ON_THREAD)
    try:
        with short_traceback():
            while True:
                yield block(results_here.__anext__())
    except StopAsyncIteration:
        return
    finally:
        block(results_here.aclose())


async def iterate_on_loop(results: Callable[[Waiter], AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the results of an asynchronous generator that does not block the event loop."""
    with short_traceback():
        async with OnLoop() as loop, contextlib.aclosing(results(loop)) as results_there:
            async for result in results_there:
                yield result
                del result


class ResultStream(Generic[T]):
    """Results as they arrive, for `for`, and for `async for` in a coroutine. `Call.stream` and `map` return it.

    It can be iterated once, in one of the two ways.
    """

    def __init__(self, results: Callable[[Waiter], AsyncGenerator[T]]) -> None:
        self._results = results
        self._mode = ""
        self._iterator: Any = None

    def _start(self, mode: str) -> Any:
        if not self._mode:
            self._mode = mode
            self._iterator = (iterate if mode == "for" else iterate_on_loop)(self._results)
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


class short_traceback(contextlib.AbstractContextManager[None]):
    """Drop the frames of Fairlead and Ray from the tracebacks of errors that Fairlead raises on purpose.

    The frame with the `with` statement stays, and so do frames of the user's code below it. Other errors, which may be
    a defect of Fairlead, keep all frames.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if traceback is None or error is None:
            return
        if not isinstance(error, (WorkerGroupError, RayError)) and not isinstance(error.__cause__, RayError):
            return
        while isinstance(error.__context__, RayError) and error.__cause__ is None:
            error.__context__ = error.__context__.__context__
        kept, frame = [traceback], traceback.tb_next
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in INTERNAL:
                kept.append(frame)
            frame = frame.tb_next
        for above, below in zip(kept, [*kept[1:], None], strict=True):
            above.tb_next = below
        error.__traceback__ = kept[0]

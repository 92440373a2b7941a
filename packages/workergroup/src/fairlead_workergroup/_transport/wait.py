# SPDX-License-Identifier: Apache-2.0
"""The waits for replies, on threads and on event loops.

The wait for arrivals is written once: it is a coroutine, and waits by the methods of a `Waiter`. Those of a plain one
block and never suspend it, so that a thread can run it to its end.
"""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from .. import _world
from .._world import Deadline
from . import replies
from .replies import CheckLate, short_traceback


class Waitable(Protocol):
    """A call, as far as its end is waited for."""

    sending: concurrent.futures.Future[Any] | None

    @property
    def futures(self) -> list[Any]: ...


T = TypeVar("T")
C = TypeVar("C", bound=Waitable)
# Replies, each with the list to which the items of a generator are added; None for a reply of another kind.
Futures = Mapping[Any, list[Any] | None]

# A generator that always has an item must not keep the others waiting.
MOST_IN_A_TURN = 100


class Waiter:
    """Waits by blocking the thread."""

    blocks: bool = True  # whether it blocks the thread

    async def sent(self, sending: concurrent.futures.Future[Any], seconds: float | None) -> None:
        """Wait until a call has been sent, or could not be."""
        concurrent.futures.wait([sending], seconds)

    async def apart(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function that may block."""
        return work(*args)

    async def values(self, refs: Sequence[Any]) -> list[Any]:
        """Return the values of references that are ready or will be soon."""
        return replies.values(refs)

    async def finished(self, calls: Iterable[C], seconds: float) -> list[C]:
        """Return the calls of one worker each that have finished, once there is one; none after some seconds."""
        call_of = {call.futures[0]: call for call in calls}
        return [call_of[reply] for reply in await self.news(dict.fromkeys(call_of), seconds)]

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
            news = await self.news(futures, deadline.left(at_most=replies.REPORT_EVERY_S), here=here, most=most)
            if not news or deadline.passed:
                deadline = await self.apart(check_late, deadline)
            if news:
                return news


def drain(futures: Futures, deadline: Callable[[], Deadline], check_late: CheckLate) -> None:
    """Wait until all replies have ended, and take the items of generators as they arrive; raise the first error."""
    waiting = dict(futures)
    while waiting:
        for reply, has_ended in block(ON_THREAD.some(waiting, deadline(), check_late)).items():
            if has_ended:
                # A generator that raises gives its error as its last item; if its worker died, its completion.
                items = waiting.pop(reply)
                replies.values([reply] if items is None else [*items[-1:], reply.completed()])


async def until_ended(refs: Sequence[Any], deadline: Deadline, check_late: CheckLate) -> None:
    """Wait on the event loop until all references are ready or one has an error, or until the deadline."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(ended.set)

    replies.watch(refs, wake)
    while not ended.is_set() and not deadline.passed:
        try:
            await asyncio.wait_for(ended.wait(), deadline.left(at_most=replies.REPORT_EVERY_S))
        except TimeoutError:
            if not deadline.passed:
                await asyncio.to_thread(check_late, deadline)


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

    async def finished(self, calls: Iterable[C], seconds: float) -> list[C]:
        call_of = {_end_of_call(call): call for call in calls}
        arrived = await self.news(dict.fromkeys(call_of), seconds)
        # A call that has just been sent has not finished.
        return [call for one, call in call_of.items() if one in arrived and one is _end_of_call(call)]

    async def values(self, refs: Sequence[Any]) -> list[Any]:
        return [await asyncio.wrap_future(ref.future()) for ref in refs]

    async def apart(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(work, *args)

    async def news(
        self, futures: Futures, seconds: float | None, *, here: bool = False, most: int = MOST_IN_A_TURN
    ) -> dict[Any, bool]:
        running = {self._start(future, items, most): future for future, items in futures.items()}
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        news: dict[Any, bool] = {}
        for one in [running[task] for task in done]:
            task = self._tasks.pop(one)
            # The value of a reply that is not a generator, or its error, is asked for next.
            news[one] = (
                task.result() if futures[one] is not None else bool(task.cancelled() or task.exception() or True)
            )
        return news

    def _start(self, future: Any, items: list[Any] | None = None, most: int = 0) -> asyncio.Future[Any]:
        """Return the task of a future, of which there is one."""
        if future not in self._tasks:
            if items is not None:
                self._tasks[future] = asyncio.ensure_future(_take_next(future, items, most))
            else:
                is_own = isinstance(future, concurrent.futures.Future)
                self._tasks[future] = asyncio.wrap_future(future if is_own else future.future())
        return self._tasks[future]


def _end_of_call(call: Waitable) -> Any:
    """Return what is ready when a call of one worker has finished: its reply, or what a call waits for to be sent."""
    sending = call.sending
    is_sent = sending is None or (sending.done() and not sending.cancelled() and sending.exception() is None)
    return call.futures[0] if is_sent else sending


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

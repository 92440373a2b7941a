# SPDX-License-Identifier: Apache-2.0
"""The waits for replies, on threads and on event loops.

The wait for news is written once: it is a coroutine, and waits by the methods of a `Waiter`. Those of a plain one block
and never suspend it, so that a thread can run it to its end.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

from ray.exceptions import RayError

from .. import _world
from .._ray_private import end_of, is_stream
from .._world import Deadline
from . import replies
from .replies import CheckLate, short_traceback

T = TypeVar("T")

# A generator that always has an item must not keep the others waiting.
MOST_IN_A_TURN = 100


class Taken(list[Any]):
    """The items that were taken from a generator and not handed out, with the number of those that were."""

    handed_out = 0


# By generator: they outlive a wait that is given up.
_taken: weakref.WeakKeyDictionary[Any, Taken] = weakref.WeakKeyDictionary()


def taken(reply: Any) -> Taken:
    """Return the items that were taken from a generator; none for a reply of another kind."""
    return _taken.setdefault(reply, Taken()) if is_stream(reply) else Taken()


def ends_of(futures: Iterable[Any]) -> list[Any]:
    """Return the references that may have the errors of replies, each once.

    A generator that raises gives its error as its last item; if its worker died, its completion has the error.
    """
    futures = list(futures)
    items = (taken(reply) for reply in futures)
    return list(dict.fromkeys([*map(end_of, futures), *(own[-1] for own in items if own)]))


class Waiter:
    """Waits by blocking the thread."""

    blocks: bool = True  # whether it blocks the thread

    async def apart(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function that may block."""
        return work(*args)

    async def news(
        self, futures: Sequence[Any], seconds: float | None, *, here: bool = False, most: int = MOST_IN_A_TURN
    ) -> dict[Any, bool]:
        """Wait for news of some replies for some seconds; return which have news, and whether each has ended.

        With `here`, a value counts once it is on this node. At most `most` items of a generator are taken in one turn.
        """
        ready, _ = _world.current.wait(futures, num_returns=1, timeout=seconds, fetch_local=here)
        if ready and len(futures) > 1:
            ready += _world.current.wait(futures, num_returns=len(futures), timeout=0, fetch_local=here)[0]
        return {reply: take(reply, most) for reply in dict.fromkeys(ready)}

    async def some(
        self,
        futures: Sequence[Any],
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


def take(reply: Any, most: int = MOST_IN_A_TURN) -> bool:
    """Take the items of a generator that are there, at least one; return whether the reply has ended."""
    if not is_stream(reply):
        return True
    items = taken(reply)
    for _ in range(most):
        if (item := next(reply, None)) is None:
            return True
        items.append(item)
        if not reply.next_ready():
            break
    return False


def drain(futures: Iterable[Any], deadline: Deadline, check_late: CheckLate) -> None:
    """Wait until all replies have ended, and take the items of generators as they arrive; raise the first error."""
    waiting = list(dict.fromkeys(futures))
    while waiting:
        news = block(ON_THREAD.some(waiting, deadline, check_late))
        waiting = [reply for reply in waiting if not news.get(reply)]
        replies.values(ends_of(reply for reply, has_ended in news.items() if has_ended))


async def until(
    watch: Callable[[Callable[..., object]], object], deadline: Deadline, check_late: CheckLate | None = None
) -> None:
    """Wait on the event loop until the function that `watch` gets is called, on any thread, or until the deadline."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wake(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(ended.set)

    watch(wake)
    while not ended.is_set() and not deadline.passed:
        try:
            await asyncio.wait_for(ended.wait(), deadline.left(at_most=replies.REPORT_EVERY_S))
        except TimeoutError:
            if check_late is not None and not deadline.passed:
                await asyncio.to_thread(check_late, deadline)


class OnLoop(Waiter):
    """Leaves the event loop to others. `async with` cancels the tasks at the end; the calls of workers continue."""

    blocks = False

    def __init__(self) -> None:
        self._tasks: dict[Any, asyncio.Task[bool]] = {}  # by the reply that each waits for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def apart(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(work, *args)

    async def news(
        self, futures: Sequence[Any], seconds: float | None, *, here: bool = False, most: int = MOST_IN_A_TURN
    ) -> dict[Any, bool]:
        for reply in futures:
            if reply not in self._tasks:
                self._tasks[reply] = asyncio.ensure_future(_take_on_loop(reply, most))
        waiting = {self._tasks[reply]: reply for reply in futures}
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return {waiting[task]: self._tasks.pop(waiting[task]).result() for task in done}


async def _take_on_loop(reply: Any, most: int) -> bool:
    """Do what `take` does, without blocking the event loop."""
    if not is_stream(reply):
        with contextlib.suppress(RayError):  # the value or the error is asked for next
            await reply
        return True
    if (item := await anext(reply, None)) is None:
        return True
    taken(reply).append(item)
    return most > 1 and reply.next_ready() and take(reply, most - 1)


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

    It can be iterated once, in one of the two ways; the other one raises RuntimeError.
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
        """Wait for the next result and return it."""
        item: T = next(self._start("for"))
        return item

    def close(self) -> None:
        """Give up the rest."""
        if self._mode == "for":
            self._iterator.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next result without blocking the event loop, and return it."""
        item: T = await anext(self._start("async for"))
        return item

    async def aclose(self) -> None:
        """Give up the rest."""
        if self._mode == "async for":
            await self._iterator.aclose()

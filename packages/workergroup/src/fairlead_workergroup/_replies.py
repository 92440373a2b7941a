# SPDX-License-Identifier: Apache-2.0
"""The requests of calls to Ray, the replies that come back, and the waits for them, on threads and on event loops.

A reply is an `ObjectRef`, or the generator of them that a method returns which yields. Only this module sends calls and
waits for them. The wait for news is written once, for threads: an event loop runs it in short turns on a thread.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from fairlead_placement.extension import release_when_dropped

from . import _world
from ._ray_private import TASK_BYTES, actor_id_of_ref, end_of, is_stream
from ._world import NEVER, Deadline
from .exceptions import WorkerGroupError

T = TypeVar("T")

# Raises or logs a delay, and returns the deadline of the rest of a wait.
CheckLate = Callable[[Deadline], Deadline]
# The interval at which a wait logs the ranks that it waits for.
REPORT_EVERY_S = 60.0
# A generator that always has an item must not keep the others waiting.
MOST_IN_A_TURN = 100
# The threads of an event loop are few, so a wait holds one for this long at a time; one that is given up ends by then.
TURN_S = 0.2
# Packages whose frames say nothing about the user's error.
INTERNAL = frozenset({"asyncio", "concurrent", "fairlead_placement", "fairlead_workergroup", "ray"})


class Request(NamedTuple):
    """The request to one worker: a method of its host, and the arguments."""

    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]


class NotYet(Exception):
    """A reply has not come in time."""


class Items(list[Any]):
    """The items that were taken from a generator and not handed out, with the number of those that were."""

    handed_out = 0


# By generator: they outlive a wait that is given up.
_taken: weakref.WeakKeyDictionary[Any, Items] = weakref.WeakKeyDictionary()


def submit(handles: Iterable[Any], requests: Iterable[Request]) -> list[Any]:
    """Send a request to each worker, in order; return the replies without waiting for them.

    Once it has begun, it runs to its end: a Ctrl-C inside is raised when all workers have their request.
    """
    replies: list[Any] = []
    interrupted: KeyboardInterrupt | None = None
    for handle, request in zip(handles, requests, strict=True):
        try:
            replies.append(getattr(handle, request.method).remote(*request.args, **request.kwargs))
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return replies


def task_of(reply: Any) -> bytes:
    """Return the id of the task that makes a reply."""
    task: bytes = end_of(reply).binary()[:TASK_BYTES]
    return task


def actor_of(reply: Any) -> str:
    """Return the id of the actor that makes a reply."""
    return actor_id_of_ref(end_of(reply))


def values(refs: Sequence[Any], deadline: Deadline = NEVER, check_late: CheckLate | None = None) -> list[Any]:
    """Return the values of references; the first error ends the wait.

    `check_late` is called with the deadline when it has passed, and every `REPORT_EVERY_S` seconds. The transfer of
    values to this process does not count against the deadline.

    Raises:
        NotYet: one has not come by the deadline, and there is no `check_late`.
    """
    while refs:  # `ray.get` would start a Ray even for none
        left_s = deadline.left(at_most=None if check_late is None else REPORT_EVERY_S)
        try:
            return _world.current.get(list(refs), timeout=left_s)
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):  # that of a worker
                raise
            if check_late is None:
                raise NotYet from None
        deadline = check_late(deadline)
    return []


def collect(replies: Sequence[Any], deadline: Deadline, check_late: CheckLate | None = None) -> list[Any]:
    """Return the value of each reply, of a generator the list of its items, as `values` does."""
    if not any(map(is_stream, replies)):
        return values(replies, deadline, check_late)
    drain(replies, deadline, check_late or (lambda deadline: deadline))
    if count := sum(taken(reply).handed_out for reply in replies):
        raise WorkerGroupError(
            f"stream() has handed out {count} item(s) of this call, and they are not kept. Take the rest from stream() "
            "too, or make the call again and ask for its result only."
        )
    return [values(taken(reply)) if is_stream(reply) else values([reply])[0] for reply in replies]


def drain(replies: Iterable[Any], deadline: Deadline, check_late: CheckLate) -> None:
    """Wait until all replies have ended, and take the items of generators as they arrive; raise the first error."""
    waiting = list(dict.fromkeys(replies))
    while waiting:
        news = wait_for_news(waiting, deadline, check_late)
        waiting = [reply for reply in waiting if not news.get(reply)]
        values(ends_of(reply for reply, has_ended in news.items() if has_ended))


def wait(refs: Sequence[Any], seconds: float | None = 0.0, *, first: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the references that are ready and the others, once all are, or with `first` one; or after some seconds."""
    if not refs:
        return [], []
    return _world.current.wait(refs, num_returns=1 if first else len(refs), timeout=seconds, fetch_local=False)


def error_of(ref: Any, seconds: float = 0.0) -> BaseException | None:
    """Return the error of a reference; None if it has a value, or one that does not come in some seconds."""
    try:
        values([ref], Deadline.after(seconds))
    except NotYet:
        return None
    except RayError as error:  # every exception of a worker
        failure: BaseException = error
        return failure.with_traceback(None)
    return None


def ignore(refs: Sequence[ObjectRef[Any]]) -> None:
    """Keep Ray from logging the errors that the replies of a failed call may still bring as unhandled ones."""

    def hold(ref: ObjectRef[Any], future: Any) -> None:
        """Keep the reference until the reply has come: Ray logs an error that comes when there is none."""

    for ref in wait(refs)[1]:
        ref.future().add_done_callback(partial(hold, ref))


def taken(reply: Any) -> Items:
    """Return the items that were taken from a generator; none for a reply of another kind."""
    return _taken.setdefault(reply, Items()) if is_stream(reply) else Items()


def ends_of(replies: Iterable[Any]) -> list[Any]:
    """Return the references that may have the errors of replies, each once.

    A generator that raises gives its error as its last item; if its worker died, its completion has the error.
    """
    replies = list(replies)
    items = (taken(reply) for reply in replies)
    return list(dict.fromkeys([*map(end_of, replies), *(own[-1] for own in items if own)]))


def take(reply: Any) -> bool:
    """Take the items of a generator that are there, at least one; return whether the reply has ended."""
    if not is_stream(reply):
        return True
    items = taken(reply)
    for _ in range(MOST_IN_A_TURN):
        if (item := next(reply, None)) is None:
            return True
        items.append(item)
        if not reply.next_ready():
            break
    return False


def watch(refs: Sequence[ObjectRef[Any]], wake: Callable[[], object]) -> None:
    """Call a function when all references are ready, or one has an error: once or more, on a thread of Ray.

    Ray unpickles each value for that, in its own thread.
    """
    missing = list(range(len(refs)))  # `pop` is atomic

    def note(future: Any) -> None:
        missing.pop()
        if not missing or future.exception() is not None:
            wake()

    for ref in refs:
        ref.future().add_done_callback(note)


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
            await asyncio.wait_for(ended.wait(), deadline.left(at_most=REPORT_EVERY_S))
        except TimeoutError:
            if check_late is not None and not deadline.passed:
                await asyncio.to_thread(check_late, deadline)


def wait_for_news(
    replies: Sequence[Any], deadline: Deadline, check_late: CheckLate, turn_s: float | None = None
) -> dict[Any, bool]:
    """Return which replies have news, once there is some, and whether each has ended; none after a turn without news.

    `check_late` is called with the deadline when it has passed, and, without a turn, every `REPORT_EVERY_S` seconds.
    """
    while True:
        ready, others = wait(replies, deadline.left(at_most=turn_s or REPORT_EVERY_S), first=True)
        if deadline.passed or not (ready or turn_s):
            deadline = check_late(deadline)
        if ready or turn_s:
            return {reply: take(reply) for reply in (*ready, *(wait(others)[0] if ready else ()))}


class ResultStream(Generic[T]):
    """Results as they arrive, for `for`, and for `async for` in a coroutine. `Call.stream` and `map` return it.

    It can be iterated once.
    """

    def __init__(self, steps: Callable[[float | None], Generator[list[T]]]) -> None:
        # Given the longest time that a step waits. They yield a list for each result, and empty ones without a result:
        # on an event loop, each step runs on a thread.
        self._make_steps = steps
        self._steps: Generator[list[T]] | None = None
        self._is_given_up = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Wait for the next result and return it."""
        self._steps = self._steps or self._make_steps(None)
        with short_traceback():
            for results in self._steps:
                if results:
                    return results[0]
        raise StopIteration

    def close(self) -> None:
        """Give up the rest."""
        if self._steps is not None:
            self._steps.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next result without blocking the event loop, and return it."""
        if self._steps is None:
            self._steps = self._make_steps(TURN_S)
            # An event loop must not wait until a stream is closed that it drops.
            release_when_dropped(self, str, self._steps.close)
        with short_traceback():
            while (results := await self._step(self._steps)) is not None:
                if results:
                    return results[0]
        raise StopAsyncIteration

    async def _step(self, steps: Generator[list[T]]) -> list[T] | None:
        """Take a step on a thread, which closes the steps if the wait is cancelled meanwhile; None at the end."""

        def take_step() -> list[T] | None:
            try:
                return next(steps, None)
            finally:
                if self._is_given_up:
                    steps.close()

        step = asyncio.ensure_future(asyncio.to_thread(take_step))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self._is_given_up = True
            step.add_done_callback(lambda step: step.cancelled() or step.exception())
            raise

    async def aclose(self) -> None:
        """Give up the rest without blocking the event loop."""
        await asyncio.to_thread(self.close)


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
        while isinstance(error.__context__, (RayError, NotYet)) and error.__cause__ is None:
            error.__context__ = error.__context__.__context__
        shown, frame = [traceback], traceback.tb_next
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in INTERNAL:
                shown.append(frame)
            frame = frame.tb_next
        for above, below in zip(shown, [*shown[1:], None], strict=True):
            above.tb_next = below
        error.__traceback__ = shown[0]

# SPDX-License-Identifier: Apache-2.0
"""The futures of requests, Ray's own and those of a lane's answers, and all waiting for them."""

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import GetTimeoutError, RayTaskError, UnserializableException

from ._deadline import Deadline
from ._ray_private import object_sizes, task_of_ref
from ._world import world

# How long one kind of future is waited for before the other kind is looked at, if a wait has both.
TURN_S = 0.005


class Carrier(Protocol):
    """The owner of the messages that answers arrive in, which counts the answers that were errors."""

    failures: int

    def run(self, is_enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds; return whether it does within the time."""

    def call_back(self, future: "LaneFuture") -> None:
        """Call the callbacks of a future."""

    def cancel(self, task: bytes, *, asks: bool) -> bool:
        """Drop a request that has not been sent, and return whether it was; with `asks`, cancel a coroutine that
        runs."""


class LaneFuture:
    """The answer of one worker: pickled frames, an error, or a reference if it is in the object store."""

    # A call makes one for each worker, so these are set when they change.
    done: bool = False
    failed: bool = False
    frames: Sequence[bytes] | None = None
    ref: ObjectRef[Any] | None = None
    has_references: bool = False  # in the stored answer, which only Ray can pass on then
    error: BaseException | None = None

    def __init__(self, carrier: Carrier, task: bytes) -> None:
        self.carrier: Carrier = carrier
        self.task: bytes = task
        self._callbacks: deque[Callable[[LaneFuture], None]] = deque()

    def binary(self) -> bytes:
        """Return the id of the answer."""
        return self.task + bytes(4)

    def resolve(
        self,
        frames: Sequence[bytes] | None = None,
        *,
        ref: ObjectRef[Any] | None = None,
        error: BaseException | None = None,
        failed: bool = False,
        has_references: bool = False,
    ) -> None:
        """Set the answer, unless there is one."""
        if self.done:
            return
        self.frames = frames
        if failed or error is not None or ref is not None:
            self.ref, self.has_references, self.error = ref, has_references, error
            self.failed = failed or error is not None
            self.carrier.failures += self.failed
        self.done = True
        if self._callbacks:
            self.carrier.call_back(self)

    def get(self) -> Any:
        """Return the value of an answer that has arrived, or raise its error, as `ray.get` does."""
        if self.ref is not None:
            value = ray.get(self.ref)
            if not self.failed:
                return value
            (self.error,) = value
        elif self.frames is not None and not self.failed:
            # The end of a generator has no value.
            return pickle.loads(self.frames[0], buffers=self.frames[1:]) if self.frames else None
        elif self.frames is not None:
            self.error = _load_error(self.frames)
        if self.error is None:
            raise AssertionError("the answer has not arrived")
        shown = self.error.as_instanceof_cause() if isinstance(self.error, RayTaskError) else self.error
        shown.__traceback__ = None
        raise cast(BaseException, shown)

    def size(self) -> int:
        """Return the bytes of the answer, as sent or stored."""
        if self.ref is not None:
            return object_sizes([self.ref])[0]
        return sum(map(len, self.frames or ()))

    def future(self) -> Future[Any]:
        """Return a future of the value, for an event loop."""
        future: Future[Any] = Future()

        def pass_on(answer: LaneFuture) -> None:
            if answer.ref is not None and not answer.failed:
                answer.ref.future().add_done_callback(lambda value: _copy_outcome(value, future))
                return
            try:
                value = answer.get()
            except BaseException as error:  # noqa: BLE001  raised by the task that awaits it
                _set(future, error=error)
            else:
                _set(future, value)

        self.add_callback(pass_on)
        return future

    def add_callback(self, callback: Callable[["LaneFuture"], None]) -> None:
        """Call a function with this future when the answer has arrived."""
        self._callbacks.append(callback)
        if self.done:
            self.run_callbacks()

    def run_callbacks(self) -> None:
        """Call each function that waits for the answer, once, also if two threads do so."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # the other thread has taken the last one
                return
            callback(self)

    def cancel(self, *, asks: bool = True) -> bool:
        """Drop the request if it has not been sent, as `Carrier.cancel` does."""
        return self.carrier.cancel(self.task, asks=asks)

    def store(self, timeout_s: float | None) -> ObjectRef[Any]:
        """Return a reference to the answer in the object store; wait for the answer, and put it there if necessary."""
        value = None if self.ref is not None and not self.failed else get([self], timeout_s)[0]
        if self.ref is None:
            self.ref = ray.put(value)
        return self.ref


class LaneStream:
    """The items of a generator method that arrive as messages; it is used as Ray's `ObjectRefGenerator` is."""

    def __init__(self, carrier: Carrier, task: bytes) -> None:
        self.task: bytes = task
        self._carrier = carrier
        self._items: deque[LaneFuture] = deque()
        self._end = LaneFuture(carrier, task)
        self._waiting: list[Future[None]] = []

    def completed(self) -> LaneFuture:
        """Return the future of the end."""
        return self._end

    def cancel(self, *, asks: bool = True) -> bool:
        """Drop the request if it has not been sent, as `Carrier.cancel` does."""
        return self._carrier.cancel(self.task, asks=asks)

    @property
    def done(self) -> bool:
        """Whether the next item, or the end, has arrived."""
        return bool(self._items) or self._end.done

    def next_ready(self) -> bool:
        """Return whether the next item, or the end, has arrived."""
        return self.done

    def add_item(self, item: LaneFuture) -> None:
        """Add an item that has arrived."""
        self._items.append(item)
        self._notify()

    def resolve(self, **outcome: Any) -> None:
        """Set the end, and its error if the generator has failed."""
        self._end.resolve(**outcome)
        self._notify()

    def __iter__(self) -> "LaneStream":
        return self

    def __next__(self) -> LaneFuture:
        self._carrier.run(lambda: self.done, None)
        if not self._items:
            raise StopIteration
        return self._items.popleft()

    def __aiter__(self) -> "LaneStream":
        return self

    async def __anext__(self) -> LaneFuture:
        while not self.done:
            waiting: Future[None] = Future()
            self._waiting.append(waiting)
            if not self.done:
                await asyncio.wrap_future(waiting)
        if not self._items:
            raise StopAsyncIteration
        return self._items.popleft()

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            _set(one, None)


class StoredItems:
    """The items of a generator method of a lane as ObjectRefs. It is iterated as Ray's `ObjectRefGenerator` is."""

    def __init__(self, stream: LaneStream) -> None:
        self._stream = stream

    def next_ready(self) -> bool:
        """Return whether the next item, or the end, has arrived."""
        return self._stream.done

    def __iter__(self) -> "StoredItems":
        return self

    def __next__(self) -> ObjectRef[Any]:
        """Wait for the next item and return a reference to it. Raise the error to which Ray would yield a reference."""
        item = next(self._stream, None)
        if item is None:
            self._stream.completed().get()
            raise StopIteration
        return item.store(None)

    def __aiter__(self) -> "StoredItems":
        return self

    async def __anext__(self) -> ObjectRef[Any]:
        """Wait for the next item without blocking the event loop; otherwise as `__next__`."""
        item = await anext(self._stream, None)
        if item is None:
            self._stream.completed().get()
            raise StopAsyncIteration
        return item.store(None)


def references_of(stream: Any) -> Any:
    """Return an iterator of the ObjectRefs of the items of a generator method."""
    return StoredItems(stream) if isinstance(stream, LaneStream) else stream


def _load_error(frames: Sequence[bytes]) -> BaseException:
    """Return the error that a worker has sent; Ray's substitute if its class is not known here."""
    try:
        error: BaseException = pickle.loads(frames[0])
    except Exception:  # noqa: BLE001  the import of its module may raise anything
        error = UnserializableException(frames[1].decode())
    return error


def _set(future: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
    if future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _copy_outcome(source: Future[Any], target: Future[Any]) -> None:
    error = source.exception()
    _set(target, None if error is not None else source.result(), error=error)


def is_stream(future: Any) -> bool:
    """Return whether a future is that of a generator method."""
    return isinstance(future, (ObjectRefGenerator, LaneStream))


def is_message(future: Any) -> bool:
    """Return whether the answer arrives as a message, and not through Ray."""
    return isinstance(future, (LaneFuture, LaneStream))


def task_of_future(future: Any) -> bytes:
    """Return the id of the task that creates an object, or the items of a generator."""
    return task_of_ref(future if isinstance(future, ObjectRef) else end_of(future))


def wait(
    futures: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """Return which futures are ready and which are not, as `ray.wait` does."""
    carriers = list(dict.fromkeys(_carrier(future) for future in futures if is_message(future)))
    if not carriers:
        return world().wait(futures, num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)
    of_ray = [future for future in futures if not is_message(future)]
    messages = [future for future in futures if is_message(future)]
    deadline = Deadline.after(timeout)
    ready: set[Any] = set()
    left = list(messages)

    def is_enough() -> bool:
        if num_returns == len(futures):
            while left and left[-1].done:
                left.pop()
            return not left
        return sum(1 for future in messages if future.done) + len(ready) >= num_returns

    while True:
        if of_ray:
            ready = set(world().wait(of_ray, num_returns=len(of_ray), timeout=0, fetch_local=fetch_local)[0])
        turn_s = None if len(carriers) == 1 and not of_ray else TURN_S
        for carrier in carriers:
            carrier.run(is_enough, deadline.left(turn_s))
        done = [one for one in futures if (one in ready if not is_message(one) else one.done)]
        if len(done) >= num_returns or deadline.passed:
            chosen = set(done[:num_returns])
            return done[:num_returns], [one for one in futures if one not in chosen]


def get(futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Return the values of futures, or raise the first error that arrives, as `ray.get` does."""
    messages = [future for future in futures if isinstance(future, LaneFuture)]
    if not messages:
        return world().get(futures, timeout=timeout)
    deadline = Deadline.after(timeout)
    waiting = list(messages)
    carriers = list({future.carrier for future in messages})
    alone = len(carriers) == 1
    failures, has_failed = -1, False

    def is_enough() -> bool:
        nonlocal failures, has_failed
        while waiting and waiting[-1].done and not waiting[-1].failed:
            waiting.pop()
        # This runs after each message, and must not look at all futures each time.
        now = carriers[0].failures if alone else sum(carrier.failures for carrier in carriers)
        if failures != now:
            failures, has_failed = now, any(future.failed for future in waiting)
        return has_failed or not waiting

    while True:
        for carrier in carriers:
            carrier.run(is_enough, deadline.left(None if alone else TURN_S))
        if alone or is_enough() or deadline.passed:
            break
    for future in waiting:
        if future.failed:
            future.get()
    if waiting:
        raise GetTimeoutError(f"Get timed out: some answers of a lane have not arrived within {timeout} s.")
    if len(messages) == len(futures):
        return [future.get() for future in messages]
    of_ray = [future for future in futures if not is_message(future)]
    fetched = iter(world().get(of_ray, timeout=deadline.left()))
    return [future.get() if is_message(future) else next(fetched) for future in futures]


def get_one(future: Any) -> Any:
    """Return the value of a future, or raise its error."""
    return get([future])[0]


def end_of(future: Any) -> Any:
    """Return the future that is ready when a worker has finished: the value itself, or the end of a generator."""
    return future.completed() if is_stream(future) else future


def sum_sizes(results: Sequence[Any]) -> int:
    """Return the bytes of fetched results, as sent."""
    of_ray = [one for one in results if not isinstance(one, LaneFuture)]
    return sum(one.size() for one in results if isinstance(one, LaneFuture)) + sum(object_sizes(of_ray))


def _carrier(future: Any) -> Carrier:
    carrier: Carrier = future.completed().carrier if isinstance(future, LaneStream) else future.carrier
    return carrier

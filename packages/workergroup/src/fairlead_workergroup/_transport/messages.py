# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport, which carries the calls of a group instead of Ray, and the answers that it carries."""

import asyncio
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayTaskError, UnserializableException

from .._membership.model import Snapshot
from .._ray_private import object_sizes, still_referenced
from .._world import NEVER, Deadline


class Carrier(Protocol):
    """The transport of answers, as far as they need it.

    Attributes:
        name: what explanations and statistics call it.
        failures: the number of answers that were errors.
    """

    name: str
    failures: int

    def run(self, is_enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds; return whether it does within the time."""

    def call_back(self, future: "Message") -> None:
        """Call the callbacks of a future."""

    def cancel(self, task: bytes, *, asks: bool) -> bool:
        """Drop a request that has not been sent, and return whether it was; with `asks`, cancel a coroutine that
        runs."""


class Transport(Carrier, Protocol):
    """Carries the calls of a group while the group uses it. Transports derive from this class.

    The calls of a group to one worker begin in the order in which they are sent, whatever carries them.

    Attributes:
        most_waiting: the calls of a worker that may wait to be sent; further calls wait for room. 0 for no limit.
    """

    most_waiting: int = 0

    def encode(self, requests: Iterable[Any]) -> list[Any]:
        """Return requests in the form in which they are sent; it may run code of the user's classes.

        A request has `method`, `args` and `kwargs`. An argument may be a `Message`: a value that the group has stored,
        or the result of another call, which may not have arrived.
        """

    def send(self, now: Snapshot, ranks: Sequence[int], encoded: Sequence[Any], *, yields_items: bool) -> list[Any]:
        """Send a request to each rank without waiting, and return a `Message` for each, or a `MessageStream`.

        All ranks get the call or, if Ctrl-C comes, none. `yields_items` says that the method is a generator. A worker
        whose request is for `_fairlead_silent` runs it to its end, and answers with a `Message`.
        """

    def open(self, timeout_s: float) -> None:
        """Wait until the workers take calls, or raise an error that says which do not."""

    def stop(self) -> None:
        """Take no further call, and end when the earlier ones have been answered; do not wait."""

    def close(self, timeout_s: float) -> None:
        """Wait for the end, or raise an error that says which workers are late."""

    def wait_for_room(self, ranks: Iterable[int], timeout_s: float | None) -> bool:
        """Wait while too many calls of these workers wait to be sent; return whether there is room in time."""
        return True

    # The rest is for workers that Ray calls too, such as those of a lane.
    def makes_way(self, ranks: Collection[int]) -> bool:
        """Return whether Ray can be given a call of these ranks now, in its turn; `wait_for_way` waits for that."""
        return True

    def wait_for_way(self, ranks: Collection[int], timeout_s: float | None) -> bool:
        """Wait until these workers have begun all earlier calls; return whether they have in time."""
        return True

    def detour(self, ranks: Iterable[int]) -> AbstractContextManager[None]:
        """Let these workers run Ray's calls that are sent in a block after all earlier calls, and before later ones."""
        return nullcontext()


class Message:
    """The answer of one worker: pickled frames, an error, or a reference if it is in the object store.

    Attributes:
        carrier: what it arrives by.
        task: the id of the request: eight bytes, then the id of the actor, as Ray's task ids end.
        done: whether it has arrived.
        failed: whether it is an error.
        frames: the pickled value or error, and its buffers; empty for the end of a generator.
        ref: the reference to the answer, if it is in the object store.
        has_references: whether the stored answer holds references, so that only Ray can pass it on.
        error: the error, if it was made or has been loaded in this process.
    """

    # A call makes one for each worker, so these are set when they change.
    done: bool = False
    failed: bool = False
    frames: Sequence[bytes] | None = None
    ref: ObjectRef[Any] | None = None
    has_references: bool = False
    error: BaseException | None = None

    def __init__(self, carrier: Carrier, task: bytes) -> None:
        self.carrier: Carrier = carrier
        self.task: bytes = task
        self._callbacks: deque[Callable[[Message], None]] = deque()

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

        def pass_on(answer: Message) -> None:
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

    def add_callback(self, callback: Callable[["Message"], None]) -> None:
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
        if not self.carrier.run(lambda: self.done, timeout_s):
            raise GetTimeoutError(f"Get timed out: the answer has not arrived within {timeout_s} s.")
        if self.ref is None or self.failed:
            value = self.get()
            self.ref = self.ref or ray.put(value)
        return self.ref


class MessageStream:
    """The items of a generator method as they arrive; it is used as Ray's `ObjectRefGenerator` is.

    Attributes:
        task: the id of the request, as of a `Message`.
    """

    def __init__(self, carrier: Carrier, task: bytes) -> None:
        self.task: bytes = task
        self._carrier = carrier
        self._items: deque[Message] = deque()
        self._end = Message(carrier, task)
        self._waiting: list[Future[None]] = []

    def completed(self) -> Message:
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

    def add_item(self, item: Message) -> None:
        """Add an item that has arrived."""
        self._items.append(item)
        self._notify()

    def resolve(self, **outcome: Any) -> None:
        """Set the end, and its error if the generator has failed."""
        self._end.resolve(**outcome)
        self._notify()

    def __iter__(self) -> "MessageStream":
        return self

    def __next__(self) -> Message:
        self._carrier.run(lambda: self.done, None)
        if not self._items:
            raise StopIteration
        return self._items.popleft()

    def __aiter__(self) -> "MessageStream":
        return self

    async def __anext__(self) -> Message:
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
    """The items of an `MessageStream` as ObjectRefs. It is iterated as Ray's `ObjectRefGenerator` is."""

    def __init__(self, stream: MessageStream) -> None:
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


def references_of(reply: Any, deadline: Deadline = NEVER) -> Any:
    """Return the ObjectRef of a reply, which is stored if it came as a message, or those of a generator's items."""
    if isinstance(reply, MessageStream):
        return StoredItems(reply)
    return reply.store(deadline.left()) if isinstance(reply, Message) else reply


# A reply that is not kept alive: a message, or the id of an object.
WeakReply = bytes | weakref.ref[Message]


def weaken(reply: Any) -> WeakReply:
    """Return what finds a reply as long as something else refers to it."""
    return weakref.ref(reply) if isinstance(reply, Message) else bytes(reply.binary())


def find_kept(replies: Sequence[WeakReply]) -> list[Any]:
    """Return each of these replies that something still refers to, and None for the others."""
    ids = [one for one in replies if isinstance(one, bytes)]
    kept = {ref.binary(): ref for ref in (still_referenced(ids) if ids else ())}
    return [kept.get(one) if isinstance(one, bytes) else one() for one in replies]


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

# SPDX-License-Identifier: Apache-2.0
"""The transport of a group whose workers are threads: what they get and answer is pickled, as between processes."""

import _thread
import inspect
import itertools
import pickle
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError, TaskCancelledError

from fairlead_placement.spi import OneTimeEvent

from .._membership.model import Snapshot
from .._remote.references import dump
from .._transport.futures import end_of
from .._transport.messages import Message, MessageStream, Transport
from .._world import Deadline, wait_for_event
from ..exceptions import WorkerGroupError, format_lines
from .worker import ADDRESS, USE_LAUNCH, LocalWorker, pickle_error

CLOSED = "the LocalGroup has been closed"


@dataclass(frozen=True)
class Body:
    """The content of a request, pickled except for answers and stored values, which are `sources`."""

    method: str
    pickled: bytes
    # By the place of the argument; None for an answer that the request only waits for.
    sources: tuple[tuple[int | str | None, Message], ...]

    @property
    def is_ready(self) -> bool:
        """Whether all arguments exist."""
        return all(source.done for _, source in self.sources)

    def load(self) -> tuple[list[Any], dict[str, Any]]:
        """Return a copy of the arguments."""
        args, kwargs = pickle.loads(self.pickled)
        for key, source in self.sources:
            if isinstance(key, int):
                args[key] = source.get()
            elif key is not None:
                kwargs[key] = source.get()
        return args, kwargs


@dataclass(eq=False)
class _Call:
    """The call of one worker."""

    worker: LocalWorker
    answer: Message | MessageStream
    body: Body
    has_begun: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the worker has answered it, or it was cancelled."""
        return bool(end_of(self.answer).done)


class LocalTransport(Transport):
    """Carries the calls of one group, with one queue and one thread for each worker."""

    name: str = "local"

    def __init__(self, workers: Sequence[LocalWorker]) -> None:
        self.failures: int = 0
        self.is_closing: bool = False
        self._workers = workers
        self._tasks = itertools.count(1)
        # It protects the answers, and what waits for them. A finalizer may cancel a call on a thread that holds it.
        self._lock = threading.RLock()
        self._calls: dict[bytes, _Call] = {}  # those without an answer, by task
        # Of each thread that waits: whether there is enough, and the event that wakes it.
        self._waiting: dict[OneTimeEvent, Callable[[], bool]] = {}
        self._resolved: list[Message] = []
        # One operation sends a call to all of its workers, so that Ctrl-C comes before or after it; None at the end.
        self._inbox: queue.SimpleQueue[list[_Call] | None] = queue.SimpleQueue()
        self._is_open = False
        self._has_begun = OneTimeEvent()  # when the threads have been started
        self._courier = threading.Thread(target=self._deliver, name="fairlead-local", daemon=True)

    def put(self, value: Any) -> Message:
        """Store an argument, of which each worker gets a copy."""
        stored = Message(self, bytes(24))
        stored.resolve(_pickle(value))
        return stored

    def encode(self, requests: Iterable[Any]) -> list[Body]:
        """Return the content of each request; consecutive ones that are the same are pickled once."""
        encoded: list[Body] = []
        before: Any = None
        for request in requests:
            encoded.append(encoded[-1] if request is before else _encode(request.method, request.args, request.kwargs))
            before = request
        return encoded

    def send(self, now: Snapshot, ranks: Sequence[int], encoded: Sequence[Body], *, yields_items: bool) -> list[Any]:
        """Send a request to each rank; see `Transport.send`."""
        calls = {}
        for rank, body in zip(ranks, encoded, strict=True):
            worker = self._workers[rank]
            task = next(self._tasks).to_bytes(8, "little") + worker.actor_id
            is_stream = yields_items and body.method != "_fairlead_silent"
            answer = MessageStream(self, task) if is_stream else Message(self, task)
            calls[task] = _Call(worker, answer, body)
        self._calls.update(calls)
        self._inbox.put(list(calls.values()))
        if self.is_closing:  # they may have come too late
            self._drop(lambda call: not call.has_begun)
        return [call.answer for call in calls.values()]

    def run(self, is_enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds; return whether it does within the time."""
        found = OneTimeEvent()
        with self._lock:
            if is_enough():
                return True
            if timeout_s is not None and timeout_s <= 0:
                return False
            self._waiting[found] = is_enough
        try:
            return wait_for_event(found, Deadline.after(timeout_s))
        finally:
            with self._lock:
                del self._waiting[found]

    def call_back(self, future: Message) -> None:
        """Call the callbacks of a future when the lock is free."""
        self._resolved.append(future)

    def cancel(self, task: bytes, *, asks: bool) -> bool:
        """Drop a request that has not begun; a method that runs is not interrupted."""
        with self._changing():
            call = self._calls.get(task)
            if call is None or call.has_begun:
                return False
            self._end(call, error=TaskCancelledError())
            return True

    def open(self, timeout_s: float) -> None:
        """Start the threads."""
        self._is_open = True
        # Ctrl-C in `Thread.start` would leave a thread that is there and never runs, so another thread starts it.
        _thread.start_new_thread(self._courier.start, ())

    def stop(self) -> None:
        """Take no further call, and drop those that have not begun. It takes no lock: a finalizer may call it."""
        self.is_closing = True
        self._inbox.put(None)

    def close(self, timeout_s: float | None) -> None:
        """Wait until each worker has ended the method that it runs, or raise an error that says which are late."""
        deadline = Deadline.after(timeout_s)
        self.stop()
        if self._is_open and self._has_begun.wait(deadline.left()):
            self._courier.join(deadline.left())
        for thread in (worker.thread for worker in self._workers):
            if thread is not None and thread is not threading.current_thread():
                thread.join(deadline.left())
        late = [one for one in self._workers if one.thread is not None and one.thread.is_alive()]
        for worker in late:
            worker.variables.restore()
        self._drop(lambda call: True)
        if late:
            raise WorkerGroupError(
                f"{len(late)} of {len(self._workers)} workers of a LocalGroup have not ended within {timeout_s:g} s:"
                f"{format_lines([worker.look() for worker in late])}\nTheir threads end when these methods return."
            )

    def _deliver(self) -> None:
        """Put the calls into the queues of their workers, in the order in which they were sent."""
        for worker in self._workers:
            worker.begin(self._run_call, lambda: self.is_closing)
        self._has_begun.set()
        while (calls := self._inbox.get()) is not None:
            for call in calls:
                call.worker.queue.put(call)
            del calls
        self._drop(lambda call: not call.has_begun)
        for worker in self._workers:
            worker.queue.put(None)

    def _drop(self, is_over: Callable[[_Call], bool]) -> None:
        """Answer calls with the error of a group that has been closed."""
        with self._changing():
            for call in filter(is_over, list(self._calls.values())):
                self._end(call, error=WorkerGroupError(CLOSED))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change answers in a block; then wake the threads that have enough, and call callbacks without the lock."""
        with self._lock:
            yield
            resolved, self._resolved = self._resolved, []
            for found, is_enough in self._waiting.items():
                if not found.is_set() and is_enough():
                    found.set()
        for message in resolved:
            message.run_callbacks()

    def _end(self, call: _Call, **outcome: Any) -> None:
        """Answer a call. The caller holds the lock."""
        self._calls.pop(call.answer.task, None)
        call.answer.resolve(**outcome)

    def _wake(self, _: Message) -> None:
        """Wake the worker that waits for an argument, which another transport has brought."""
        with self._changing():
            pass

    def _run_call(self, call: _Call) -> None:
        """Run a call on the thread of its worker, once its arguments exist."""
        body = call.body
        for _, source in body.sources:
            if source.carrier is not self:
                source.add_callback(self._wake)
        self.run(lambda: body.is_ready or call.is_over, None)
        with self._changing():
            if call.is_over:
                return
            if (lacking := next((one for _, one in body.sources if one.failed), None)) is not None:
                error = lacking.error
                if error is not None and not isinstance(error, RayTaskError):
                    error = RayTaskError("a call", f"An argument could not be computed:\n{error}", error, ip=ADDRESS)
                self._end(call, frames=lacking.frames, ref=lacking.ref, error=error, failed=True)
                return
            call.has_begun = True
        try:
            frames = self._run(call)
            failed = False
        except BaseException as error:  # noqa: BLE001  the caller gets it
            frames, failed = pickle_error(body.method, error), True
        with self._changing():
            self._end(call, frames=frames, failed=failed)

    def _run(self, call: _Call) -> Sequence[bytes]:
        """Run a method, and hand out its items; return the frames of its value, or none at the end of a generator."""
        args, kwargs = call.body.load()
        result = call.worker.find(call.body.method)(*args, **kwargs)
        if not inspect.isgenerator(result):
            return _pickle(result)
        del args, kwargs
        for item in result:
            message = Message(self, call.answer.task)
            frames = _pickle(item)
            with self._changing():
                message.resolve(frames)
                if isinstance(call.answer, MessageStream):
                    call.answer.add_item(message)
            if self.is_closing:
                result.close()
                raise WorkerGroupError(CLOSED)
        return ()


def _encode(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Body:
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    sources = tuple((key, value) for key, value in named if isinstance(value, Message))
    left = {key for key, _ in sources}
    content = (
        [None if at in left else value for at, value in enumerate(args)],
        {name: None if name in left else value for name, value in kwargs.items()},
    )
    return Body(method, ray.cloudpickle.dumps(content), sources)


def _pickle(value: Any) -> list[bytes]:
    if (frames := dump(value)) is None:
        raise TypeError(f"It holds ObjectRefs or actor handles. {USE_LAUNCH}")
    return [bytes(frame) for frame in frames]  # copies, because its owner may change its arrays

# SPDX-License-Identifier: Apache-2.0
"""The connection with one worker from the moment that it begins to serve a lane until it ends that."""

import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import RayTaskError

from fairlead_workergroup.exceptions import LaneError
from fairlead_workergroup.spi import Message, MessageStream, ownership_of

from ._worker.serve import (
    ACK,
    ANSWER,
    ANSWER_BYTES,
    BEGUN,
    BYE,
    CALL,
    CANCEL,
    ERROR,
    HELLO,
    INLINE,
    ITEM,
    NO_TASK,
    REQUEST,
    STOP,
    STORED_REFERENCES,
    VALUE,
    WELCOME,
)

# The calls that are sent to a worker before it has answered the first of them.
WINDOW = 64
_REQUEST, _ANSWER = struct.Struct(REQUEST), struct.Struct(ANSWER)
# After so many messages of a worker an acknowledgement is sent, unless a call carries it.
ACK_EVERY = 64
# The address of this process in errors that are made here.
LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Body:
    """The content of a request, pickled but for stored objects and answers of workers, which are `sources`."""

    pickled: bytes
    sources: tuple[tuple[int | str, Any], ...]

    @property
    def messages(self) -> list[Message]:
        """The answers of workers among the arguments."""
        return [source for _, source in self.sources if isinstance(source, Message)]

    def frames(self) -> list[bytes]:
        if not self.sources:
            return [self.pickled]
        return [self.pickled, pickle.dumps([(key, _describe(source)) for key, source in self.sources], 5)]


def _describe(source: Any) -> Any:
    if isinstance(source, Message) and source.ref is None:
        return [bytes(frame) for frame in source.frames or ()]
    ref: Any = source.ref if isinstance(source, Message) else source
    return ownership_of(ref)


@dataclass(slots=True)
class _Pending:
    """A call of one worker that has not been answered. It keeps the arguments alive."""

    task: bytes
    body: Body
    # The items of a generator that the caller has dropped are not needed.
    future: Message | weakref.ref[MessageStream]

    def target(self) -> Message | MessageStream | None:
        return self.future if isinstance(self.future, Message) else self.future()

    def deliver(self, kind: int, form: int, frames: Sequence[bytes], ref: ObjectRef[Any] | None) -> None:
        target = self.target()
        outcome: dict[str, Any] = {
            "frames": frames if ref is None else None,
            "ref": ref,
            "failed": kind == ERROR,
            "has_references": form == STORED_REFERENCES,
        }
        if kind == ITEM and isinstance(target, MessageStream):
            item = Message(target.completed().carrier, self.task)
            item.resolve(**outcome)
            target.add_item(item)
        elif target is not None:
            target.resolve(**outcome)

    def fail(self, error: BaseException) -> None:
        target = self.target()
        if target is not None:
            target.resolve(error=error)


@dataclass(eq=False)
class Session:
    """The connection with one worker, which the lane's thread uses."""

    rank: int
    handle: Any
    actor_id: bytes
    identity: bytes
    send_frames: Callable[[bytes, Sequence[Any]], bool]  # returns whether there is a connection
    wake: Callable[["Session"], None]  # lets the lane's thread `pump`
    # Of the serve call, which yields the answers that go through the object store; None before Ray is asked for it.
    items: ObjectRefGenerator | None = None
    greeted: bool = False  # whether the worker has connected and said what it has received
    has_begun: bool = False  # whether a worker that overlaps, and will end the serve call, has begun all calls before
    has_left: bool = False  # whether the worker has said that no answer follows
    error: BaseException | None = None  # which ended the serve call
    exhausted: bool = False  # whether the object store lacks an answer that the worker has announced
    _sent: int = 0
    _received: int = 0
    _told: int = 0
    _unacked: deque[tuple[int, list[bytes]]] = field(default_factory=deque)
    _waiting: deque[_Pending | int] = field(default_factory=deque)
    _calls: dict[int, _Pending] = field(default_factory=dict)
    # The argument whose arrival wakes this session.
    _awaited: Message | None = None
    # Answers in order, from the first one that is stored and whose reference has not arrived.
    _arrived: deque[tuple[_Pending, int, int, Sequence[bytes]]] = field(default_factory=deque)
    _stopping: bool = False
    # The error of calls that have no answer, once the serve call has ended.
    _end_error: BaseException | None = None

    def call(self, future: Message | MessageStream, body: Body) -> None:
        """Send a call, or queue it until its turn. It fails if the serve call has ended."""
        if self._end_error is not None:
            future.resolve(error=self._end_error)
            return
        pending = _Pending(future.task, body, future if isinstance(future, Message) else weakref.ref(future))
        if self._waiting or not self.greeted or len(self._calls) >= WINDOW or body.sources:
            self._waiting.append(pending)
            self.pump()
        else:
            self._send(CALL, pending.task, (body.pickled,))
            self._calls[self._sent] = pending

    def stop(self) -> None:
        """Let the worker end the serve call when it has answered the calls before."""
        if not self._stopping and not self.over:
            self._stopping = True
            self._waiting.append(STOP)
            self.pump()

    @property
    def over(self) -> bool:
        """Whether the serve call has ended."""
        return self._end_error is not None

    @property
    def backlog(self) -> int:
        """The number of calls that have not been sent."""
        return len(self._waiting)

    @property
    def awaits_store(self) -> bool:
        """Whether an answer has arrived whose reference has not."""
        return bool(self._arrived)

    def pump(self) -> None:
        """Send the calls whose turn it is, as far as the window allows; the arrival of an argument wakes the rest."""
        awaited: Message | None = None
        while self._waiting and self.greeted and len(self._calls) < WINDOW:
            first = self._waiting[0]
            if not isinstance(first, _Pending):
                self._waiting.popleft()
                self._send(first)
            # The last one, because answers arrive about in order.
            elif (awaited := next((one for one in reversed(first.body.messages) if not one.done), None)) is None:
                self._waiting.popleft()
                self._send_call(first)
            else:
                if awaited is not self._awaited:
                    awaited.add_callback(lambda _: self.wake(self))
                break
        self._awaited = awaited

    def _send_call(self, call: _Pending) -> None:
        """Send a call, or fail it because of its arguments."""
        # The worker runs also a generator whose items are not read any more, because it may do more than yield them.
        target = call.target()
        if (failed := next((one for one in call.body.messages if one.failed), None)) is not None:
            # The death of the worker that should have made the argument is not the death of this one.
            error = failed.error
            if error is not None and not isinstance(error, RayTaskError):
                error = RayTaskError("a call", f"An argument could not be computed:\n{error}", error, ip=LOCAL)
            if target is not None:
                target.resolve(frames=failed.frames, ref=failed.ref, error=error, failed=True)
        elif any(one.has_references for one in call.body.messages):
            call.fail(
                LaneError(
                    "an answer that is an argument of this call holds references, which cannot travel by the lane. "
                    "Wait for that answer before you pass the call on: then the call leaves the lane."
                )
            )
        else:
            self._send(CALL, call.task, call.body.frames())
            self._calls[self._sent] = call

    def cancel(self, task: bytes, error: BaseException, *, asks: bool) -> bool:
        """Drop a call that has not been sent, or with `asks` cancel one that was; return whether it was dropped."""
        for at, call in enumerate(self._waiting):
            if isinstance(call, _Pending) and call.task == task:
                del self._waiting[at]
                call.fail(error)
                self.pump()
                return True
        if asks and any(call.task == task for call in self._calls.values()):
            self._send(CANCEL, task)
        return False

    def accept(self, message: Sequence[bytes]) -> bool:
        """Take a message of the worker, as frames; return `awaits_store`."""
        first, *others = message
        kind, _, form, number, acked, call = _ANSWER.unpack_from(first)
        while self._unacked and self._unacked[0][0] <= acked:
            self._unacked.popleft()
        if kind == HELLO:
            self.greeted = True
            for _, kept in self._unacked:
                self.send_frames(self.identity, kept)
            self._send_unnumbered(WELCOME)
        elif number == self._received + 1:
            self._received = number
            if kind == BEGUN:
                self.has_begun = True
            elif kind == BYE:
                self.has_left = True
                self._send_unnumbered(ACK)
            else:
                pending = self._calls[call] if kind == ITEM else self._calls.pop(call)
                content = first[ANSWER_BYTES:]
                frames = [content, *others] if content else ()
                if form == INLINE and not self._arrived:
                    if kind == VALUE and isinstance(pending.future, Message):
                        pending.future.resolve(frames)
                    else:
                        pending.deliver(kind, form, frames, None)
                else:
                    self._arrived.append((pending, kind, form, frames))
                    self.hand_out()
                if self._received - self._told >= ACK_EVERY:
                    self._send_unnumbered(ACK)
        if self._waiting:
            self.pump()
        return bool(self._arrived)

    def hand_out(self) -> None:
        """Hand out the answers that have arrived, up to one whose reference has not."""
        while self._arrived:
            pending, kind, form, frames = self._arrived[0]
            ref = None
            if form != INLINE:
                if self.items is None or not self.items.next_ready():
                    return
                ref = next(self.items, None)
                if ref is None or ref == self.items.completed():  # which holds the error of the serve call
                    self.exhausted = True
                    return
            self._arrived.popleft()
            pending.deliver(kind, form, frames, ref)

    def end(self, error: BaseException) -> None:
        """Fail all calls that have no answer, because the serve call has ended."""
        self._end_error, self.has_begun = error, True
        lost: dict[bytes, _Pending] = {}
        for pending, kind, form, frames in self._arrived:
            # What follows an item that is lost is lost too.
            if form == INLINE and pending.task not in lost:
                pending.deliver(kind, form, frames, None)
            else:
                lost[pending.task] = pending
        calls = [*lost.values()]
        calls += [*self._calls.values(), *(call for call in self._waiting if isinstance(call, _Pending))]
        self._arrived.clear()
        self._calls.clear()
        self._waiting.clear()
        self._unacked.clear()
        self._awaited = None
        for call in calls:
            call.fail(error)

    def _send(self, kind: int, task: bytes = NO_TASK, frames: Sequence[bytes] = ()) -> None:
        self._sent += 1
        self._told = self._received
        header = _REQUEST.pack(kind, len(frames) > 1, self._sent, self._received, task)
        message = [header + frames[0], *frames[1:]] if frames else [header]
        self._unacked.append((self._sent, message))
        if not self.send_frames(self.identity, message):
            self.greeted = False  # until the worker has connected again, and says what has arrived

    def _send_unnumbered(self, kind: int) -> None:
        self._told = self._received
        self.send_frames(self.identity, [_REQUEST.pack(kind, False, 0, self._received, NO_TASK)])

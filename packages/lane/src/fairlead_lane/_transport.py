# SPDX-License-Identifier: Apache-2.0
"""The lane of a group: its connections with the workers, and the thread that owns them.

Callers hand this thread what is to be done and wait until there is enough, and never touch a socket. So nothing that
interrupts a caller, such as the handler of a signal, interrupts a message, and no thread waits for a lock.
"""

import contextlib
import logging
import math
import os
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray import ObjectRefGenerator

from fairlead_placement import PlacementError
from fairlead_placement.spi import OneTimeEvent, block_shutdown, never_connect
from fairlead_workergroup.exceptions import LaneError, WorkerGroupError, format_ranks
from fairlead_workergroup.spi import (
    Member,
    Message,
    MessageStream,
    Site,
    Snapshot,
    Transport,
    actor_id_of,
    stream_function,
)

from ._request import encode
from ._router import Router, raise_file_limit
from ._session import Body, Session

logger = logging.getLogger(__name__)

# The longest wait of the lane's thread, which looks then whether its Ray is still there.
SLICE_S = 0.5
# While the object store has not reported an answer that the worker has announced.
REPORT_S = 0.001
# The calls of a worker that may wait to be sent. Further calls wait until there is room.
MOST_WAITING = 10_000
# How often serve calls are looked at, besides Ray's report of their end.
CHECK_S = 1.0
# How long a caller waits for the lane's thread to drop a request.
CANCEL_S = 10.0
# How long a caller waits for the end of the lane's thread, which is about to end.
JOIN_S = 5.0
# The method of a host that runs another one and returns nothing.
SILENT = "_fairlead_silent"
CLOSED = "the lane has been closed"


@dataclass(eq=False)
class _Watcher:
    """A thread that waits until there is enough."""

    is_enough: Callable[[], bool]
    found: bool = False
    left: bool = False  # whether the thread does not wait any more
    answered: OneTimeEvent = field(default_factory=OneTimeEvent)


class Lane(Transport):
    """The messages between the driver and the workers of a group.

    Args:
        site: the group, as far as the lane needs it.
        router: the sockets; the lane calls `release` when it has closed them.
        code: the pickled function by which a worker serves the lane, or a reference to it.
        node_id: the node of the driver.
    """

    name: str = "lane"
    most_waiting: int = MOST_WAITING

    def __init__(self, site: Site, router: Router, release: Callable[[], object], code: Any, *, node_id: str) -> None:
        self.failures: int = 0
        self._site = site
        self._router = router
        self._release = release
        self._code = code
        self._node_id = node_id
        self._closing = False
        self._closed = False
        # Callers start the sessions, one caller at a time, because Ray has to get the serve calls in order. They change
        # the other collections by single operations only, which nothing interrupts.
        self._order = threading.RLock()
        self._next_task = int.from_bytes(os.urandom(5), "little") << 20
        # The one that takes the calls of each rank.
        self._sessions: dict[int, Session] = {}
        # Those that have not ended.
        self._by_identity: dict[bytes, Session] = {}
        # Those that take no further calls: the lane's thread lets their workers end the serve call.
        self._stopped: set[Session] = set()
        # What the lane's thread has to do.
        self._commands: deque[Callable[[], object]] = deque()
        # Ray reports here, on a thread of its own, which serve calls have ended.
        self._ended: deque[tuple[Session, BaseException | None]] = deque()
        # The rest belongs to the lane's thread: sessions with as many calls as may wait to be sent, sessions that await
        # the object store, futures to be called back.
        self._crowded: set[Session] = set()
        self._awaiting: set[Session] = set()
        self._resolved: deque[Message] = deque()
        self._watchers: list[_Watcher] = []
        self._checked = time.monotonic()
        self._in_turn = False
        self._thread = threading.Thread(target=self._serve, name="fairlead-lane", daemon=True)
        self._thread.start()

    def open(self, timeout_s: float) -> None:
        """Let the workers serve the lane, and wait until all of them do.

        It leaves out lost workers, and those that another thread restarts: their first call lets them serve the lane.
        """
        raise_file_limit(len(self._site.members().members))
        with self._order:
            # Another thread may have started sessions with its first calls, also after a restart.
            for member in self._site.members().members:
                if member.failure is None and not member.restarting:
                    self._session(member)
            sessions = list(self._sessions.values())
        if not self.run(lambda: all(one.greeted or one.over for one in sessions), timeout_s):
            late = [one.rank for one in sessions if not (one.greeted or one.over)]
            raise self._late_error(
                f"The lane did not open within {round(timeout_s, 2):g} s", late, "They are called by Ray."
            )
        lacking = tuple(sorted(one.rank for one in sessions if isinstance(one.error, ModuleNotFoundError)))
        if lacking:
            raise LaneError(
                f"A lane needs pyzmq in the Python of the workers, and it is not installed there for rank(s) "
                f"{format_ranks(lacking)}. Add `pyzmq` to the workers' environment.",
                lacking,
            )

    def encode(self, requests: Iterable[Any]) -> list[tuple[str, Body]]:
        return list(encode(requests))

    def send(
        self, now: Snapshot, ranks: Sequence[int], encoded: Sequence[tuple[str, Body]], *, yields_items: bool
    ) -> list[Any]:
        with self._order:
            calls: list[tuple[Session, Any, Body]] = []
            first, self._next_task = self._next_task, self._next_task + len(encoded)
            for number, (rank, (method, body)) in enumerate(zip(ranks, encoded, strict=True), first):
                session = self._session(now.members[rank])
                # In the form of Ray's ids: the id of the request, then that of the actor.
                task = struct.pack("<Q", number) + session.actor_id
                kind = MessageStream if yields_items and method != SILENT else Message
                calls.append((session, kind(self, task), body))
            # All ranks get the call, or after Ctrl-C none.
            self._do(partial(self._submit, calls))
            return [future for _, future, _ in calls]

    def wait_for_room(self, ranks: Iterable[int], timeout_s: float | None) -> bool:
        if not self._crowded:
            return True
        sessions = {self._sessions.get(rank) for rank in ranks}
        return self.run(lambda: self._crowded.isdisjoint(sessions), timeout_s) or self._closed

    def makes_way(self, ranks: Collection[int]) -> bool:
        """Return whether Ray can be given a call of these ranks now, in its turn.

        Workers that overlap run it at once, so they first have to begin all earlier calls; `wait_for_way` waits.
        """
        if not self._site.overlaps:
            return True
        ahead = [one for one in self._find(ranks) if not one.has_begun]
        self._stopped.update(ahead)
        self._router.interrupt()
        return not ahead

    def wait_for_way(self, ranks: Collection[int], timeout_s: float | None) -> bool:
        ahead = self._find(ranks)
        return self.run(lambda: all(one.has_begun or one not in self._stopped for one in ahead), timeout_s)

    @contextlib.contextmanager
    def detour(self, ranks: Iterable[int]) -> Iterator[None]:
        """Let these workers serve Ray's calls of a block, after all earlier calls, then the lane again."""
        with self._order:
            now = self._site.members()
            served = [rank for rank in ranks if rank in self._sessions and not (self._closed or self._closing)]
            # After Ctrl-C at any moment from here the next call of a worker starts its session.
            self._stop({*served})
            try:
                yield
            finally:
                for rank in () if self._closed else served:
                    if now.has([rank]):
                        self._start(now[rank])
                    else:  # it is leaving the group
                        del self._sessions[rank]

    def stop(self) -> None:
        """Let the workers end the lane after all earlier calls."""
        with self._order:
            self._closing = True
            self._stop({one.rank for one in list(self._by_identity.values())})

    def close(self, timeout_s: float) -> None:
        """Wait until all earlier calls have been answered and the workers have ended the lane."""
        if not self.run(lambda: not self._find_serving(), timeout_s):
            late = sorted({one.rank for one in self._find_serving()})
            raise self._late_error(
                f"The lane did not close within {round(timeout_s, 2):g} s",
                late,
                "Their calls go on, and later calls wait behind these.",
            )
        self._do(partial(self._finish, WorkerGroupError(CLOSED)))
        self._join()

    def run(self, is_enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds; return whether it does within the time.

        Raises:
            WorkerGroupError: a finalizer waits on the lane's thread, which it has interrupted.
        """
        if threading.current_thread() is self._thread:
            return self._run_here(is_enough, timeout_s)
        if is_enough():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        watcher = _Watcher(is_enough)
        self._do(lambda: self._watchers.append(watcher))
        if self._closed:
            return is_enough()
        try:
            ends = _end_of(timeout_s)
            while not watcher.answered.wait(_left_until(ends)) and time.monotonic() < ends:
                pass
        finally:
            watcher.left = True
        return watcher.found

    def cancel(self, task: bytes, *, asks: bool) -> bool:
        """Drop a request that has not been sent, or with `asks` cancel a coroutine that runs."""
        error, dropped = ray.exceptions.TaskCancelledError(), list[bool]()

        def drop() -> None:
            sessions = [one for one in self._by_identity.values() if task.endswith(one.actor_id)]
            dropped.append(any(one.cancel(task, error, asks=asks) for one in sessions))

        self._do(drop)
        self.run(lambda: bool(dropped), CANCEL_S)
        return dropped == [True]

    def call_back(self, future: Message) -> None:
        """Call the callbacks of a future when no message is being taken."""
        self._resolved.append(future)

    def _find(self, ranks: Collection[int]) -> list[Session]:
        """Return the sessions of ranks that have not ended."""
        return [one for one in list(self._by_identity.values()) if one.rank in ranks]

    def _find_serving(self) -> list[Session]:
        """Return the sessions that have not ended, without those for which Ctrl-C came before the serve call."""
        return [one for one in list(self._by_identity.values()) if one.items is not None or one.greeted]

    def _session(self, member: Member) -> Session:
        """Return the connection with the present incarnation of a worker; start one if there is none."""
        session = self._sessions.get(member.rank)
        if session is None or session in self._stopped or session.over or session.handle is not member.handle:
            session = self._start(member)
        return session

    def _start(self, member: Member) -> Session:
        if self._closed:
            raise WorkerGroupError(CLOSED)
        # Ctrl-C may have come before an earlier one was used.
        self._stop({member.rank})
        identity = struct.pack("<I", member.rank) + uuid.uuid4().bytes
        config = self._router.config(identity, is_local=member.process.node_id == self._node_id)
        actor_id = bytes.fromhex(actor_id_of(member.handle))
        session = Session(member.rank, member.handle, actor_id, identity, self._router.send, self._wake)
        # Before the request, so that the lane knows the name when the worker connects.
        self._by_identity[identity] = session
        try:
            session.items = items = stream_function(member, self._code, config)
        except Exception:
            del self._by_identity[identity]
            raise

        def note(ended: Future[Any]) -> None:
            self._ended.append((session, ended.exception()))
            self._router.interrupt()

        items.completed().future().add_done_callback(note)
        self._sessions[member.rank] = session
        return session

    def _stop(self, ranks: Collection[int]) -> None:
        """Give the sessions of ranks no further calls, and let the workers end their serve calls after the others."""
        self._stopped.update(self._find(ranks))
        self._router.interrupt()

    def _do(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._router.interrupt()
        if self._closed:  # no other thread does it any more
            self._join()
            self._run_commands()

    def _join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _run_commands(self) -> None:
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # another thread has taken the last one
                return
            command()

    def _submit(self, calls: Sequence[tuple[Session, Any, Body]]) -> None:
        with self._router.batch(self._note_lost):
            for session, future, body in calls:
                session.call(future, body)
                if session.backlog >= self.most_waiting:
                    self._crowded.add(session)

    def _wake(self, session: Session) -> None:
        """Send the calls of a worker that have waited for an argument; the carrier of that argument calls this."""
        if threading.current_thread() is self._thread:
            with block_shutdown():
                session.pump()
        else:
            self._do(session.pump)

    def _note_lost(self, identity: bytes) -> None:
        """Note that there is no connection with a worker at present."""
        if (session := self._by_identity.get(identity)) is not None:
            session.greeted = False

    def _serve(self) -> None:
        """Own the sockets until the lane is closed."""
        never_connect()
        while not self._closed:
            try:
                self._turn(SLICE_S)
            except BaseException as error:  # noqa: BLE001  without this thread the workers would get no answer
                if self._site.is_connected:  # otherwise Ray has been shut down
                    logger.warning("A lane could not take a message: %r", error)
                    time.sleep(SLICE_S)
            if not self._site.is_connected:
                self._finish(WorkerGroupError(f"{self._site!r}: the Ray it was made on has been shut down"))
            # A thread that sends, or makes way for Ray's calls, is about to start sessions.
            elif (self._closing or self._site.is_ending) and self._order.acquire(blocking=False):
                try:
                    if not self._find_serving():
                        self._finish(WorkerGroupError(CLOSED))
                finally:
                    self._order.release()
        self._answer()
        with contextlib.suppress(PlacementError):  # the node agent releases the port of a process that has ended
            self._release()

    def _run_here(self, is_enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait on the lane's own thread, in a callback of a future."""
        ends = _end_of(timeout_s)
        while not (found := is_enough()) and time.monotonic() < ends and not self._closed:
            if self._in_turn:
                raise WorkerGroupError(
                    "A finalizer waits for a call while its thread takes the messages of the lane, so the answer "
                    "cannot arrive. Wait for it outside of the finalizer."
                )
            self._turn(_left_until(ends))
        return found

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to do, do it, and answer the threads that have waited for it."""
        awaits_ray = self._ended or self._awaiting
        self._router.wait(0.0 if self._commands else min(timeout_s, REPORT_S) if awaits_ray else timeout_s)
        self._in_turn = True
        try:
            with block_shutdown():  # it frees references
                self._run_commands()
                self._receive()
        finally:
            self._in_turn = False
            self._answer()

    def _answer(self) -> None:
        """Call callbacks, and wake the threads that have enough."""
        while self._resolved:
            self._resolved.popleft().run_callbacks()
        for watcher in list(self._watchers):
            if not watcher.left:
                watcher.found = watcher.is_enough()
            if watcher.left or watcher.found or self._closed:
                self._watchers.remove(watcher)
                watcher.answered.set()

    def _receive(self) -> None:
        """Take the messages that have arrived."""
        for stopped in [*self._stopped]:
            stopped.stop()
        self._check_sessions()
        # What these workers sent before their end has arrived, and is taken before they are given up.
        ended = len(self._ended)
        for identity, message in self._router.receive(drains=bool(ended)):
            session = self._by_identity.get(identity)
            if session is not None and session.accept(message):
                self._awaiting.add(session)
        for waiting in [*self._awaiting]:
            waiting.hand_out()
            if not waiting.awaits_store:
                self._awaiting.discard(waiting)
        for _ in range(ended):
            session, error = self._ended.popleft()
            if session.awaits_store and error is None and not session.exhausted:
                self._ended.append((session, error))
                continue
            session.error = error
            if error is not None:
                self._site.report_end(session.actor_id.hex(), error, "its lane ended")
            self._drop(session, error or LaneError(f"rank {session.rank} ended the lane before it had answered"))
        self._crowded = {one for one in self._crowded if one.backlog >= self.most_waiting}

    def _drop(self, session: Session, error: BaseException) -> None:
        session.end(error)
        self._by_identity.pop(session.identity, None)
        self._stopped.discard(session)
        self._awaiting.discard(session)

    def _check_sessions(self) -> None:
        """Look from time to time for serve calls whose end has not been reported."""
        if time.monotonic() - self._checked < CHECK_S:
            return
        self._checked = time.monotonic()
        sessions = list(self._by_identity.values())
        for unused in (one for one in sessions if one.items is None and one.has_left):
            self._drop(unused, WorkerGroupError(CLOSED))  # Ctrl-C came before it was used
        streams = [(one, one.items) for one in sessions if one.items is not None]
        outcomes = find_ended([items for _, items in streams])
        self._ended.extend((streams[at][0], error) for at, error in outcomes.items())

    def _finish(self, error: BaseException) -> None:
        """Close the sockets, and fail what has not been answered."""
        if self._closed:
            return
        self._closed = True
        with block_shutdown():
            while self._by_identity:
                self._drop(self._by_identity.popitem()[1], error)
            self._sessions.clear()
            self._ended.clear()
            self._run_commands()
            self._code = None
        self._router.close()

    def _late_error(self, what: str, ranks: Sequence[int], then: str) -> LaneError:
        reason = f"{what}, because {len(ranks)} worker(s) did not follow. {then}"
        return LaneError(reason, tuple(ranks), self._site.late_workers(ranks))


def _end_of(timeout_s: float | None) -> float:
    """Return the end of a wait by the monotonic clock; infinity for one without end."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def _left_until(ends: float) -> float:
    """Return the seconds of the next part of a wait."""
    return max(0.0, min(SLICE_S, ends - time.monotonic()))


def find_ended(streams: Sequence[ObjectRefGenerator]) -> dict[int, BaseException | None]:
    """Return which serve calls have ended, by position, each with its error."""
    position = {stream.completed(): at for at, stream in enumerate(streams)}
    if not position:
        return {}
    ended, _ = ray.wait(list(position), num_returns=len(position), timeout=0, fetch_local=False)
    outcomes: dict[int, BaseException | None] = {}
    for ref in ended:
        outcomes[position[ref]] = None
        try:
            ray.get(ref)
        except Exception as error:  # noqa: BLE001  whatever ended the call
            outcomes[position[ref]] = error
    return outcomes

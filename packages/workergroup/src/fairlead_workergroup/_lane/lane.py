# SPDX-License-Identifier: Apache-2.0
"""The lane of a group: its connections with the workers, and the threads that take turns at its socket.

A thread that waits for an answer reads the socket itself, because handing each message to it from a thread of its own
would double the time of a call. Another thread reads only while no caller does.
"""

import contextlib
import logging
import os
import resource
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray import ObjectRefGenerator

from fairlead_placement import PlacementError
from fairlead_placement.spi import block_shutdown, never_connect

from .._futures import LaneFuture, LaneStream
from .._membership.judge import Evidence
from .._membership.model import Member, Snapshot
from .._membership.roster import Roster
from .._observe.evidence import evidence_of
from .._observe.query import late_workers
from .._ray_private import actor_id_of
from ..exceptions import MOST_SHOWN, LaneError, WorkerGroupError
from .request import encode
from .router import Router
from .session import Session
from .signals import Delay

logger = logging.getLogger(__name__)

# The longest wait of a thread for the socket. Whoever needs it sooner interrupts the wait.
SLICE_S = 0.5
# How long a thread that found another one at the socket waits before it looks again.
FOLLOW_S = 0.02
# For so long after the last use by a caller the keeper leaves the socket to the callers.
IDLE_S = 0.02
# While the object store has not reported an answer that the worker has announced.
REPORT_S = 0.001
# The calls of a worker that may wait to be sent. Further calls wait until there is room.
MOST_WAITING = 10_000
# Files that the process needs besides one for each connection.
SPARE_FILES = 512
# How often serve calls are looked at, besides Ray's report of their end.
CHECK_S = 1.0
# The method of a host that runs another one and returns nothing.
SILENT = "_fairlead_silent"
CLOSED = "the lane has been closed"
_nothing = contextlib.nullcontext()


class Lane:
    """The messages between the driver and the workers of a group.

    The lane calls `release` when it closes the router. `overlaps` says whether the workers run Ray's calls while they
    serve it. `holders` counts the contexts that have opened it, and `failures` the answers that were errors.
    """

    def __init__(
        self, roster: Roster, router: Router, release: Callable[[], object], *, node_id: str, overlaps: bool = False
    ) -> None:
        self.holders: int = 1
        self.failures: int = 0
        self._roster = roster
        self._router = router
        self._release = release
        self._node_id = node_id
        self._overlaps = overlaps
        self._sessions: dict[int, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        # Those with calls or answers that wait.
        self._busy: set[Session] = set()
        # Ray reports here, on a thread of its own, which serve calls have ended.
        self._ended: deque[tuple[Session, BaseException | None]] = deque()
        self._checked = time.monotonic()
        self._next_task = int.from_bytes(os.urandom(5), "little") << 20
        self._order = threading.RLock()
        self._gate = threading.Lock()
        self._socket_lock = threading.Lock()
        self._changed = threading.Condition()
        self._followers = 0
        self._uses = 0
        self._attended = 0
        self._attending = threading.Lock()
        self._wanted = threading.Event()
        self._closing = False
        self._closed = False
        # Reentrant, because a handler of a signal interrupts too.
        self._waking = threading.RLock()
        self._keeper = threading.Thread(target=self._keep, name="fairlead-lane", daemon=True)

    def open(self, timeout_s: float) -> None:
        """Let the workers serve the lane, and wait until all of them do.

        It leaves out lost workers, and those that another thread restarts: their first call lets them serve the lane.
        """
        _raise_file_limit(len(self._roster.snapshot().members))
        self._keeper.start()
        with self._order:
            # Another thread may have started sessions with its first calls, also after a restart.
            for member in self._roster.snapshot().members:
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
                f"{', '.join(map(str, lacking[:MOST_SHOWN]))}. Add `pyzmq` to the workers' environment.",
                lacking,
            )

    def send(
        self,
        now: Snapshot,
        ranks: Sequence[int],
        requests: Iterable[Any],
        *,
        yields_items: bool,
    ) -> list[Any]:
        """Send a request to each rank, and return their futures; `yields_items` is for a generator method."""
        with self._order:
            members = now.members
            sessions = [self._session(members[rank]) for rank in ranks]
            futures: list[Any] = []
            number = self._next_task
            self._next_task += len(sessions)
            with self._hold(), self._router.batch(self._note_lost):
                for session, (method, body) in zip(sessions, encode(requests), strict=True):
                    number += 1
                    # In the form of Ray's ids: the id of the request, then that of the actor.
                    task = struct.pack("<Q", number) + session.actor_id
                    kind = LaneStream if yields_items and method != SILENT else LaneFuture
                    future = kind(self, task)
                    if session.call(future, body):
                        self._busy.add(session)
                        body.call_when_ready(self, self._interrupt)
                    futures.append(future)
            self._uses += 1
            return futures

    def wait_for_room(self, ranks: Iterable[int], timeout_s: float | None) -> bool:
        """Wait while too many calls of these workers wait to be sent; return whether there is room in time.

        Threads that make calls of other workers, or end the lane, do not wait meanwhile.
        """
        if not self._busy:
            return True
        sessions = [session for rank in ranks if (session := self._sessions.get(rank)) is not None]
        return self.run(lambda: all(one.backlog < MOST_WAITING for one in sessions), timeout_s) or self._closed

    @contextlib.contextmanager
    def detour(self, ranks: Iterable[int]) -> Iterator[None]:
        """Let these workers serve Ray's calls that are made meanwhile, after all earlier calls, then the lane again."""
        with self._order:
            now = self._roster.snapshot()
            goes_on = not (self._closed or self._closing or self._overlaps)
            served = [rank for rank in ranks if rank in self._sessions and goes_on]
            self._stop(self._sessions[rank] for rank in served)
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
            self._stop(self._sessions.values())

    def close(self, timeout_s: float) -> None:
        """Wait until all earlier calls have been answered and the workers have ended the lane."""
        if not self.run(lambda: not self._by_identity, timeout_s):
            late = sorted({one.rank for one in list(self._by_identity.values())})
            raise self._late_error(
                f"The lane did not close within {round(timeout_s, 2):g} s",
                late,
                "Their calls go on, and later calls wait behind these.",
            )
        self._finish(WorkerGroupError(CLOSED))
        self._keeper.join(timeout=5)

    def run(self, is_enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Receive messages until a condition holds; return whether it does within the time."""
        if is_enough():
            return True
        ended = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = SLICE_S if ended is None else min(SLICE_S, ended - time.monotonic())
            self._uses += 1
            with Delay(self._interrupt):
                if self._step(max(0.0, left), is_enough) or is_enough():
                    return True
            if left <= 0 or self._closed:
                return False

    def attend(self, count: int) -> None:
        """Add to the number of futures that an event loop waits for, so that the keeper receives their messages."""
        with self._attending:
            self._attended += count
        if count > 0:
            self._wanted.set()

    def cancel(self, task: bytes, *, asks: bool) -> bool:
        """Drop a request that has not been sent, or with `asks` cancel a coroutine that runs."""
        error = ray.exceptions.TaskCancelledError()
        with self._hold():
            sessions = [one for one in self._by_identity.values() if task.endswith(one.actor_id)]
            was_dropped = any(one.cancel(task, error, asks=asks) for one in sessions)
            self._pump()
        self._notify()
        return was_dropped

    def _note_lost(self, identity: bytes) -> None:
        """Note that there is no connection with a worker at present."""
        if (session := self._by_identity.get(identity)) is not None:
            session.greeted = False

    def _session(self, member: Member) -> Session:
        """Return the connection with the present incarnation of a worker; start one if there is none."""
        session = self._sessions.get(member.rank)
        if session is None or session.over or session.handle is not member.handle:
            session = self._start(member)
        return session

    def _start(self, member: Member) -> Session:
        identity = struct.pack("<I", member.rank) + uuid.uuid4().bytes
        # Before the request, so that the lane knows the name when the worker connects.
        with self._hold():
            if self._closed:
                raise WorkerGroupError(CLOSED)
            config = self._router.config(identity, is_local=member.process.node_id == self._node_id)
            items = member.handle._fairlead_serve.remote(config)
            actor_id = bytes.fromhex(actor_id_of(member.handle))
            session = Session(member.rank, member.handle, actor_id, identity, items, self._router.send)
            self._sessions[member.rank] = self._by_identity[identity] = session

        def note(ended: Future[Any]) -> None:
            self._ended.append((session, ended.exception()))
            self._interrupt()

        items.completed().future().add_done_callback(note)
        return session

    def _stop(self, sessions: Iterable[Session]) -> None:
        with self._hold():
            for session in sessions:
                session.stop()
                session.pump()
                if session.is_busy:
                    self._busy.add(session)

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Keep other threads from the socket, and signals from this one; interrupt the thread that waits at it."""
        with Delay(self._interrupt):
            if not self._socket_lock.acquire(blocking=False):
                with self._gate:
                    self._interrupt()
                    self._socket_lock.acquire()
            try:
                yield
            finally:
                self._socket_lock.release()

    def _interrupt(self) -> None:
        with self._waking:
            if not self._closed:
                self._router.interrupt()

    def _step(self, timeout_s: float, is_enough: Callable[[], bool] = bool, *, frees: bool = False) -> bool:
        """Receive messages, or wait for the thread that does so; return whether they are enough.

        With `frees` this is a background thread, which must not free references while Ray shuts down.
        """
        with self._gate:  # a thread in `_hold` comes first
            is_mine = self._socket_lock.acquire(blocking=False)
        done = False
        if is_mine:
            try:
                until = time.monotonic() + timeout_s
                # The loop ends when enough has come, when nothing comes, or when another thread wants the socket.
                goes_on = not self._closed
                while goes_on:
                    waiting = self._ended or any(one.awaits_store for one in self._busy)
                    arrived = self._router.wait(min(timeout_s, REPORT_S) if waiting else timeout_s)
                    with block_shutdown() if frees else _nothing:
                        done = self._receive(is_enough)
                    goes_on = arrived and not (done or frees) and (timeout_s := until - time.monotonic()) > 0
                    if goes_on:  # otherwise when others can use the socket
                        self._notify()
            finally:
                self._socket_lock.release()
            self._notify()
        elif timeout_s:
            with self._changed:
                self._followers += 1
                self._changed.wait(min(timeout_s, FOLLOW_S))
                self._followers -= 1
        return done

    def _notify(self) -> None:
        if self._followers:
            with self._changed:
                self._changed.notify_all()

    def _receive(self, is_enough: Callable[[], bool]) -> bool:
        """Take the messages that have arrived, up to those that are enough; return whether they are."""
        sessions, busy = self._by_identity, self._busy
        self._check_sessions()
        # What these workers sent before their end has arrived, and is taken before they are given up.
        ended = len(self._ended)
        enough = False
        for identity, message in self._router.receive(drains=bool(ended)):
            session = sessions.get(identity)
            if session is not None and session.accept(message):
                busy.add(session)
            # The caller goes on as soon as it can; the other messages wait for the next turn.
            if not ended and (enough := is_enough()):
                break
        if not (ended or busy):
            return enough
        for session in list(busy):
            session.hand_out()
        for _ in range(ended):
            session, error = self._ended.popleft()
            if session.awaits_store and error is None and not session.exhausted:
                self._ended.append((session, error))
                continue
            session.error = error
            worker = None if error is None else self._roster.find(session.actor_id.hex())
            if worker is not None:  # the end of a connection alone does not say that the process is gone
                told = evidence_of(error) or Evidence("transport", "silent", text=f"its lane ended: {error}")
                self._roster.judge.tell(worker, told)
            session.end(error or LaneError(f"rank {session.rank} ended the lane before it had answered"))
            self._by_identity.pop(session.identity, None)
            busy.discard(session)
        self._pump()
        return is_enough()

    def _pump(self) -> None:
        """Send the calls whose arguments have arrived, also those that were arguments of calls that fail here."""
        was_dropped = True
        while was_dropped:
            was_dropped = False
            for session in self._busy:
                was_dropped |= session.pump()
        self._busy -= {session for session in self._busy if not session.is_busy}

    def _check_sessions(self) -> None:
        """Look from time to time for serve calls whose end has not been reported."""
        if time.monotonic() - self._checked < CHECK_S:
            return
        self._checked = time.monotonic()
        sessions = list(self._by_identity.values())
        outcomes = find_ended([session.items for session in sessions])
        self._ended.extend((sessions[at], error) for at, error in outcomes.items())

    def _keep(self) -> None:
        """Receive messages while no caller does."""
        never_connect()
        seen = -1
        while not self._closed:
            if not self._roster.connected:
                self._finish(
                    WorkerGroupError(f"{self._roster!r}: the Ray it was made on has been shut down"), frees=True
                )
                return
            if self._uses != seen and not self._attended:
                seen = self._uses
                self._wanted.wait(IDLE_S)
                self._wanted.clear()
                continue
            try:
                self._step(SLICE_S, frees=True)
            except Exception as error:  # noqa: BLE001  without this thread nobody would answer the workers
                if self._roster.connected:  # otherwise Ray has been shut down meanwhile
                    logger.warning("A lane could not take a message: %r", error)
                    time.sleep(SLICE_S)
                continue
            # A thread that sends, or makes way for Ray's calls, is about to start sessions.
            if (self._closing or self._roster.ending) and self._order.acquire(blocking=False):
                try:
                    if not self._by_identity:
                        self._finish(WorkerGroupError(CLOSED), frees=True)
                finally:
                    self._order.release()

    def _finish(self, error: BaseException, *, frees: bool = False) -> None:
        """Close the socket, and fail what has not been answered; `frees` is as of `_step`."""
        with self._hold():
            with self._waking:
                if self._closed:
                    return
                self._closed = True
            with block_shutdown() if frees else contextlib.nullcontext():
                while self._by_identity:
                    self._by_identity.popitem()[1].end(error)
                self._busy.clear()
                self._sessions.clear()
                self._ended.clear()
            self._router.close()
        self._notify()
        with contextlib.suppress(PlacementError):  # the node agent releases the port of a process that has ended
            self._release()

    def _late_error(self, what: str, ranks: Sequence[int], then: str) -> LaneError:
        now = self._roster.snapshot()
        late = late_workers([now[rank].process for rank in ranks if now.has([rank])])  # the others have left the group
        return LaneError(f"{what}, because {len(ranks)} worker(s) did not follow. {then}", tuple(ranks), late)


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


def _raise_file_limit(count: int) -> None:
    """Raise the soft limit of open files, if the connections with so many workers need that and it is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(hard, count + SPARE_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

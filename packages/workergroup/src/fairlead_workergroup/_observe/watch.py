# SPDX-License-Identifier: Apache-2.0
"""Looking at a group again and again, on a thread of its own, until it is closed or the group ends."""

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from fairlead_placement.spi import block_shutdown, never_connect

from .._members import Roster
from ..exceptions import WorkerFailure, WorkerGroupError
from .failures import Verdicts
from .observer import Observer, check_seconds
from .status import StuckWorker, WorkerEvent, WorkerStatus

__all__ = ["Occurrences", "Watch"]

logger = logging.getLogger("fairlead_workergroup")

LEVELS = {
    "worker-started": logging.INFO,
    "worker-restarted": logging.WARNING,
    "call-slow": logging.WARNING,
    "worker-stuck": logging.WARNING,
    "worker-dead": logging.ERROR,
}
# A look asks the nodes twice at most, when a worker is stuck.
CLOSE_S = 25.0
# An exit does not wait that long: what the look finds no longer matters.
EXIT_S = 2.0
# Ray says at once what a worker that it knows to be dead died of.
CAUSE_S = 2.0


class Occurrences:
    """Remembers what has been told.

    Args:
        slow_after_s: how long a call may go without progress before it is told of as slow.
    """

    def __init__(self, slow_after_s: float) -> None:
        self._slow_after_s = slow_after_s
        # Of each rank the incarnation that was told of as started, and as dead; the incarnation and call as slow, and
        # as stuck.
        self._started: dict[int, int] = {}
        self._dead: dict[int, int] = {}
        self._slow: dict[int, tuple[int, int]] = {}
        self._stuck: dict[int, tuple[int, int]] = {}

    def new(self, statuses: Sequence[WorkerStatus]) -> Iterator[tuple[str, WorkerStatus]]:
        """What has not been told yet: the kind of each event, and the worker it happened to."""
        for now in statuses:
            if now.state == "dead":
                self._started.setdefault(now.rank, now.incarnation)
                if self._dead.get(now.rank) != now.incarnation:
                    self._dead[now.rank] = now.incarnation
                    yield "worker-dead", now
            elif now.state not in ("starting", "restarting", "unknown"):
                yield from self._of_living(now)

    def not_stuck(self, rank: int) -> None:
        """It has got on before it could be told of."""
        self._stuck.pop(rank, None)

    def _of_living(self, now: WorkerStatus) -> Iterator[tuple[str, WorkerStatus]]:
        before = self._started.get(now.rank)
        if before != now.incarnation:
            self._started[now.rank] = now.incarnation
            yield "worker-started" if before is None else "worker-restarted", now
        call = (now.incarnation, now.calls)
        slow = now.method is not None and now.since_progress_s >= self._slow_after_s
        # A call that gets on and is slow again is the same slow call; one that is stuck again has got stuck again.
        if slow and self._slow.get(now.rank) != call:
            self._slow[now.rank] = call
            yield "call-slow", now
        if now.state != "stuck":
            self._stuck.pop(now.rank, None)
        elif self._stuck.get(now.rank) != call:
            self._stuck[now.rank] = call
            yield "worker-stuck", now


class Watch:
    """A group that is being watched; made by `RayWorkerGroup.watch`. Close it, or use it as a context manager."""

    def __init__(
        self,
        group: object,
        roster: Roster,
        observer: Observer,
        verdicts: Verdicts,
        *,
        interval_s: float,
        stuck_after_s: float,
        slow_after_s: float,
        on_event: Callable[[WorkerEvent], object] | None,
    ) -> None:
        end = threading.Event()
        # A group that nobody holds any more is given back, watched or not.
        self._group = weakref.ref(group, lambda _: end.set())
        self._roster = roster
        self._observer = observer
        self._verdicts = verdicts
        self._name = roster.name_prefix
        self._interval_s = check_seconds("interval_s", interval_s)
        self._stuck_after_s = check_seconds("stuck_after_s", stuck_after_s)
        self._on_event = on_event
        self._occurrences = Occurrences(check_seconds("slow_after_s", slow_after_s))
        self._unreported: deque[tuple[str, WorkerStatus]] = deque()
        self._counter: Any = None
        self._end = end
        self._thread = threading.Thread(target=self._go_on, name=f"fairlead-watch-{self._name}", daemon=True)
        # Before Ray's own: a look would find it gone, and say so.
        atexit.register(self._close_at_exit)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Watch({self._name!r}, {'closed' if self._end.is_set() else f'every {self._interval_s:g} s'})"

    def close(self) -> None:
        """Look no more; no event is told after this, except when `on_event` itself closes. Can be repeated."""
        self._close(CLOSE_S)

    def _close_at_exit(self) -> None:
        self._close(EXIT_S)

    def _close(self, timeout_s: float) -> None:
        self._end.set()
        atexit.unregister(self._close_at_exit)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=timeout_s)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _go_on(self) -> None:
        never_connect()
        try:
            self._look_again_and_again()
        finally:
            self._end.set()
            atexit.unregister(self._close_at_exit)

    def _look_again_and_again(self) -> None:
        while not self._end.is_set():
            try:
                if not self._look():
                    return
            except WorkerGroupError:
                return  # The group has been shut down.
            except Exception:
                # The next look may succeed. A watch that ends silently is worse than one that repeats a warning.
                if not self._is_over():
                    logger.warning("cannot look at the workers of %s", self._name, exc_info=True)
            self._end.wait(self._interval_s)

    def _is_over(self) -> bool:
        """Return whether the watch has been closed, or the Ray that the group lived in has ended."""
        if self._end.is_set():
            return True
        try:
            return not self._roster.connected
        except Exception:  # noqa: BLE001  Ray is just ending
            return True

    def _look(self) -> bool:
        """Look at the workers once and report what has happened; return False if there is no group any more."""
        # Also while this thread's reference to the group is dropped, which may be the last one.
        with block_shutdown():
            group = self._group()
            if group is None or self._is_over():
                return False
            events = self._find_events()
            del group
        # The user's function may take its time, and may shut Ray down.
        for event in events:
            self._report(event)
        return True

    def _find_events(self) -> list[WorkerEvent]:
        statuses = self._observer.read_status(self._stuck_after_s)
        # If anything fails below, the next look reports these.
        self._unreported.extend(self._occurrences.new(statuses))
        dead = [now for kind, now in self._unreported if kind == "worker-dead"]
        who = self._roster.snapshot().facts
        self._verdicts.note_causes([who[now.rank] for now in dead if who[now.rank].pid == now.pid], within_s=CAUSE_S)
        stuck: dict[int, StuckWorker] = {}
        if any(kind == "worker-stuck" for kind, _ in self._unreported):
            stuck = {one.rank: one for one in self._observer.find_stuck(self._stuck_after_s, dump_stacks=True)}
        events = []
        while self._unreported:
            kind, now = self._unreported.popleft()
            cause = self._roster.snapshot().lost.get(now.rank) if kind == "worker-dead" else None
            found = stuck.get(now.rank) if kind == "worker-stuck" else None
            if kind == "worker-stuck" and found is None:
                self._occurrences.not_stuck(now.rank)
            else:
                events.append(_event(kind, now, cause, found))
                self._count(kind)
        return events

    def _count(self, kind: str) -> None:
        if self._counter is None:
            from ray.util.metrics import Counter

            # Without ray[default] on this node nobody collects it, and nothing else happens.
            self._counter = Counter(
                "fairlead_worker_events",
                description="What has happened to workers of a group, as its watch saw it.",
                tag_keys=("group", "event"),
            )
        self._counter.inc(1, tags={"group": self._name, "event": kind})

    def _report(self, event: WorkerEvent) -> None:
        if self._end.is_set():
            return
        stacks = f"\n{event.stuck.stacks}" if event.stuck is not None and event.stuck.stacks else ""
        logger.log(LEVELS[event.kind], "%s: %s%s", self._name, event.message, stacks, extra={"worker_event": event})
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed at: %s", event.message)


def _event(kind: Any, now: WorkerStatus, cause: WorkerFailure | None, stuck: StuckWorker | None) -> WorkerEvent:
    where = f"rank {now.rank} on node {now.node_id[:8]}, pid {now.pid}"
    more = ""
    if kind == "worker-restarted":
        more = f", incarnation {now.incarnation}"
    elif kind == "call-slow":
        more = f", in {now.method!r} for {now.running_s:.0f} s, no progress for {now.since_progress_s:.0f} s"
    message = f"{kind}: {cause or stuck or where}{more}"
    return WorkerEvent(
        kind, now.rank, now.coords, now.node_id, now.pid, now.incarnation, now.method, message, time.time(), stuck
    )

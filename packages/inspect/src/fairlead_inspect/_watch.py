# SPDX-License-Identifier: Apache-2.0
"""The watch of a group: it reports the events of the workers until it is closed or the group ends."""

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fairlead_placement.spi import Rounds
from fairlead_workergroup import RayWorkerGroup, StuckWorker, WorkerFailure, WorkerGroupError, WorkerStatus, spi

logger = logging.getLogger("fairlead_inspect")

LEVELS = {
    "resized": logging.INFO,
    "replaced": logging.WARNING,
    "node-draining": logging.WARNING,
    "worker-started": logging.INFO,
    "worker-restarted": logging.WARNING,
    "call-slow": logging.WARNING,
    "worker-stuck": logging.WARNING,
    "worker-dead": logging.ERROR,
}
# One look makes at most two requests to a node, the second if a worker is stuck.
CLOSE_S = 25.0
# The exit of the process does not wait for a look, whose result no longer matters.
EXIT_S = 2.0
# Ray reports the cause of a death that it knows at once.
CAUSE_S = 2.0


@dataclass(frozen=True)
class WorkerEvent:
    """Something that happened to one worker.

    Attributes:
        kind: "worker-started", "call-slow", "worker-stuck", "worker-dead", "worker-restarted", "replaced", or
            "node-draining" if its node is about to end; or about the group: "resized".
        rank: its number in the group; -1 for an event of the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        pid: its process there.
        incarnation: how often its rank was started before.
        method: the method that it ran; None if it ran none.
        message: the event as a line for people.
        time: when the watch saw the event, in seconds since the epoch by the clock of this machine.
        stuck: the details of a "worker-stuck" event, with stacks; None for other events.
    """

    kind: Literal[
        "worker-started",
        "call-slow",
        "worker-stuck",
        "worker-dead",
        "worker-restarted",
        "resized",
        "replaced",
        "node-draining",
    ]
    rank: int
    coords: Mapping[str, int] = field(hash=False)
    node_id: str
    pid: int
    incarnation: int
    method: str | None
    message: str
    time: float
    stuck: StuckWorker | None = None

    _repr_html_ = spi.record_html


class EventFilter:
    """Find the events that have not been reported yet."""

    def __init__(self, slow_after_s: float) -> None:
        self._slow_after_s = slow_after_s
        # The incarnation, or the incarnation and the call, that was reported last, by event and rank.
        self._reported: dict[tuple[str, int], object] = {}

    def find_new(self, statuses: Sequence[WorkerStatus]) -> list[tuple[str, WorkerStatus]]:
        """Return the kind of each new event, and the worker that it happened to."""
        ranks = {now.rank for now in statuses}
        for event, rank in [key for key in self._reported if key[1] not in ranks]:
            del self._reported[event, rank]  # it has left the group; the next worker of this rank is a new one
        return [(kind, now) for now in statuses for kind in self._find_kinds(now)]

    def find_drains(self, ends: Mapping[int, tuple[str, float]]) -> list[int]:
        """Return the ranks whose nodes end, each with its node and time, that have not been reported with that time."""
        return [rank for rank, end in ends.items() if self._is_new("drain", rank, end)]

    def forget_stuck(self, rank: int) -> None:
        """Note that a stuck worker makes progress again."""
        self._reported.pop(("stuck", rank), None)

    def _find_kinds(self, now: WorkerStatus) -> Iterator[str]:
        rank, call = now.rank, (now.incarnation, now.calls)
        if now.state == "dead":
            self._reported.setdefault(("started", rank), now.incarnation)
            if self._is_new("dead", rank, now.incarnation):
                yield "worker-dead"
        elif now.state not in ("starting", "restarting", "unknown"):
            known = ("started", rank) in self._reported
            if self._is_new("started", rank, now.incarnation):
                yield "worker-restarted" if known else "worker-started"
            # A call that makes progress and is slow again is the same slow call, so it is not reported again.
            if (
                now.method is not None
                and now.since_progress_s >= self._slow_after_s
                and self._is_new("slow", rank, call)
            ):
                yield "call-slow"
            # A worker that makes progress and is stuck again is reported again.
            if now.state != "stuck":
                self.forget_stuck(rank)
            elif self._is_new("stuck", rank, call):
                yield "worker-stuck"

    def _is_new(self, event: str, rank: int, subject: object) -> bool:
        before = self._reported.get((event, rank))
        self._reported[event, rank] = subject
        return before != subject


class Watch(AbstractContextManager["Watch"]):
    """The watch of a group, which `watch` starts. Close it, or use it as a context manager."""

    def __init__(
        self,
        group: RayWorkerGroup,
        *,
        interval_s: float,
        stuck_after_s: float,
        slow_after_s: float,
        on_event: Callable[[WorkerEvent], object] | None,
    ) -> None:
        # A weak reference, so that a watched group is released too when nothing else refers to it. Nothing dereferences
        # it, because the thread would then release a group that is dropped at that moment.
        self._group = weakref.ref(group, lambda _: rounds.close(0.0))
        self._observer = spi.observe_workers(group)
        self._name = self._observer.name
        self._interval_s = spi.check_seconds("interval_s", interval_s)
        self._stuck_after_s = spi.check_seconds("stuck_after_s", stuck_after_s)
        self._on_event = on_event
        self._filter = EventFilter(spi.check_seconds("slow_after_s", slow_after_s))
        self._weighed: set[int] = set()
        self._changes: deque[spi.Notice] = deque()
        self._unreported: deque[tuple[str, WorkerStatus]] = deque()
        rounds = Rounds(self._interval_s, self._look, lambda: not self._is_over(), first_s=0.0, exit_s=EXIT_S)
        self._rounds = rounds
        self._unsubscribe = spi.subscribe(group, self._changes.append, self.close)
        rounds.start()

    def __repr__(self) -> str:
        return f"Watch({self._name!r}, {'closed' if self._rounds.closed else f'every {self._interval_s:g} s'})"

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the watch; no event is reported after this, unless `on_event` itself closes it. Can be repeated.

        Args:
            timeout_s: the seconds to wait for a look that is under way.
        """
        self._rounds.close(timeout_s)
        self._unsubscribe()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> None:
        if self._is_over():
            self.close()
            return
        try:
            # The head is asked last: the workers are looked at also while it is silent.
            for find in (self._find_events, self._find_drains):
                for event in find():
                    self._report(event)
        except WorkerGroupError:
            self.close()  # the group has been shut down
        except Exception:
            # The next look may succeed, and a repeated warning is better than a watch that ends silently.
            if not self._is_over():
                logger.warning("Cannot look at the workers of %s.", self._name, exc_info=True)

    def _is_over(self) -> bool:
        """Return whether the watch has been closed, or the group's Ray has been shut down."""
        if self._rounds.closed:
            return True
        try:
            return not self._observer.connected
        except Exception:  # noqa: BLE001  Ray is shutting down
            return True

    def _find_events(self) -> list[WorkerEvent]:
        # If anything fails below, the next look reports these events.
        statuses = self._observer.read_status(self._stuck_after_s)
        self._measure(statuses)
        self._unreported.extend(self._filter.find_new(statuses))
        dead = [now for kind, now in self._unreported if kind == "worker-dead"]
        facts = [self._observer.members[now.rank].process for now in dead]
        lost = [who for who, now in zip(facts, dead, strict=True) if who.pid == now.pid]
        causes = self._observer.find_causes(lost, within_s=CAUSE_S)
        stuck: dict[int, StuckWorker] = {}
        if any(kind == "worker-stuck" for kind, _ in self._unreported):
            stuck = {one.rank: one for one in self._observer.find_stuck(self._stuck_after_s, dump_stacks=True)}
        events = []
        while self._changes:
            change = self._changes.popleft()
            events.append(_event_of_change(change, self._observer.members))
        while self._unreported:
            kind, now = self._unreported.popleft()
            cause = causes.get(now.rank) if kind == "worker-dead" else None
            details = stuck.get(now.rank) if kind == "worker-stuck" else None
            if kind == "worker-stuck" and details is None:
                self._filter.forget_stuck(now.rank)
            else:
                events.append(_event(kind, now, cause, details))
        return events

    def _find_drains(self) -> list[WorkerEvent]:
        ends, now = spi.drain_deadlines(), self._observer.members
        mine = {one.rank: (one.slot.node_id, ends[one.slot.node_id]) for one in now.members if one.slot.node_id in ends}
        return [_event_of_drain(rank, *mine[rank], now) for rank in self._filter.find_drains(mine)]

    @cached_property
    def _counter(self) -> Any:
        from ray.util.metrics import Counter

        # Without ray[default] on this node nothing collects the metric.
        return Counter(
            "fairlead_worker_events",
            description="The events of the workers of a group that its watch has reported.",
            tag_keys=("group", "event"),
        )

    @cached_property
    def _ages(self) -> Any:
        from ray.util.metrics import Gauge

        return Gauge(
            "fairlead_worker_weights_age_seconds",
            description="Seconds since a link has put the present weights of a worker into place; -1 without any.",
            tag_keys=("group", "rank"),
        )

    def _measure(self, statuses: Sequence[WorkerStatus]) -> None:
        """Set the age of the weights of the ranks that have, or have had, a version of a link."""
        self._weighed.update(now.rank for now in statuses if now.weights is not None)
        for now in statuses:
            if now.rank in self._weighed:
                age_s = -1.0 if now.weights is None else now.weights_age_s  # Ray drops infinity
                self._ages.set(age_s, tags={"group": self._name, "rank": str(now.rank)})

    def _report(self, event: WorkerEvent) -> None:
        if self._rounds.closed:
            return
        self._counter.inc(1, tags={"group": self._name, "event": event.kind})
        stacks = f"\n{event.stuck.stacks}" if event.stuck is not None and event.stuck.stacks else ""
        logger.log(LEVELS[event.kind], "%s: %s%s", self._name, event.message, stacks, extra={"worker_event": event})
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed at: %s", event.message)


def watch(
    group: RayWorkerGroup,
    interval_s: float = 5.0,
    stuck_after_s: float = spi.STUCK_AFTER_S,
    on_event: Callable[[WorkerEvent], object] | None = None,
    *,
    slow_after_s: float = 60.0,
) -> Watch:
    """Check the workers of a group in the background, and report each event of a worker once.

    Each event is logged (logger `fairlead_inspect`), counted (Ray's metric `fairlead_worker_events`, tags `group` and
    `event`), and passed to `on_event`. The next call of the group knows why a lost worker died. The metric
    `fairlead_worker_weights_age_seconds` (tags `group` and `rank`) has the age of the weights that a link of
    fairlead-transfer has brought, and -1 for a rank that has lost them.

    Args:
        group: the group, which this process has made.
        interval_s: the seconds between two checks, each with one request a node.
        stuck_after_s: the seconds without progress after which a worker is reported as "worker-stuck", as by
            `RayWorkerGroup.detect_stuck_workers`.
        on_event: called with each event on a background thread; its exceptions are logged.
        slow_after_s: the seconds without progress after which a call is reported once as "call-slow".

    Returns:
        A handle to close, which is also a context manager. The end of the group closes it too.

    Raises:
        ValueError: a number is not positive.
        WorkerGroupError: the group, or its Ray, has been shut down.
    """
    spi.read_members(group)
    return Watch(
        group, interval_s=interval_s, stuck_after_s=stuck_after_s, slow_after_s=slow_after_s, on_event=on_event
    )


def _event_of_change(change: spi.Notice, now: spi.Snapshot) -> WorkerEvent:
    # A change of the whole group names no rank.
    member = None if change.rank < 0 else now[change.rank]
    who = spi.WorkerProcess(change.rank) if member is None else member.process
    incarnation, message = 0 if member is None else member.incarnation, f"{change.kind}: {change.message}"
    kind: Any = change.kind
    return WorkerEvent(
        kind, change.rank, dict(who.coords), who.node_id, who.pid, incarnation, None, message, time.time()
    )


def _event_of_drain(rank: int, node_id: str, end: float, now: spi.Snapshot) -> WorkerEvent:
    left = f"ends in {max(0.0, end - time.time()):.0f} s" if math.isfinite(end) else "ends when it is idle"
    text = f"Ray drains node {node_id[:8]} of rank {rank}, which {left}"
    return _event_of_change(spi.Notice("node-draining", rank, text), now)


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

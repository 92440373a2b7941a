# SPDX-License-Identifier: Apache-2.0
"""The restart of lost workers: the same ranks, in the same slots, or in other slots if their nodes are lost."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fairlead_placement import HeadTimeoutError, PlacementError, RayVirtualCluster, Slot

from .._deadline import NEVER, Deadline, Operation
from .._head import alive_nodes, read_placement_group
from .._membership.model import Place, Snapshot
from .._observe.failures import Verdicts
from .._observe.query import find_dead, find_ended
from .._start.layout import move_places
from ..exceptions import MOST_SHOWN, WorkerFailure, WorkerFailureError, WorkerStartError
from .delivery import SendOnResize, deliver, send_epoch
from .launcher import Launcher
from .resources import usable_slots
from .standbys import Standby, Standbys

logger = logging.getLogger(__name__)

# Ray reports the cause of a death that it knows at once.
CAUSE_S = 10.0
CLUSTER_GONE = (
    "The cluster of this group has been shut down, and its workers with it. Reserve the cluster again, and create a "
    "new group on it."
)
# How often a change that waits for another one looks whether the group ends.
LOOK_EVERY_S = 0.5
# Ray notices within a moment that a process has ended.
NOTICED_S = 2.0
NOT_NOTICED = "its process has ended, and Ray has not noticed: a process that it forked may hold its connections"
NO_CAUSE = f"Ray reports that it is dead, and has not reported the cause within {CAUSE_S:g} s"


@dataclass(frozen=True)
class UserMethods:
    """The methods of the user's class that run when the membership changes.

    Attributes:
        on_restart: runs the method `on_restart` on the given ranks, and waits for it; takes also what the workers
            before have handed over, by rank, and a deadline.
        send_on_resize: sends the method `on_resize` to the given ranks.
        on_handover: runs the method `on_handover` on the given ranks; returns references to what they hand over.
    """

    on_restart: Callable[[Sequence[int], Mapping[int, Any], Deadline], object]
    send_on_resize: SendOnResize
    on_handover: Callable[[Sequence[int]], Mapping[int, Any]]


@dataclass(frozen=True)
class RestartPolicy:
    """When workers are restarted.

    Attributes:
        on_failure: whether calls that need a lost worker restart it.
        max_restarts: how often each rank, or with scope "group" the group, may be restarted.
        scope: "worker", or "group" for all workers together.
    """

    on_failure: bool
    max_restarts: int
    scope: str

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"max_restarts must be a whole number of at least 0, got {self.max_restarts!r}")
        if self.scope not in ("worker", "group"):
            raise ValueError(f"restart_scope must be 'worker' or 'group', got {self.scope!r}")

    @property
    def restarts_all(self) -> bool:
        """Whether all workers are restarted together."""
        return self.scope == "group"

    def blocking(self, now: Snapshot, called: Collection[int]) -> tuple[WorkerFailure, ...]:
        """Return the lost workers that a call has to wait for: those it calls, or all if they restart together."""
        together = now.is_broken or (self.on_failure and self.restarts_all)
        return tuple(failure for failure in now.lost.values() if together or failure.rank in called)


@dataclass(eq=False, repr=False)
class Restarter:
    """Restart lost workers of a group.

    Attributes:
        methods: the user's methods, which run before a change is over; set once calls can be sent.
        changing: the lock of the thread that changes the membership. It is acquired before `turn`.
        turn: the lock of the thread that sends a call or begins an epoch. Reentrant, because a restart calls `after`,
            which sends a call.
        began: when the change that holds `turn` began; None if there is none.
    """

    _launcher: Launcher
    _verdicts: Verdicts
    policy: RestartPolicy
    _standbys: Standbys
    # Those of the cluster when the group was made, and of the logical nodes that it was extended by.
    _slots: Sequence[Slot]
    changing: threading.RLock = field(default_factory=threading.RLock, init=False)
    turn: threading.RLock = field(default_factory=threading.RLock, init=False)
    began: float | None = field(default=None, init=False)
    methods: UserMethods = field(init=False)
    _group_restarts: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    # The restart on a thread of its own, for calls with a deadline.
    _background: Future[list[int]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._resources = self._launcher.resources
        self._roster = self._launcher.resources.roster

    def restart(self) -> list[int]:
        """Restart the dead workers, and return their ranks; see `RayWorkerGroup.restart_failed_workers`."""
        operation = Operation("The restart", NEVER)
        with self.change(operation), self.take_turn(operation):
            return self._restart()

    @contextlib.contextmanager
    def take_turn(self, operation: Operation) -> Iterator[None]:
        """Keep other threads from sending calls while this thread begins an epoch.

        Raises:
            ResizeTimeoutError: others sent calls until the deadline.
        """
        with self._hold(self.turn, operation, "Another thread sends calls. Make it again with a longer timeout."):
            before, self.began = self.began, time.monotonic()
            try:
                yield
            finally:
                self.began = before

    @contextlib.contextmanager
    def change(self, operation: Operation) -> Iterator[None]:
        """Keep other threads from changing the membership, then release unused slots and start missing standbys.

        Raises:
            ResizeTimeoutError: others changed the membership until the deadline.
        """
        reason = "Another thread resizes the group or restarts workers. Make it again with a longer timeout."
        with self._hold(self.changing, operation, reason):
            before = [place.slot for place in self._roster.snapshot().places]
            try:
                yield
            finally:
                if self._roster.is_over:  # the shutdown on another thread could not see everything that was started
                    self._resources.give_back()
                else:
                    self._resources.keep_slots([place.slot for place in self._roster.snapshot().places])
                    self._standbys.refill(before)

    @contextlib.contextmanager
    def _hold(self, lock: Any, operation: Operation, reason: str) -> Iterator[None]:
        while not lock.acquire(timeout=operation.deadline.left(at_most=LOOK_EVERY_S) or 0.0):
            if self._roster.ending:
                raise self._roster.ended_error()
            if operation.deadline.passed:
                raise operation.late_error(reason)
        try:
            yield
        finally:
            lock.release()

    def restart_in_background(self) -> Future[list[int]]:
        """Return the restart that runs on a thread of its own; start one if none is running."""
        with self._lock:
            if self._background is None:
                self._background = self._resources.start_thread("fairlead-restart", self._restart_once)
            return self._background

    def describe_wait(self, advice: str = "") -> str:
        """Return why a call could not be sent in time, and what its caller can do: to make it again by default."""
        since, ranks = self.began, self._roster.snapshot().restarting
        if since is None:
            return f"Other calls were being sent, or a restart was about to begin. {advice or 'Make the call again.'}"
        what = f"restart of rank(s) {', '.join(map(str, ranks))}" if ranks else "restart or resize"
        return (
            f"A {what} has been under way for {time.monotonic() - since:.1f} s and goes on; it may take "
            f"start_timeout_s={self._launcher.spec.start_timeout_s:g} s. "
            f"{advice or 'Make the call again, with a longer timeout.'}"
        )

    def remedy(self, lost: Sequence[WorkerFailure]) -> str:
        """Return what a user can do about lost workers; an empty text for the default advice."""
        if self._roster.ending:
            return "The group has been shut down. Create a new group."
        ranks = [failure.rank for failure in lost]
        if self._lacks_cluster([failure.rank for failure in lost if failure.kind == "killed"]):
            return CLUSTER_GONE
        if reason := self._explain_limit(ranks):
            return reason
        if not self.policy.on_failure:
            return ""
        if self.policy.restarts_all:
            return "The next call restarts the whole group first, whichever ranks it calls. Repeat this call."
        shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (", ..." if len(ranks) > MOST_SHOWN else "")
        return (
            f"The next call that reaches rank(s) {shown} starts them again. Repeat this call. "
            "`restart_failed_workers()` starts them at once."
        )

    def prepare_lost(self, ranks: Sequence[int], deadline: Deadline) -> None:
        """End what is left of lost ranks that a resize starts again, and find them slots if their nodes are lost.

        Raises:
            WorkerFailureError: they cannot be restarted any more, or there are no slots.
        """
        now = self._roster.snapshot()
        lost = tuple(now.lost[rank] for rank in ranks)
        if reason := self._explain_limit(ranks):
            raise WorkerFailureError(lost, reason)
        self._end_old(ranks, lost)
        self._find_new_slots(ranks, lost, deadline)

    def _restart_once(self) -> list[int]:
        """Restart in the background, so that whoever learns of the outcome can begin the next restart."""
        try:
            return self.restart()
        finally:
            with self._lock:
                self._background = None

    def _restart(self) -> list[int]:
        roster = self._roster
        now = roster.check_alive()
        lost = self.find_lost()
        if not lost:
            return []
        everybody = list(range(len(now.members)))
        ranks = everybody if self.policy.restarts_all else list(lost)
        # Ray would create actors on a removed placement group without an error, and never start them.
        if reason := CLUSTER_GONE if self._lacks_cluster(everybody) else self._explain_limit(lost):
            raise WorkerFailureError(tuple(lost.values()), reason)
        self._relaunch(
            ranks,
            tuple(lost.values()),
            counted=ranks,
            choose=lambda: self._standbys.take([now[rank].place for rank in lost]),
        )
        logger.warning("Restarted rank(s) %s of %r.", ", ".join(map(str, ranks)), roster.name_prefix)
        return ranks

    def replace(
        self, ranks: Sequence[int], choose: Callable[[], Mapping[int, Standby]], values: Mapping[int, Any]
    ) -> None:
        """Move ranks to other processes, with `turn` held. With scope "group" the others are restarted where they are.

        Args:
            choose: returns the process of each rank, when the old workers have ended.
            values: what old workers hand over, by rank.

        Raises:
            WorkerFailureError: an old process cannot be ended, or a worker did not start.
        """
        now, everybody = self._roster.snapshot(), self.policy.restarts_all
        started = list(range(len(now.members))) if everybody else list(ranks)
        # With scope "group", lost ranks that are not replaced start again too, and need slots on living nodes.
        lost = tuple(now.lost.values()) if everybody else ()
        self._relaunch(started, lost, counted=(), choose=choose, values=values)

    def _relaunch(
        self,
        ranks: Sequence[int],
        lost: tuple[WorkerFailure, ...],
        *,
        counted: Collection[int],
        choose: Callable[[], Mapping[int, Standby]],
        values: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        """End the old workers of ranks, and start others, which begins an epoch."""
        roster, resources = self._roster, self._resources
        now = roster.snapshot()
        roster.mark_restarting(ranks)
        ended, taken, numbers = False, dict[int, Standby](), list[int]()
        try:
            self._end_old(ranks, lost)
            ended = True
            taken.update(choose())
            numbers += [standby.number for standby in taken.values()]
            self._take_over(taken)
            self._find_new_slots([rank for rank in ranks if rank not in taken], lost)
            # A restart that found no room does not count, because it has restarted nothing.
            self._group_restarts += self.policy.restarts_all and bool(counted)
            roster.record_relaunch(ranks, counted=counted)
            # The store of one set of processes cannot be used by another set.
            if self.policy.restarts_all or now.is_broken or self._master_moved():
                resources.release_port()
            processes = {rank: standby.worker for rank, standby in taken.items()}
            self._launcher.start(ranks, epoch=now.epoch + 1, processes=processes)
            resources.forget(numbers)  # their processes belong to ranks now
            others = [member for member in roster.snapshot().members if member.rank not in ranks]
            if not now.is_broken:
                send_epoch([member for member in others if member.failure is None], now.epoch + 1)
            self.methods.on_restart(ranks, values, NEVER)
            if now.is_broken:
                limit = Deadline.after(self._launcher.spec.start_timeout_s)
                deliver(self._launcher, limit, skip=ranks, send_on_resize=self.methods.send_on_resize)
        except Exception as error:
            if roster.ending:
                raise
            if ended:  # the old ones, so these are the workers that this restart has started
                resources.end(ranks)
            failure = self._note_failed(ranks, error)
            if failure is error:
                raise
            raise failure from error
        finally:
            roster.mark_restarting(ranks, running=False)
            resources.discard(numbers)

    def _take_over(self, taken: Mapping[int, Standby]) -> None:
        """Move ranks to the slots of the standbys that take over."""
        if not taken:
            return
        slots = {rank: standby.slot for rank, standby in taken.items()}
        places = move_places(self._roster.snapshot().places, slots)
        self._launcher.move(places)
        self._roster.move(places)

    def note_slots(self) -> None:
        """Note the slots of logical nodes that the cluster has been extended by."""
        cluster = self._launcher.spec.cluster
        if isinstance(cluster, RayVirtualCluster):
            known = {slot.node_idx for slot in self._slots}
            self._slots = [*self._slots, *(slot for slot in cluster.slots() if slot.node_idx not in known)]

    def find_lost(self) -> dict[int, WorkerFailure]:
        """Return the workers that are dead now, by rank, including those that no call has met."""
        now = self._roster.snapshot()
        self._verdicts.note_dead([now.processes[rank] for rank in sorted(find_dead(now))], NO_CAUSE, within_s=CAUSE_S)
        # Ray notices a death when the connections break, and a fork of the worker keeps them open.
        living = [member.process for member in self._roster.snapshot().members if member.failure is None]
        ended = [worker for worker, is_gone in zip(living, find_ended(living), strict=True) if is_gone]
        self._verdicts.note_dead(ended, NOT_NOTICED, within_s=NOTICED_S)
        return dict(self._roster.snapshot().lost)

    def _lacks_cluster(self, ranks: Iterable[int]) -> bool:
        """Return whether a rank's cluster has been shut down, so that Ray has removed its placement group.

        Placement groups of lost nodes do not count: `replace_lost_nodes` removes them, and the ranks get other slots.
        """
        now = self._roster.snapshot()
        slots = [now[rank].slot for rank in ranks]
        try:
            alive = alive_nodes()
            groups = {slot.placement_group.id: slot.placement_group for slot in slots if slot.node_id in alive}
            return any(read_placement_group(one).get("state", "REMOVED") == "REMOVED" for one in groups.values())
        except HeadTimeoutError:
            return False

    def _explain_limit(self, ranks: Iterable[int]) -> str:
        """Return why these ranks cannot be restarted any more; an empty text if they can."""
        limit, now = self.policy.max_restarts, self._roster.snapshot()
        if self.policy.restarts_all:
            at_limit = [] if self._group_restarts < limit else ["the group"]
        else:
            at_limit = [f"rank {rank}" for rank in ranks if now[rank].restarts >= limit]
        if not at_limit:
            return ""
        return (
            f"{', '.join(at_limit)} has been restarted max_restarts={limit} times, which is the limit. Look at the "
            "logs of these workers, then create a new group, with a larger max_restarts if such losses are expected."
        )

    def _master_moved(self) -> bool:
        lease = self._resources.lease
        return lease is not None and lease.node_id != self._roster.snapshot()[0].slot.node_id

    def _end_old(self, ranks: Sequence[int], lost: tuple[WorkerFailure, ...]) -> None:
        """End the processes of the old workers.

        Raises:
            WorkerFailureError: a process cannot be ended, so its slot cannot be used again.
        """
        if left := self._resources.end(ranks):
            raise WorkerFailureError(
                lost,
                f"Nothing was restarted, because processes of the old workers are still there: {'; '.join(left)}. "
                "They do not react to SIGKILL, or their node does not answer; look at them there. When they are gone, "
                "call `restart_failed_workers()` again, or create a new group on other nodes.",
            )

    def _find_new_slots(
        self, ranks: Sequence[int], lost: tuple[WorkerFailure, ...], deadline: Deadline = NEVER
    ) -> None:
        """Move ranks that are about to start to other slots of the cluster if no process can start in theirs.

        Raises:
            WorkerFailureError: there are no such slots.
        """
        places, slots = self._roster.snapshot().places, self._slots
        usable = {slot.key for slot in usable_slots(places[rank].slot for rank in ranks)}
        stuck = [rank for rank in ranks if places[rank].slot.key not in usable]
        if not stuck:
            return
        alive = alive_nodes()
        drained = [rank for rank in stuck if places[rank].slot.node_id in alive]
        if len(drained) < len(stuck):
            slots, places = self._replace_lost_slots(places, lost, deadline)
        if drained:
            tied = any(len(places[rank].tied_bundles[1]) > 1 for rank in drained)
            free = [] if tied else self._resources.claim_free(self._launcher.spec.slots(), len(drained))
            if len(free) < len(drained):
                raise WorkerFailureError(
                    lost,
                    f"Ray drains the nodes of rank(s) {', '.join(map(str, drained))}, so that nothing starts there. "
                    + ("The workers of tied groups do not move to" if tied else f"There are {len(free)}")
                    + " other slots. Reserve more with cluster.extend(), or create a new group on other nodes.",
                )
            places = move_places(places, dict(zip(drained, free, strict=True)))
        self._launcher.prepare(places, deadline=deadline)
        # After the plan, so that the next attempt moves the ranks again if the plan fails.
        self._slots = slots
        self._roster.move(places)
        try:
            self._resources.claim_slots([place.slot for place in places])
        except PlacementError as error:  # another group was faster, or another node is lost
            raise WorkerFailureError(lost, f"Their new slots cannot be used: {error}") from error

    def _replace_lost_slots(
        self, places: Sequence[Place], lost: tuple[WorkerFailure, ...], deadline: Deadline
    ) -> tuple[Sequence[Slot], tuple[Place, ...]]:
        """Let the cluster replace lost nodes; return its slots, and the places of all ranks.

        Raises:
            WorkerFailureError: it has no room, or the slots are not from a cluster.
        """
        cluster = self._launcher.spec.cluster
        if not isinstance(cluster, RayVirtualCluster):
            alive = alive_nodes()
            lost_nodes = sorted({place.slot.node_id[:8] for place in places if place.slot.node_id not in alive})
            raise WorkerFailureError(
                lost,
                f"Their slots were on node(s) {', '.join(lost_nodes)}, which are lost. This group was made from slots, "
                "so there is no cluster that could reserve others. Get new slots, and create a new group.",
            )
        try:
            self.note_slots()  # ranks may have moved to logical nodes that were added later
            cluster.replace_lost_nodes(timeout_s=deadline.left(at_most=self._launcher.spec.start_timeout_s) or 0.0)
        except PlacementError as error:
            raise WorkerFailureError(
                lost, f"Their nodes are lost, and other nodes have no room for them: {error}"
            ) from error
        # Another group may have replaced them before, and logical nodes may have been added or released. The slots
        # of one logical node keep their order.
        mine = {slot.node_idx for slot in self._slots}
        now = sorted((slot for slot in cluster.slots() if slot.node_idx in mine), key=lambda slot: slot.node_idx)
        there = {slot.node_idx for slot in now}
        before = sorted((slot for slot in self._slots if slot.node_idx in there), key=lambda slot: slot.node_idx)
        instead = dict(zip((slot.key for slot in before), now, strict=True))
        moved = move_places(places, {place.rank: instead.get(place.slot.key, place.slot) for place in places})
        if gone := [place.rank for place in moved if place.slot.node_id not in alive_nodes()]:
            raise WorkerFailureError(
                lost,
                f"The slots of rank(s) {', '.join(map(str, gone))} are lost, and are not from the cluster of this "
                "group, which could reserve others. Resize the group without these ranks.",
            )
        return now, moved

    def _note_failed(self, ranks: Sequence[int], error: Exception) -> Exception:
        """Note that a restart has failed, and return the error to raise; its ranks can be restarted later."""
        cause, failed, text = str(error), -1, f"They could not be started again: {error}"
        if isinstance(error, WorkerStartError):
            cause, failed, text = error.reason, error.rank, str(error)
        facts = self._roster.snapshot().processes
        failures = tuple(
            facts[rank].failure("start-failed" if failed in (rank, -1) else "killed", f"in a restart: {cause}")
            for rank in ranks
        )
        is_report = isinstance(error, WorkerFailureError)
        self._roster.record_failed_restart(failures, override=not is_report)
        return error if is_report else WorkerFailureError(failures, text)

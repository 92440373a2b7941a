# SPDX-License-Identifier: Apache-2.0
"""Starting lost workers again: the same ranks, in the same slots, or in others when their nodes are gone."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.util.placement_group import placement_group_table

from fairlead_placement import PlacementError, RayVirtualCluster, Slot
from fairlead_placement.spi import alive_nodes, never_connect

from .._members import Roster
from .._observe.failures import Verdicts
from .._observe.query import find_ended
from .._ray_private import actor_id_of, dead_actors
from .._start.layout import move_places
from ..exceptions import MOST_SHOWN, WorkerFailure, WorkerFailureError, WorkerStartError
from .launcher import Launcher
from .resources import Resources

__all__ = ["RestartPolicy", "Restarter", "check_restart_policy"]

logger = logging.getLogger(__name__)

# Ray answers at once with the cause for a worker that it knows to be dead.
CAUSE_S = 10.0
CLUSTER_GONE = (
    "The cluster of this group has been shut down, and its workers with it: reserve the cluster again, and make a new "
    "group on it."
)
# Ray notices within a moment that a process has ended.
NOTICED_S = 2.0
NOT_NOTICED = "its process has ended, and Ray has not noticed: a process that it forked may hold its connections"
NO_CAUSE = f"Ray says that it is dead, and has not said within {CAUSE_S:g} s what it died of"


@dataclass(frozen=True)
class RestartPolicy:
    """When workers are started again.

    Attributes:
        on_failure: whether calls that need a lost worker start it again.
        max_restarts: how often: each rank, or with scope "group" the group.
        scope: "worker", or "group" for all workers together.
    """

    on_failure: bool
    max_restarts: int
    scope: str

    @property
    def restarts_all(self) -> bool:
        """Whether all workers are restarted together."""
        return self.scope == "group"

    def blocking(self, lost: Iterable[WorkerFailure], called: Collection[int]) -> tuple[WorkerFailure, ...]:
        """Return the lost workers that a call has to wait for: those it calls, or any if all restart together."""
        together = self.on_failure and self.restarts_all
        return tuple(failure for failure in lost if together or failure.rank in called)


def check_restart_policy(on_failure: bool, max_restarts: int, scope: str) -> RestartPolicy:
    """Return the policy that a user asked for.

    Raises:
        ValueError: an unknown scope, or a number of restarts that is negative or not whole.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts must be a whole number of at least 0, got {max_restarts!r}")
    if scope not in ("worker", "group"):
        raise ValueError(f"restart_scope is 'worker' or 'group', got {scope!r}")
    return RestartPolicy(on_failure, max_restarts, scope)


class Restarter:
    """Starts lost workers of a group again.

    Args:
        roster: of the group.
        resources: of the group.
        launcher: what starts the workers.
        verdicts: what decides which workers are dead.
        policy: when and how often.
        cluster: where the slots are from.
        slots: the cluster's slots as they were when the group was made.

    Attributes:
        policy: as given.
        turn: held by the thread that sends a call or restarts workers. Reentrant: a restart calls `after`, which sends
            a call.
        began: when the restart that is running began; None without.
    """

    def __init__(
        self,
        roster: Roster,
        resources: Resources,
        launcher: Launcher,
        verdicts: Verdicts,
        policy: RestartPolicy,
        *,
        cluster: RayVirtualCluster | Sequence[Slot],
        slots: Sequence[Slot],
    ) -> None:
        self.policy = policy
        self.turn: threading.RLock = threading.RLock()
        self.began: float | None = None
        self._roster = roster
        self._resources = resources
        self._launcher = launcher
        self._verdicts = verdicts
        self._cluster = cluster
        self._slots = slots
        self._group_restarts = 0
        self._lock = threading.Lock()
        # On a thread of its own, for calls with a deadline.
        self._background: Future[list[int]] | None = None

    def restart(self, after: Callable[[list[int]], object]) -> list[int]:
        """Start the workers that are dead again; see `RayWorkerGroup.restart_failed_workers`.

        Args:
            after: called with the ranks that were started, before the restart is over.

        Returns:
            The ranks that were started.
        """
        with self.turn:
            self.began = time.monotonic()
            try:
                return self._restart(after)
            finally:
                self.began = None

    def restart_in_background(self, after: Callable[[list[int]], object]) -> Future[list[int]]:
        """Return the restart that runs on a thread of its own; start it if there is none."""
        with self._lock:
            if self._background is None:
                self._background = Future()
                work = partial(self._run, self._background, after)
                threading.Thread(target=work, name="fairlead-restart", daemon=True).start()
            return self._background

    def describe_wait(self) -> str:
        """Return why a call could not be sent in time, and what its caller can do."""
        since, ranks = self.began, self._roster.snapshot().restarting
        if since is None:
            return "Other calls were being sent, or a restart was about to begin. Make the call again."
        who = f"rank(s) {', '.join(map(str, ranks))}" if ranks else "workers"
        return (
            f"A restart of {who} has been under way for {time.monotonic() - since:.1f} s and goes on; it may take "
            f"start_timeout_s={self._launcher.timeout_s:g} s. Make the call again, with a longer timeout."
        )

    def remedy(self, lost: Sequence[WorkerFailure]) -> str:
        """Return what a user can do about lost workers; an empty text for the usual."""
        if self._roster.ending:
            return "The group has been shut down; make a new group."
        ranks = [failure.rank for failure in lost]
        if self._without_cluster([failure.rank for failure in lost if failure.kind == "killed"]):
            return CLUSTER_GONE
        if spent := self._spent(ranks):
            return spent
        if not self.policy.on_failure:
            return ""
        if self.policy.restarts_all:
            return "The next call restarts the whole group first, whichever ranks it calls; repeat this one."
        shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (", ..." if len(ranks) > MOST_SHOWN else "")
        return (
            f"The next call that reaches rank(s) {shown} starts them again; repeat this one. "
            "`restart_failed_workers()` starts them at once."
        )

    def _run(self, future: Future[list[int]], after: Callable[[list[int]], object]) -> None:
        never_connect()
        try:
            ranks = self.restart(after)
        except BaseException as error:  # noqa: BLE001  the calls that wait for it raise it
            outcome: Callable[[], None] = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, ranks)
        with self._lock:
            self._background = None
        outcome()

    def _restart(self, after: Callable[[list[int]], object]) -> list[int]:
        roster, resources = self._roster, self._resources
        now = roster.check_alive()
        lost = self._find_lost()
        if not lost:
            return []
        everybody = list(range(len(now.members)))
        ranks = everybody if self.policy.restarts_all else list(lost)
        # Ray would create actors on a removed placement group without an error, and never start them.
        if reason := CLUSTER_GONE if self._without_cluster(everybody) else self._spent(lost):
            raise WorkerFailureError(tuple(lost.values()), reason)
        roster.mark_restarting(ranks)
        ended = False
        try:
            self._end_old(ranks, tuple(lost.values()))
            ended = True
            self._find_new_slots(tuple(lost.values()))
            # A restart that found no room is not counted: it has restarted nothing.
            self._group_restarts += self.policy.restarts_all
            roster.record_relaunch(ranks, counted=ranks)
            # A store that has served one set of processes does not serve another.
            if self.policy.restarts_all or self._master_moved():
                resources.release_port()
            self._launcher.start(ranks)
            after(ranks)
        except Exception as error:
            if roster.ending:
                raise
            if ended:  # end the workers that this restart has started
                resources.end(ranks)
            failure = self._note_failed(ranks, error)
            if failure is error:
                raise
            raise failure from error
        finally:
            if roster.ending:  # the shutdown on another thread could not see what this restart had started
                resources.give_back()
            roster.mark_restarting(ranks, running=False)
        logger.warning("restarted rank(s) %s of %r", ", ".join(map(str, ranks)), roster.name_prefix)
        return ranks

    def _find_lost(self) -> dict[int, WorkerFailure]:
        """Return the workers that are dead now, by rank, also those that no call has met."""
        roster, known = self._roster, dead_actors()
        now = roster.snapshot()
        dead = [member.facts for member in now.members if actor_id_of(member.handle) in known]
        self._verdicts.note_dead(dead, NO_CAUSE, within_s=CAUSE_S)
        # Ray notices a death by connections that break, and a fork of the worker holds them.
        living = [member.facts for member in roster.snapshot().members if member.failure is None]
        ended = [who for who, is_gone in zip(living, find_ended(living), strict=True) if is_gone]
        self._verdicts.note_dead(ended, NOT_NOTICED, within_s=NOTICED_S)
        return dict(roster.snapshot().lost)

    def _without_cluster(self, ranks: Iterable[int]) -> bool:
        """Return whether Ray has removed the placement group of one of these ranks: its cluster has been shut down.

        Those of lost nodes do not count: `replace_lost_nodes` removes them, and the ranks get other slots.
        """
        alive, now = alive_nodes(), self._roster.snapshot()
        slots = [now[rank].slot for rank in ranks]
        there = {slot.placement_group.id: slot.placement_group for slot in slots if slot.node_id in alive}
        return any(placement_group_table(one).get("state", "REMOVED") == "REMOVED" for one in there.values())

    def _spent(self, ranks: Iterable[int]) -> str:
        """Return why these ranks cannot be restarted any more; an empty text if they can."""
        limit, now = self.policy.max_restarts, self._roster.snapshot()
        if self.policy.restarts_all:
            spent = [] if self._group_restarts < limit else ["the group"]
        else:
            spent = [f"rank {rank}" for rank in ranks if now[rank].restarts >= limit]
        if not spent:
            return ""
        return (
            f"{', '.join(spent)} has been restarted max_restarts={limit} times, which is the limit. Look at the logs "
            "of these workers, then make a new group, with a larger max_restarts if such losses are expected."
        )

    def _master_moved(self) -> bool:
        lease = self._resources.lease
        return lease is not None and lease.node_id != self._roster.snapshot()[0].slot.node_id

    def _end_old(self, ranks: Sequence[int], lost: tuple[WorkerFailure, ...]) -> None:
        """End what is left of the old workers.

        Raises:
            WorkerFailureError: some of it cannot be ended, so that its slots cannot be used again.
        """
        if there := self._resources.end(ranks):
            raise WorkerFailureError(
                lost,
                f"Nothing was restarted, because processes of the old workers are still there: {'; '.join(there)}. "
                "They do not react to SIGKILL, or their node does not react: look at them there. When they are gone, "
                "call `restart_failed_workers()` again; or make a new group on other nodes.",
            )

    def _find_new_slots(self, lost: tuple[WorkerFailure, ...]) -> None:
        """Move the ranks whose nodes are gone to the slots that the cluster has in their place.

        Raises:
            WorkerFailureError: there are none.
        """
        alive, places = alive_nodes(), self._roster.snapshot().places
        if all(place.slot.node_id in alive for place in places):
            return
        cluster = self._cluster
        if not isinstance(cluster, RayVirtualCluster):
            lost_nodes = sorted({place.slot.node_id[:8] for place in places if place.slot.node_id not in alive})
            raise WorkerFailureError(
                lost,
                f"Their slots were on node(s) {', '.join(lost_nodes)}, which are lost. This group was made from slots, "
                "so there is no cluster that could reserve others: get new slots, and make a new group.",
            )
        try:
            cluster.replace_lost_nodes(timeout_s=self._launcher.timeout_s)
        except PlacementError as error:
            raise WorkerFailureError(
                lost, f"Their nodes are lost, and other nodes have no room for them: {error}"
            ) from error
        # Another group on the same cluster may have had them replaced before.
        slots = cluster.slots()
        instead = dict(zip(map(_key, self._slots), slots, strict=True))
        moved = move_places(places, {place.rank: instead[_key(place.slot)] for place in places})
        self._launcher.prepare(moved)
        # Only now, so that the next attempt moves them again if the plan fails.
        self._slots = slots
        self._roster.move(moved)
        self._resources.claim_slots(moved)

    def _note_failed(self, ranks: Sequence[int], error: Exception) -> Exception:
        """Note that a restart has failed; the ranks stay lost, and can be tried again.

        Returns:
            The error to raise.
        """
        is_start = isinstance(error, WorkerStartError)
        cause = error.reason if isinstance(error, WorkerStartError) else str(error)
        failed = error.rank if isinstance(error, WorkerStartError) else -1
        now = self._roster.snapshot()
        failures = tuple(
            now[rank].facts.failure("start-failed" if failed in (rank, -1) else "killed", f"in a restart: {cause}")
            for rank in ranks
        )
        if isinstance(error, WorkerFailureError):
            self._roster.record_failed_restart(failures, override=False)
            return error
        self._roster.record_failed_restart(failures, override=True)
        return WorkerFailureError(failures, str(error) if is_start else f"They could not be started again: {error}")


def _key(slot: Any) -> tuple[str, int]:
    return slot.placement_group.id.hex(), slot.bundle_index

# SPDX-License-Identifier: Apache-2.0
"""Starting lost workers again: the same ranks, in the same slots, or in others when their nodes are gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ray.util.placement_group import placement_group_table

from fairlead_placement import PlacementError, RayVirtualCluster
from fairlead_placement.spi import alive_nodes, claim_slots

from .._observe.causes import note_causes
from .._observe.query import gone
from .._ray_private import actor_id_of, dead_actors
from .._start.layout import moved
from ..exceptions import MOST_SHOWN, WorkerFailure, WorkerFailureError, WorkerStartError
from .shutdown import kill_and_wait

if TYPE_CHECKING:
    from .._group import RayWorkerGroup

__all__ = ["check_max_restarts", "check_scope", "find_lost", "remedy", "restart", "without_cluster"]

logger = logging.getLogger(__name__)

# Ray says at once what a worker that it knows to be dead died of.
CAUSE_S = 10.0
CLUSTER_GONE = (
    "The cluster of this group has been shut down, and its workers with it: reserve the cluster again, and make a new "
    "group on it."
)
# Ray notices within a moment that a process has ended.
NOTICED_S = 2.0
NOT_NOTICED = "its process has ended, and Ray has not noticed: a process that it forked may hold its connections"
NO_CAUSE = f"Ray says that it is dead, and has not said within {CAUSE_S:g} s what it died of"


def check_scope(scope: str) -> str:
    """Refuse what is no scope.

    Raises:
        ValueError: it is neither "worker" nor "group".
    """
    if scope not in ("worker", "group"):
        raise ValueError(f"restart_scope is 'worker' or 'group', got {scope!r}")
    return scope


def check_max_restarts(count: int) -> int:
    """Refuse what is no number of restarts.

    Raises:
        ValueError: it is negative, or no whole number.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"max_restarts must be a whole number of at least 0, got {count!r}")
    return count


def find_lost(group: RayWorkerGroup) -> dict[int, WorkerFailure]:
    """The workers that are dead now, by rank, also those that no call has met."""
    known = dead_actors()
    dead = [group._workers_now[rank] for rank, worker in enumerate(group.workers) if actor_id_of(worker) in known]
    note_causes(group, dead, within_s=CAUSE_S)
    # Dead all the same: who asks for a restart is not to be told that there is nothing to do.
    if unexplained := [who.failure("killed", NO_CAUSE) for who in dead if who.rank not in group._lost]:
        group._note_lost(unexplained)
    # Ray notices a death by connections that break, and a fork of the worker holds them.
    living = [who for who in group._workers_now if who.rank not in group._lost]
    ended = [who for who, is_gone in zip(living, gone(living), strict=True) if is_gone]
    note_causes(group, ended, within_s=NOTICED_S)
    if unnoticed := [who.failure("killed", NOT_NOTICED) for who in ended if who.rank not in group._lost]:
        group._note_lost(unnoticed)
    return dict(sorted(group._lost.items()))


def restart(group: RayWorkerGroup) -> list[int]:
    """Start what is lost again; the ranks that were started. See `RayWorkerGroup.restart_failed_workers`."""
    with group._submitting:
        group._living()
        lost = find_lost(group)
        if not lost:
            return []
        ranks = list(range(group.world_size)) if group._restart_scope == "group" else list(lost)
        # Ray would create actors on a removed placement group without an error, and never start them.
        if reason := CLUSTER_GONE if without_cluster(group, range(group.world_size)) else _spent(group, lost):
            raise WorkerFailureError(tuple(lost.values()), reason)
        group._restarting.update(ranks)
        group._show_states()
        ended = False
        try:
            _check_ended(group, ranks, lost)
            ended = True
            _find_new_slots(group, lost)
            _count(group, lost)  # not what found no room: it has restarted nothing
            for rank in ranks:
                group._incarnations[rank] += 1
            # A store that has served one set of processes does not serve another.
            if group._restart_scope == "group" or group._master_moved():
                group._held.release_port()
            group._bring_up(ranks)
            if group._on_restart is not None:
                limit = group._start_timeout_s
                nobody = [False] * len(ranks)
                call = group._dispatch(  # at once: the calls that wait do so for this restart
                    group._on_restart,
                    ranks,
                    [],
                    {},
                    answers=nobody,
                    returned=[],
                    timeout_s=limit,
                    discard=True,
                    may_wait=False,
                )
                call.result()
        except Exception as error:
            if group._ending:
                raise
            if ended:  # what was started meanwhile
                _end(group, ranks)
            told = _not_restarted(group, ranks, error)
            if told is error:
                raise
            raise told from error
        finally:
            if group._ending:  # shut down meanwhile by another thread, which could not see what was under way
                group._held.give_back()
            group._restarting.difference_update(ranks)
            group._show_states()
    logger.warning("restarted rank(s) %s of %r", ", ".join(map(str, ranks)), group.name_prefix)
    return ranks


def remedy(group: RayWorkerGroup, lost: Sequence[WorkerFailure]) -> str:
    """Return what its user can do about lost workers of a group; an empty text for the usual."""
    if group._ending:
        return "The group has been shut down; make a new group."
    ranks = [failure.rank for failure in lost]
    if without_cluster(group, [failure.rank for failure in lost if failure.kind == "killed"]):
        return CLUSTER_GONE
    if spent := _spent(group, ranks):
        return spent
    if not group._restart_on_failure:
        return ""
    if group._restart_scope == "group":
        return "The next call restarts the whole group first, whichever ranks it calls; repeat this one."
    shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (", ..." if len(ranks) > MOST_SHOWN else "")
    return (
        f"The next call that reaches rank(s) {shown} starts them again; repeat this one. `restart_failed_workers()` "
        "starts them at once."
    )


def without_cluster(group: RayWorkerGroup, ranks: Iterable[int]) -> bool:
    """Return whether Ray has removed the placement group of one of these ranks: its cluster has been shut down.

    Those of lost nodes do not count: `replace_lost_nodes` removes them, and the ranks get other slots.
    """
    alive = alive_nodes()
    slots = [group._places[rank].slot for rank in ranks]
    there = {slot.placement_group.id: slot.placement_group for slot in slots if slot.node_id in alive}
    return any(placement_group_table(one).get("state", "REMOVED") == "REMOVED" for one in there.values())


def _spent(group: RayWorkerGroup, ranks: Iterable[int]) -> str:
    """Return why these ranks cannot be restarted any more; an empty text if they can."""
    if group._restart_scope == "group":
        spent = [] if group._group_restarts < group._max_restarts else ["the group"]
    else:
        spent = [f"rank {rank}" for rank in ranks if group._restarts[rank] >= group._max_restarts]
    if not spent:
        return ""
    return (
        f"{', '.join(spent)} has been restarted max_restarts={group._max_restarts} times, which is the limit. Look at "
        "the logs of these workers, then make a new group, with a larger max_restarts if such losses are expected."
    )


def _count(group: RayWorkerGroup, lost: Mapping[int, WorkerFailure]) -> None:
    group._group_restarts += group._restart_scope == "group"
    for rank in lost if group._restart_scope == "worker" else range(group.world_size):
        group._restarts[rank] += 1


def _end(group: RayWorkerGroup, ranks: Sequence[int]) -> list[str]:
    """End what is left of these workers and of what they have started; return what is still there."""
    held = group._held
    workers = {rank: held.workers[rank] for rank in ranks if rank in held.workers}
    return kill_and_wait(workers, {rank: held.processes[rank] for rank in ranks if rank in held.processes})


def _check_ended(group: RayWorkerGroup, ranks: Sequence[int], lost: Mapping[int, WorkerFailure]) -> None:
    """End what is left of workers, and refuse to use their slots again as long as some of it is there."""
    if there := _end(group, ranks):
        raise WorkerFailureError(
            tuple(lost.values()),
            f"Nothing was restarted, because processes of the old workers are still there: {'; '.join(there)}. They do "
            "not react to SIGKILL, or their node does not react: look at them there. When they are gone, call "
            "`restart_failed_workers()` again; or make a new group on other nodes.",
        )


def _find_new_slots(group: RayWorkerGroup, lost: Mapping[int, WorkerFailure]) -> None:
    """Move the ranks whose nodes are gone to the slots that the cluster has in their place."""
    alive = alive_nodes()
    if all(place.slot.node_id in alive for place in group._places):
        return
    cluster = group.cluster
    if not isinstance(cluster, RayVirtualCluster):
        lost_nodes = sorted({place.slot.node_id[:8] for place in group._places if place.slot.node_id not in alive})
        raise WorkerFailureError(
            tuple(lost.values()),
            f"Their slots were on node(s) {', '.join(lost_nodes)}, which are lost. This group was made from slots, so "
            "there is no cluster that could reserve others: get new slots, and make a new group.",
        )
    try:
        cluster.replace_lost_nodes(timeout_s=group._start_timeout_s)
    except PlacementError as error:
        raise WorkerFailureError(
            tuple(lost.values()), f"Their nodes are lost, and other nodes have no room for them: {error}"
        ) from error
    # Another group on the same cluster may have had them replaced before.
    instead = dict(zip(map(_key, group._slots), cluster.slots(), strict=True))
    slots = {place.rank: instead[_key(place.slot)] for place in group._places}
    before = group._slots, group._places
    group._slots, group._places = cluster.slots(), moved(group._places, slots)
    try:
        group._plan()
    except BaseException:
        group._slots, group._places = before  # so that the next attempt moves them again
        raise
    if group._held.claim is not None:
        group._held.claim.release()
    holder = group.name_prefix
    group._held.claim = claim_slots([place.slot for place in group._places], holder, group=group)


def _key(slot: object) -> tuple[str, int]:
    return slot.placement_group.id.hex(), slot.bundle_index  # type: ignore[attr-defined]


def _not_restarted(group: RayWorkerGroup, ranks: Sequence[int], error: Exception) -> Exception:
    """Note that a restart has failed, and return the error to raise; the ranks stay lost, and can be tried again."""
    cause = error.reason if isinstance(error, WorkerStartError) else str(error)
    rank = error.rank if isinstance(error, WorkerStartError) else -1
    failures = tuple(
        group._workers_now[one].failure("start-failed" if rank in (one, -1) else "killed", f"in a restart: {cause}")
        for one in ranks
    )
    if isinstance(error, WorkerFailureError):
        group._lost.update({failure.rank: failure for failure in failures if failure.rank not in group._lost})
        return error
    group._lost.update({failure.rank: failure for failure in failures})
    remedy = f"They could not be started again: {error}" if not isinstance(error, WorkerStartError) else str(error)
    return WorkerFailureError(failures, remedy)

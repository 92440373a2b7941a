# SPDX-License-Identifier: Apache-2.0
"""The operations that change who is in a group, as plans of one kind. Pure, except for the questions that they ask."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding

from ..exceptions import MOST_SHOWN, WorkerFailure, WorkerFailureError
from .model import Resize, Snapshot

CLUSTER_GONE = (
    "The cluster of this group has been shut down, and its workers with it. Reserve the cluster again, and create a "
    "new group on it."
)


@dataclass(frozen=True)
class RestartPolicy:
    """When workers are restarted."""

    on_failure: bool  # whether calls that need a lost worker restart it
    max_restarts: int  # of each rank, or of the group with scope "group"
    scope: str  # "worker", or "group" for all workers together

    @property
    def restarts_all(self) -> bool:
        """Whether all workers are restarted together."""
        return self.scope == "group"

    def blocking(self, now: Snapshot, called: Collection[int]) -> tuple[WorkerFailure, ...]:
        """Return the lost workers that a call has to wait for: those it calls, or all if they restart together."""
        together = now.is_broken or (self.on_failure and self.restarts_all)
        return tuple(failure for failure in now.lost.values() if together or failure.rank in called)

    def explain_limit(self, now: Snapshot, ranks: Iterable[int]) -> str:
        """Return why these ranks cannot be restarted any more; an empty text if they can."""
        limit = self.max_restarts
        if self.restarts_all:
            at_limit = [] if now.restarts < limit else ["the group"]
        else:
            at_limit = [f"rank {rank}" for rank in ranks if now[rank].restarts >= limit]
        if not at_limit:
            return ""
        return (
            f"{', '.join(at_limit)} has been restarted max_restarts={limit} times, which is the limit. Look at the "
            "logs of these workers, then create a new group, with a larger max_restarts if such losses are expected."
        )

    def remedy(self, now: Snapshot, ranks: Sequence[int]) -> str:
        """Return what a user can do about these lost ranks; an empty text for the default advice."""
        if reason := self.explain_limit(now, ranks):
            return reason
        if not self.on_failure:
            return ""
        if self.restarts_all:
            return "The next call restarts the whole group first, whichever ranks it calls. Repeat this call."
        shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (", ..." if len(ranks) > MOST_SHOWN else "")
        return (
            f"The next call that reaches rank(s) {shown} starts them again. Repeat this call. "
            "`restart_failed_workers()` starts them at once."
        )


@dataclass(frozen=True)
class Plan:
    """One change; the machine does it in the same steps for all operations."""

    what: str  # for people: "The resize to dp=6"
    sharding: NamedSharding  # of the next epoch
    start: tuple[int, ...] = ()  # new or lost ranks, whose processes start while calls go on
    replace: tuple[int, ...] = ()  # ranks whose old process ends before the constructor of the new one runs
    move: tuple[int, ...] = ()  # the replaced ranks that start in other slots
    leave: tuple[int, ...] = ()  # ranks that leave the group
    slots: Sequence[Slot] | None = None  # of the new ranks, in order; None for free ones of the cluster
    counted: frozenset[int] = frozenset()  # the ranks for which this counts as a restart
    quiet: tuple[int, ...] = ()  # living ranks whose calls have to end first
    closes: bool = False  # whether calls wait from the beginning, and not only while the epoch begins
    follow: bool = False  # whether every survivor has to take part: then a late one makes the epoch broken
    new_port: bool = False  # whether the ranks need a new master port even if rank 0 stays on its node
    on_restart: tuple[int, ...] = ()  # the ranks that run `Restart.method`
    resize: Resize | None = None  # what changes the number of ranks
    again: bool = False  # whether this is the first part, after which the operation is planned again


class Facilities(Protocol):
    """The questions that a plan may ask; none of them changes anything."""

    policy: RestartPolicy

    def find_lost(self) -> Mapping[int, WorkerFailure]:
        """Return the workers that are dead now, by rank, including those that no call has met."""

    def lacks_cluster(self, ranks: Iterable[int]) -> bool:
        """Return whether the cluster of a rank has been shut down, so that nothing starts in its slot."""


class Operation(Protocol):
    """One way to change who is in a group."""

    @property
    def name(self) -> str:
        """The description for errors: "The restart"."""

    def plan(self, now: Snapshot, ask: Facilities) -> Plan | None:
        """Return what to do; None if there is nothing to do."""


@dataclass(frozen=True)
class Start:
    """The first start of all workers."""

    name: str = "The start"

    def plan(self, now: Snapshot, ask: Facilities) -> Plan:
        """Return the start of all ranks."""
        return Plan(self.name, now.sharding, start=tuple(range(len(now.members))))


@dataclass(frozen=True)
class RestartLost:
    """The restart of lost workers: the same ranks in their slots, or in other slots if a node is lost."""

    name: str = "The restart"

    def plan(self, now: Snapshot, ask: Facilities) -> Plan | None:
        """Return the restart of the ranks that are lost now, or with scope "group" of all."""
        if not (lost := ask.find_lost()):
            return None
        return plan_restart(self.name, now, lost, ask)


def plan_restart(what: str, now: Snapshot, lost: Mapping[int, WorkerFailure], ask: Facilities) -> Plan:
    """Return the restart of lost ranks, or of all of them with scope "group"."""
    everybody, policy = tuple(range(len(now.members))), ask.policy
    # Ray would create actors on a removed placement group without an error, and never start them.
    if reason := CLUSTER_GONE if ask.lacks_cluster(everybody) else policy.explain_limit(now, lost):
        raise WorkerFailureError(tuple(lost.values()), reason)
    ranks = everybody if policy.restarts_all else tuple(lost)
    return Plan(
        what,
        now.sharding,
        replace=ranks,
        counted=frozenset(ranks),
        closes=True,
        follow=now.is_broken,
        # The store of one set of processes cannot be used by another set.
        new_port=policy.restarts_all or now.is_broken,
        on_restart=ranks,
    )

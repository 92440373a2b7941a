# SPDX-License-Identifier: Apache-2.0
"""The workers of a group: their identities, their places, and the one owner of their state."""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fairlead_placement import Slot
from fairlead_placement.spi import connection
from fairlead_sharding import NamedSharding

from ._ray_private import actor_id_of
from .exceptions import FailureKind, WorkerFailure, WorkerGroupError, format_coords


@dataclass(frozen=True)
class Place:
    """The place of one rank.

    Attributes:
        name: the name of the worker, as users see it.
        tied_group: the number of its tied group (workers that share one model copy).
        tied_rank: its number in the tied group.
        tied_bundles: `(node_idx, [bundle indices])` of its tied group.
        node_rank: the number of its physical node among the nodes of the group, in the order of the ranks.
        local_rank: its number among the group's workers on that node.
        local_world_size: the number of the group's workers on that node.
    """

    rank: int
    slot: Slot
    name: str
    tied_group: int
    tied_rank: int
    tied_bundles: tuple[int, list[int]]
    node_rank: int
    local_rank: int
    local_world_size: int

    def configure_ask(self, num_gpus_per_node: int | None) -> dict[str, Any]:
        """Return the arguments of the class's `configure_worker` for this worker."""
        return {
            "num_gpus": self.slot.worker_resources.get("GPU", 0),
            # Only the first worker of a tied group gets its bundles.
            "bundle_indices": self.tied_bundles if self.tied_rank == 0 else None,
            "num_gpus_per_node": self.local_world_size if num_gpus_per_node is None else num_gpus_per_node,
        }

    def facts(self, coords: Mapping[str, int]) -> "WorkerFacts":
        """Return the identity of a worker here that has not started yet."""
        return WorkerFacts(self.rank, coords, self.slot.node_id, self.slot.node_ip)

    def metadata(self) -> dict[str, Any]:
        """Return the worker's entry in `worker_metadata`."""
        return {
            "node_idx": self.slot.node_idx,
            "local_rank": self.tied_rank,
            "global_rank": self.rank,
            "name": self.name,
            "bundle_indices": self.tied_bundles if self.tied_rank == 0 else None,
            "dp_shard_idx": self.tied_group,
            "bundle_index": self.slot.bundle_index,
            "node_id": self.slot.node_id,
            "state": "alive",
        }


@dataclass(frozen=True)
class WorkerFacts:
    """The identity of one incarnation of a worker, for messages about it and for requests to its node.

    Attributes:
        rank: its number in the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        node_ip: the address of its node.
        pid: its process; 0 before it has started.
        started: the tick that the process started at; -1 before it has started.
    """

    rank: int
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)
    node_id: str = ""
    node_ip: str = ""
    pid: int = 0
    started: int = -1

    @property
    def process(self) -> tuple[int, int]:
        """The pid and the start tick: a pid alone may belong to another process by now."""
        return self.pid, self.started

    def failure(self, kind: FailureKind, cause: str) -> WorkerFailure:
        """Return the report of the loss of this worker."""
        return WorkerFailure(self.rank, kind, dict(self.coords), self.node_id, self.pid, cause)

    def __str__(self) -> str:
        return (
            f"rank {self.rank}{format_coords(self.coords)} on node {self.node_id[:8]} ({self.node_ip}), pid {self.pid}"
        )


@dataclass(frozen=True)
class Member:
    """One worker of a group at one moment.

    Attributes:
        place: its rank, name and slot.
        facts: the identity of the incarnation that was started last.
        handle: the actor of that incarnation; None before the first one has started.
        incarnation: how often the rank has been restarted, including failed attempts.
        restarts: the number of these attempts that count against `max_restarts`.
        restarting: whether a restart of the rank is running.
        failure: the report of its loss; None while it lives.
    """

    place: Place
    facts: WorkerFacts
    handle: Any = None
    incarnation: int = 0
    restarts: int = 0
    restarting: bool = False
    failure: WorkerFailure | None = None
    # Made by Ray at each look at the actor, which would cost each call.
    _methods: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def method(self, name: str) -> Any:
        """Return a method of the actor, with its `remote`."""
        found = self._methods.get(name)
        if found is None:
            found = self._methods[name] = getattr(self.handle, name)
        return found

    @property
    def rank(self) -> int:
        """The number of the worker in the group."""
        return self.place.rank

    @property
    def coords(self) -> Mapping[str, int]:
        """The coordinates of the worker, by axis."""
        return self.facts.coords

    @property
    def slot(self) -> Slot:
        """The slot of the worker, or the slot that it moves to with the next restart."""
        return self.place.slot

    @property
    def state(self) -> str:
        """The state as the group knows it: "new", "alive", "restarting" or "dead"."""
        if self.restarting:
            return "restarting"
        if self.failure is not None:
            return "dead"
        return "new" if self.handle is None else "alive"


@dataclass(frozen=True)
class Change:
    """Something that happened to the membership, for those who watch it.

    Attributes:
        kind: "resized", "replaced" or "standby-ready".
        rank: the rank that it happened to; -1 if it is not about one rank.
        message: what happened, in a line for people.
    """

    kind: str
    rank: int
    message: str


@dataclass(frozen=True)
class Resize:
    """A change of the size of one axis.

    Attributes:
        epoch: the epoch that it began.
        axis: the axis.
        before: its size before.
        after: its size since then.
    """

    epoch: int
    axis: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"from {self.axis}={self.before} to {self.axis}={self.after} in epoch {self.epoch}"


@dataclass(frozen=True)
class Started:
    """A worker whose constructor has finished."""

    handle: Any
    place: Place
    facts: WorkerFacts


@dataclass(frozen=True)
class Snapshot:
    """All members at one moment: one consistent state that never changes.

    Attributes:
        version: the number of transitions before it.
        epoch: the number of changes of membership before it: restarts, resizes and replacements.
        sharding: the axes over the ranks.
        members: the members by rank.
        departed: the last member of each rank that the group does not have any more.
        resizes: the resizes so far.
        is_broken: whether a resize failed after it had begun to change the workers, and nothing has repaired that.
        ended: whether the group had been shut down.
    """

    version: int
    epoch: int
    sharding: NamedSharding
    members: tuple[Member, ...]
    departed: Mapping[int, Member] = field(default_factory=dict)
    resizes: tuple[Resize, ...] = ()
    is_broken: bool = False
    ended: bool = False

    def __getitem__(self, rank: int) -> Member:
        """Return the member of a rank, also of one that has left."""
        return self.members[rank] if rank < len(self.members) else self.departed[rank]

    def has(self, ranks: Iterable[int]) -> bool:
        """Return whether all of these ranks are in the group now."""
        return max(ranks, default=-1) < len(self.members)

    @cached_property
    def facts(self) -> tuple[WorkerFacts, ...]:
        """The identity of each member, by rank."""
        return tuple(member.facts for member in self.members)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of each member, by rank."""
        return tuple(member.place for member in self.members)

    @cached_property
    def lost(self) -> Mapping[int, WorkerFailure]:
        """The report of each lost member, by ascending rank."""
        return {member.rank: member.failure for member in self.members if member.failure is not None}

    @cached_property
    def restarting(self) -> tuple[int, ...]:
        """The ranks that are being restarted, in ascending order."""
        return tuple(member.rank for member in self.members if member.restarting)


Detour = Callable[[Iterable[int]], AbstractContextManager[None]]
_NO_DETOUR = nullcontext()


class Roster:
    """The members of one group, and the only owner of their state.

    Each method that changes the state is one transition under one lock. It makes a new snapshot with the next epoch.

    Args:
        own: whether this process has made the group; `find_worker` finds the workers of such groups only.

    Attributes:
        name_prefix: the name of the group.
        handles: the actor handles by rank, changed in place by restarts; empty after the end.
        worker_metadata: the description of each worker for users; empty after the end.
        standby_metadata: the description of each standby for the picture of the cluster.
        ending: whether a shutdown has begun.
        end_begun: the same, to wait for.
        detour: makes way for Ray's calls of workers that serve a lane; None without a lane.
    """

    def __init__(self, name: str, places: Sequence[Place], sharding: NamedSharding, *, own: bool = True) -> None:
        self.name_prefix = name
        self.handles: list[Any] = []
        self.worker_metadata: list[dict[str, Any]] = []
        self.standby_metadata: list[dict[str, Any]] = []
        self.ending: bool = False
        self.end_begun: threading.Event = threading.Event()
        # Lets workers serve Ray's calls that are made meanwhile, although a lane is open; None without a lane.
        self.detour: Detour | None = None
        self._made_on = connection()
        self._changes: list[Change] = []
        self._lock = threading.Lock()
        # It includes replaced incarnations, whose results may still be fetched.
        self._by_actor: dict[str, WorkerFacts] = {}
        self._now = Snapshot(0, 0, sharding, tuple(_new_member(place, sharding) for place in places))
        if own:
            _rosters.add(self)

    def __repr__(self) -> str:
        state = f"{len(self._now.members)} workers" if self.handles else "shut down"
        return f"RayWorkerGroup({self.name_prefix!r}, {dict(self._now.sharding.shape)}, {state})"

    def snapshot(self) -> Snapshot:
        """Return the members as they are now."""
        return self._now

    @property
    def world_size(self) -> int:
        """The number of members, for the picture of the cluster."""
        return len(self._now.members)

    @property
    def connected(self) -> bool:
        """Whether the Ray that the group was made on is still the one of this process."""
        return self._made_on == connection()

    @property
    def is_over(self) -> bool:
        """Whether the group or its Ray has ended or is about to: then background threads end, and report nothing."""
        return self.ending or not self.connected

    def check_connected(self) -> None:
        """Refuse to continue without the Ray that the group was made on.

        Raises:
            WorkerGroupError: that Ray has been shut down.
        """
        if not self.connected:
            raise WorkerGroupError(f"{self!r}: the Ray it was made on has been shut down; make a new group")

    def check_alive(self) -> Snapshot:
        """Return the members of a group that has not ended.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        now = self._now
        if not self.handles:
            raise self.ended_error()
        self.check_connected()
        return now

    def ended_error(self) -> WorkerGroupError:
        """Return the error for the use of a group that has been shut down."""
        return WorkerGroupError(f"{self!r}: it has been shut down; make a new group")

    def direct(self, ranks: Iterable[int]) -> AbstractContextManager[None]:
        """Return a context in which Ray's calls of these workers run in their turn, also while a lane is open."""
        detour = self.detour
        return _NO_DETOUR if detour is None else detour(ranks)

    def find(self, actor_id: str) -> WorkerFacts | None:
        """Return the worker of an actor, also after its replacement; None for an actor of another group."""
        return self._by_actor.get(actor_id)

    def is_lost(self, actor_id: str) -> bool:
        """Return whether this actor belonged to the group and is dead or replaced."""
        who = self._by_actor.get(actor_id)
        if who is None:
            return False
        member = self._now[who.rank]
        return member.failure is not None or member.facts is not who

    def next_incarnation(self, rank: int) -> int:
        """Return the incarnation of a rank that is about to start, which may not be in the group yet."""
        now = self._now
        if rank < len(now.members):
            return now[rank].incarnation
        return now.departed[rank].incarnation + 1 if rank in now.departed else 0

    def record_start(self, workers: Sequence[Started], *, epoch: int) -> None:
        """Record new incarnations of members, which begin an epoch.

        Raises:
            WorkerGroupError: the group is being shut down.
        """
        with self._lock:
            if self.ending:
                raise self.ended_error()
            changed = {one.place.rank: self._enter(self._now[one.place.rank], one) for one in workers}
            self._change(changed, epoch=epoch)
            self._show_members(changed)

    def record_resize(
        self, resize: Resize, sharding: NamedSharding, places: Sequence[Place], started: Sequence[Started]
    ) -> None:
        """Record the members of another size of the group, which begins an epoch.

        Args:
            started: the new members, and new incarnations of old ones.

        Raises:
            WorkerGroupError: the group is being shut down.
        """
        with self._lock:
            if self.ending:
                raise self.ended_error()
            now = self._now
            members = [replace(member, place=place) for member, place in zip(now.members, places, strict=False)]
            members += [
                _new_member(place, sharding, self.next_incarnation(place.rank)) for place in places[len(members) :]
            ]
            for one in started:
                members[one.place.rank] = self._enter(members[one.place.rank], one)
            cause = f"the group was resized {resize}, and this rank left it"
            left = {
                member.rank: replace(member, failure=member.failure or member.facts.failure("left", cause))
                for member in now.members[len(places) :]
            }
            self._advance(
                epoch=resize.epoch,
                sharding=sharding,
                members=tuple(members),
                departed={rank: one for rank, one in now.departed.items() if rank >= len(places)} | left,
                resizes=(*now.resizes, resize),
            )
            self._show_members({one.place.rank: members[one.place.rank] for one in started})

    def _enter(self, member: Member, started: Started) -> Member:
        self._by_actor[actor_id_of(started.handle)] = started.facts
        return replace(member, place=started.place, facts=started.facts, handle=started.handle, failure=None)

    def _show_members(self, changed: Mapping[int, Member]) -> None:
        """Bring the lists of handles and descriptions up to date. The caller holds the lock."""
        # Users may hold these lists, so they change in place.
        self.handles[:] = [member.handle for member in self._now.members]
        shown = {worker["global_rank"]: worker for worker in self.worker_metadata}
        shown |= {rank: member.place.metadata() for rank, member in changed.items()}
        self.worker_metadata[:] = [shown[rank] for rank in sorted(shown) if rank < len(self._now.members)]
        self._show_changed()

    def mark_broken(self, failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
        """Record that the change to the present epoch has failed at some members, which are lost by that.

        Returns:
            The report of each of these members, which is the first one if its loss was known before.
        """
        return self._record_failures(failures, lambda member, _: member.failure is None, is_broken=True)

    def mark_repaired(self) -> None:
        """Record that all members have the facts of the present epoch."""
        with self._lock:
            self._change({}, is_broken=False)

    def adopt(self, epoch: int, sharding: NamedSharding, members: Sequence[tuple[str, Member]]) -> None:
        """Replace all members by those of the process that made the group, each with the id of its actor."""
        with self._lock:
            now = self._now
            self._by_actor.update((actor_id, member.facts) for actor_id, member in members)
            resized = [
                Resize(epoch, axis, now.sharding.shape[axis], size)
                for axis, size in sharding.shape.items()
                if now.sharding.shape.get(axis, size) != size
            ]
            departed = dict(now.departed) | {member.rank: member for member in now.members}
            self._advance(
                epoch=epoch,
                sharding=sharding if resized else now.sharding,
                members=tuple(member for _, member in members),
                departed={rank: one for rank, one in departed.items() if rank >= len(members)},
                resizes=(*now.resizes, *resized),
            )
            self.handles[:] = [member.handle for member in self._now.members]

    def record_losses(self, failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
        """Record losses, except of incarnations that have been replaced.

        Returns:
            The failures to report. For a worker whose loss was known before, it is the first report.
        """

        def is_first(member: Member, failure: WorkerFailure) -> bool:
            is_current = (failure.node_id, failure.pid) == (member.facts.node_id, member.facts.pid)
            return is_current and member.failure is None

        return self._record_failures(failures, is_first)

    def record_failed_restart(self, failures: Sequence[WorkerFailure], *, override: bool) -> None:
        """Record why ranks could not be restarted; with `override`, replace the reports of their losses."""
        self._record_failures(failures, lambda member, _: override or member.failure is None)

    def _record_failures(
        self, failures: Sequence[WorkerFailure], applies: Callable[[Member, WorkerFailure], bool], **others: Any
    ) -> tuple[WorkerFailure, ...]:
        """Record the first failure that applies to each member, and further fields of the next snapshot.

        Returns:
            For each failure, the report that its member has now.
        """
        with self._lock:
            rows = [(self._now[failure.rank], failure) for failure in reversed(failures)]
            changed = {member.rank: replace(member, failure=one) for member, one in rows if applies(member, one)}
            self._change(changed, **others)
            return tuple(self._now[failure.rank].failure or failure for failure in failures)

    def mark_restarting(self, ranks: Iterable[int], running: bool = True) -> None:
        """Record that a restart of these ranks has begun, or with `running=False` that it has ended."""
        with self._lock:
            self._change({rank: replace(self._now[rank], restarting=running) for rank in ranks})

    def record_relaunch(self, ranks: Iterable[int], *, counted: Collection[int]) -> None:
        """Record the next incarnation of some ranks, and count it as a restart of those in `counted`."""
        with self._lock:
            changed = {}
            for rank in ranks:
                member = self._now[rank]
                restarts = member.restarts + (rank in counted)
                changed[rank] = replace(member, incarnation=member.incarnation + 1, restarts=restarts)
            self._change(changed)

    def move(self, places: Sequence[Place]) -> None:
        """Record new places of all ranks, which hold from their next start."""
        with self._lock:
            self._change({place.rank: replace(self._now[place.rank], place=place) for place in places})

    def report(self, change: Change) -> None:
        """Note a change for those who watch the group."""
        self._changes.append(change)

    def changes_since(self, count: int) -> list[Change]:
        """Return the changes after the first `count`."""
        return self._changes[count:]

    def show_states(self, states: Mapping[int, str], seen: Snapshot) -> None:
        """Show states that were observed from outside, except of workers that were replaced since `seen`."""
        with self._lock:
            for shown in self.worker_metadata:
                rank = shown["global_rank"]
                if rank in states and self._now[rank].facts is seen[rank].facts:
                    shown["state"] = states[rank]

    def begin_end(self) -> None:
        """Record that a shutdown has begun, so that no incarnation starts any more."""
        if not self.ending:  # a signal handler may come in between
            self.ending = True
            self.end_begun.set()

    def end(self) -> None:
        """Record that the group has no workers any more."""
        with self._lock:
            self.begin_end()
            self.handles = []
            self.worker_metadata = []
            self.standby_metadata = []
            self._advance(ended=True)

    def _change(self, changed: Mapping[int, Member], **others: Any) -> None:
        """Change some members, and show their states. The caller holds the lock."""
        self._advance(members=tuple(changed.get(member.rank, member) for member in self._now.members), **others)
        self._show_changed()

    def _advance(self, **changes: Any) -> None:
        """Make the next snapshot. The caller holds the lock."""
        self._now = replace(self._now, version=self._now.version + 1, **changes)

    def _show_changed(self) -> None:
        for shown in self.worker_metadata:
            state = self._now[shown["global_rank"]].state
            if state != "alive" or shown["state"] in ("restarting", "dead"):
                shown["state"] = state


def _new_member(place: Place, sharding: NamedSharding, incarnation: int = 0) -> Member:
    """Return a member that has not started."""
    return Member(place, place.facts(sharding.get_worker_coords(place.rank)), incarnation=incarnation)


_rosters: weakref.WeakSet[Roster] = weakref.WeakSet()


def find_worker(actor_id: str) -> tuple[Roster, WorkerFacts] | None:
    """Return the roster and the worker of an actor, in any group of this process; None if there is none."""
    for roster in list(_rosters):
        if (facts := roster.find(actor_id)) is not None:
            return roster, facts
    return None


def direct(member: Member) -> AbstractContextManager[None]:
    """Return a context in which Ray's calls of a worker run in their turn, also while a lane is open."""
    found = find_worker(actor_id_of(member.handle))
    return _NO_DETOUR if found is None else found[0].direct([member.rank])

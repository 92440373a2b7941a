# SPDX-License-Identifier: Apache-2.0
"""The values that say who is in a group: identities, places, members, and all of them at one moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding

from ..exceptions import FailureKind, WorkerFailure, format_coords
from .facts import WorkerFacts


@dataclass(frozen=True)
class Place:
    """The place of one rank.

    Attributes:
        rank: the rank of the worker.
        slot: the slot that it runs in.
        name: the name of the worker.
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


@dataclass(frozen=True)
class WorkerProcess:
    """The identity of one incarnation of a worker, for messages about it and for requests to its node.

    Attributes:
        rank: its number in the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        node_ip: the address of its node.
        pid: its process; 0 before it has started.
        started: the tick that the process started at; -1 before it has started.
        actor_id: Ray's id of its actor; empty before it has started.
        log: the path of its log file on its node; empty if that is unknown.
    """

    rank: int
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)
    node_id: str = ""
    node_ip: str = ""
    pid: int = 0
    started: int = -1
    actor_id: str = ""
    log: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[int, int]:
        """The pid and the start tick: a pid alone may belong to another process by now."""
        return self.pid, self.started

    def failure(self, kind: FailureKind, cause: str) -> WorkerFailure:
        """Return the report of the loss of this worker."""
        return WorkerFailure(self.rank, kind, dict(self.coords), self.node_id, self.pid, cause, log=self.log)

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid else ""
        return f"rank {self.rank}{format_coords(self.coords)} on node {self.node_id[:8]} ({self.node_ip}){pid}"


def configure_ask(place: Place, num_gpus_per_node: int | None) -> dict[str, Any]:
    """Return the arguments of the class's `configure_worker` for this worker."""
    return {
        "num_gpus": place.slot.worker_resources.get("GPU", 0),
        # Only the first worker of a tied group gets its bundles.
        "bundle_indices": place.tied_bundles if place.tied_rank == 0 else None,
        "num_gpus_per_node": place.local_world_size if num_gpus_per_node is None else num_gpus_per_node,
    }


def make_process(place: Place, coords: Mapping[str, int]) -> WorkerProcess:
    """Return the identity of a worker here that has not started yet."""
    return WorkerProcess(place.rank, coords, place.slot.node_id, place.slot.node_ip)


def describe_place(place: Place) -> dict[str, Any]:
    """Return the worker's entry in `worker_metadata`."""
    return {
        "node_idx": place.slot.node_idx,
        "local_rank": place.tied_rank,
        "global_rank": place.rank,
        "name": place.name,
        "bundle_indices": place.tied_bundles if place.tied_rank == 0 else None,
        "dp_shard_idx": place.tied_group,
        "bundle_index": place.slot.bundle_index,
        "node_id": place.slot.node_id,
        "state": "alive",
    }


@dataclass(frozen=True)
class Member:
    """One worker of a group at one moment.

    Attributes:
        place: its rank, name and slot.
        process: the identity of the incarnation that was started last.
        handle: the actor of that incarnation; None before the first one has started.
        incarnation: how often the rank has been restarted, including failed attempts.
        restarts: the number of these attempts that count against `max_restarts`.
        restarting: whether a restart of the rank is running.
        failure: the report of its loss; None while it lives.
    """

    place: Place
    process: WorkerProcess
    handle: Any = None
    incarnation: int = 0
    restarts: int = 0
    restarting: bool = False
    failure: WorkerFailure | None = None

    @property
    def rank(self) -> int:
        """The number of the worker in the group."""
        return self.place.rank

    @property
    def coords(self) -> Mapping[str, int]:
        """The coordinates of the worker, by axis."""
        return self.process.coords

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
    process: WorkerProcess


@dataclass(frozen=True)
class Snapshot:
    """All members at one moment: one consistent state that never changes.

    Attributes:
        version: the number of transitions before it.
        epoch: the number of changes of membership before it: restarts and resizes.
        sharding: the axes over the ranks.
        members: the members by rank.
        departed: the last member of each rank that the group does not have any more.
        resizes: the resizes so far.
        facts: what the present epoch says about each member, by rank; empty in processes that have not made the group.
        restarts: the number of restarts of the whole group that count against `max_restarts`.
        is_broken: whether a resize failed after it had begun to change the workers, and nothing has repaired that.
        ended: whether the group had been shut down.
    """

    version: int
    epoch: int
    sharding: NamedSharding
    members: tuple[Member, ...]
    departed: Mapping[int, Member] = field(default_factory=dict)
    resizes: tuple[Resize, ...] = ()
    facts: tuple[WorkerFacts, ...] = ()
    restarts: int = 0
    is_broken: bool = False
    ended: bool = False

    def __getitem__(self, rank: int) -> Member:
        """Return the member of a rank, also of one that has left."""
        return self.members[rank] if rank < len(self.members) else self.departed[rank]

    def has(self, ranks: Iterable[int]) -> bool:
        """Return whether all of these ranks are in the group now."""
        return max(ranks, default=-1) < len(self.members)

    @cached_property
    def processes(self) -> tuple[WorkerProcess, ...]:
        """The identity of each member, by rank."""
        return tuple(member.process for member in self.members)

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

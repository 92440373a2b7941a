# SPDX-License-Identifier: Apache-2.0
"""The values that say who is in a group: places, members, and its state at one moment; and when members restart."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fairlead_placement import Slot
from fairlead_placement.extension import format_coords
from fairlead_sharding import NamedSharding

from .exceptions import FailureKind, WorkerFailure

Phase = Literal["starting", "serving", "broken", "ended"]


@dataclass(frozen=True, kw_only=True)
class Restart:
    """How a group restarts lost workers.

    Attributes:
        on_failure: restart them before the next call that reaches one of them. The call that met the loss still raises,
            unless it was made with `retries`. Without it, `restart_failed_workers` restarts them.
        max_restarts: the number of restarts for each rank, or with scope "group" for the group.
        scope: "worker" restarts only the lost workers; "group" restarts all workers with a new master port, which
            collectives need. With `on_failure` and "group", every call restarts them while a worker is lost.
        method: a method of the class, without arguments, that restarted workers run first, such as one that reloads a
            checkpoint.
    """

    on_failure: bool = False
    max_restarts: int = 3
    scope: Literal["worker", "group"] = "worker"
    method: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"max_restarts must be a whole number of at least 0, got {self.max_restarts!r}")
        if self.scope not in ("worker", "group"):
            raise ValueError(f"scope must be 'worker' or 'group', got {self.scope!r}")


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
        coords: its coordinates, by axis.
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
    coords: Mapping[str, int] = field(default_factory=dict)


def configure_ask(place: Place, num_gpus_per_node: int | None) -> dict[str, Any]:
    """Return the arguments of the class's `configure_worker` for this worker."""
    return {
        "num_gpus": place.slot.worker_resources.get("GPU", 0),
        # Only the first worker of a tied group gets its bundles.
        "bundle_indices": place.tied_bundles if place.tied_rank == 0 else None,
        "num_gpus_per_node": place.local_world_size if num_gpus_per_node is None else num_gpus_per_node,
    }


def describe_place(place: Place, state: str) -> dict[str, Any]:
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
        "state": state,
    }


@dataclass(frozen=True, eq=False)
class Member:
    """One incarnation of one rank: the worker that it is, or was, or is about to be.

    Attributes:
        place: its rank, name, coordinates and slot.
        incarnation: how often the rank has been started before, including failed attempts.
        restarts: the number of these starts that count against `max_restarts`.
        handle: its actor; None before it has started.
        actor_id: Ray's id of the actor; empty before it has started.
        actor_name: the name of the actor, under which other processes find it.
        mark: finds its process and those that it starts, also before it has reported its pid.
        node_id: Ray's id of the node of its process.
        pid: its process; 0 before it has started.
        started: the tick that the process started at; -1 before it has started.
        log: the path of its log file on its node; empty if that is unknown.
        lost: the report of its loss; None while it lives.
    """

    place: Place
    incarnation: int = 0
    restarts: int = 0
    handle: Any = None
    actor_id: str = ""
    actor_name: str = ""
    mark: str = ""
    node_id: str = ""
    pid: int = 0
    started: int = -1
    log: str = ""
    lost: WorkerFailure | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether the other is the same incarnation of the same rank, at any moment."""
        return isinstance(other, Member) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.place.rank, self.incarnation, self.actor_id, self.pid

    @property
    def rank(self) -> int:
        """The number of the worker in the group."""
        return self.place.rank

    @property
    def coords(self) -> Mapping[str, int]:
        """The coordinates of the worker, by axis."""
        return self.place.coords

    @property
    def key(self) -> tuple[int, int]:
        """The pid and the start tick: a pid alone may belong to another process by now."""
        return self.pid, self.started

    def failure(self, kind: FailureKind, cause: str) -> WorkerFailure:
        """Return the report of the loss of this worker."""
        return WorkerFailure(self.rank, kind, dict(self.coords), self.node_id, self.pid, cause, log=self.log)

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid else ""
        node = f"{self.node_id[:8]} ({self.place.slot.node_ip})"
        return f"rank {self.rank}{format_coords(self.coords)} on node {node}{pid}"


@dataclass(frozen=True)
class GroupState:
    """All members of a group at one moment, which never changes.

    Attributes:
        version: the number of transitions before it.
        group_epoch: the number of changes of membership before it: restarts and resizes. Every call runs in one epoch:
            no worker sees it with the facts of another one.
        sharding: the axes over the ranks.
        members: the members by rank.
        phase: "starting", "serving", "broken" (a resize failed after it had begun to change the workers, and no call is
            sent until a restart or a resize has repaired that), or "ended".
        restarting: the ranks that are being restarted, in ascending order.
        variables: the environment variables that describe a rank, such as LOCAL_RANK and MASTER_PORT, by rank; empty in
            processes that have not made the group.
        master: the address and the port of the store of the workers' process group.
        restarts: the number of restarts of the whole group that count against `max_restarts`.
    """

    version: int
    group_epoch: int
    sharding: NamedSharding
    members: tuple[Member, ...]
    phase: Phase = "starting"
    restarting: tuple[int, ...] = ()
    variables: tuple[Mapping[str, str], ...] = ()
    master: tuple[str, int] = ("", 0)
    restarts: int = 0

    def has(self, ranks: Iterable[int]) -> bool:
        """Return whether all of these ranks are in the group now."""
        return max(ranks, default=-1) < len(self.members)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of each member, by rank."""
        return tuple(member.place for member in self.members)

    @cached_property
    def lost(self) -> Mapping[int, WorkerFailure]:
        """The report of each lost member, by ascending rank."""
        return {member.rank: member.lost for member in self.members if member.lost is not None}

    def facts(self, rank: int) -> dict[str, Any]:
        """Return the facts about a rank in this epoch, as the worker publishes them."""
        member = self.members[rank]
        return {
            "rank": rank,
            "epoch": self.group_epoch,
            "incarnation": member.incarnation,
            "world_size": len(self.members),
            "name": member.place.name,
            "coords": dict(member.coords),
            "env": dict(self.variables[rank]),
        }

    def state_of(self, rank: int) -> str:
        """Return the state of a rank as the group knows it: "restarting", "dead" or "alive"."""
        if rank in self.restarting:
            return "restarting"
        return "alive" if self.members[rank].lost is None else "dead"

    def to_wire(self) -> dict[str, Any]:
        """Return the state as plain data for other processes: names, places and processes, no values of users."""
        return {
            "version": self.version,
            "group_epoch": self.group_epoch,
            "sharding": self.sharding.to_dict(),
            "members": [
                {
                    **{name: getattr(member, name) for name in _ON_THE_WIRE},
                    "rank": member.rank,
                    "name": member.place.name,
                    "coords": dict(member.coords),
                    "address": member.place.slot.node_ip,
                    "tied_rank": member.place.tied_rank,
                }
                for member in self.members
            ],
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> "GroupState":
        """Return the state in a process that has not made the group: without actors, and of places only the nodes.

        Members that have no process yet count as restarting.
        """
        members = tuple(map(_read_member, data["members"]))
        return cls(
            data["version"],
            data["group_epoch"],
            NamedSharding.from_dict(data["sharding"]),
            members,
            phase="serving",
            restarting=tuple(member.rank for member in members if not member.pid),
        )


_ON_THE_WIRE = ("incarnation", "restarts", "actor_id", "actor_name", "mark", "node_id", "pid", "started")


def _read_member(row: Mapping[str, Any]) -> Member:
    unknown: dict[str, Any] = {"placement_group": None}
    unknown |= dict.fromkeys(("bundle_index", "node_idx", "node_rank", "local_rank"), -1)
    slot = Slot(node_id=row["node_id"], node_ip=row["address"], **unknown)
    place = Place(row["rank"], slot, row["name"], -1, row["tied_rank"], (-1, []), -1, -1, -1, row["coords"])
    return Member(place, **{name: row[name] for name in _ON_THE_WIRE})

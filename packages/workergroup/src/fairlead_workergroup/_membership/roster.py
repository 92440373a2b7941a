# SPDX-License-Identifier: Apache-2.0
"""The one owner of the members of a group: each change is one transition to another snapshot."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairlead_sharding import NamedSharding

from .. import _world
from .._ray_private import actor_id_of
from ..exceptions import WorkerFailure, WorkerGroupError
from .facts import WorkerFacts
from .judge import Judge, Verdict
from .model import Member, Place, Resize, Snapshot, Started, WorkerProcess, describe_place, make_process


class Roster:
    """The members of one group, and the only owner of their state.

    Each method that changes the state is one transition under one lock. It makes a new snapshot with the next epoch.
    """

    def __init__(self, name: str, places: Sequence[Place], sharding: NamedSharding) -> None:
        self.name_prefix = name
        # By rank, changed in place by restarts; empty after the end.
        self.handles: list[Any] = []
        # The descriptions of each worker for users.
        self.worker_metadata: list[dict[str, Any]] = []
        self.judge: Judge = Judge()
        self.ending: bool = False
        self.connection = _world.Connection(self)
        # It protects the members and the actors, which change together.
        self.lock: _world.Lock = _world.current.lock()
        # It includes replaced incarnations, whose results may still be fetched.
        self._by_actor: dict[str, WorkerProcess] = {}
        # The members as they are now. It is read without the lock.
        self.now: Snapshot = Snapshot(0, 0, sharding, tuple(_new_member(place, sharding) for place in places))

    def __repr__(self) -> str:
        state = f"{len(self.now.members)} workers" if self.handles else "shut down"
        return f"RayWorkerGroup({self.name_prefix!r}, {dict(self.now.sharding.shape)}, {state})"

    @property
    def world_size(self) -> int:
        """The number of members, for the picture of the cluster."""
        return len(self.now.members)

    @property
    def connected(self) -> bool:
        """Whether the Ray that the group was made on is still the one of this process."""
        return self.connection.is_open

    @property
    def is_over(self) -> bool:
        """Whether the group or its Ray has ended or is about to: then nothing more is started or published."""
        return self.ending or not self.connected

    def check_alive(self) -> Snapshot:
        """Return the members of a group that has not ended."""
        now = self.now
        if not self.handles:
            raise self.ended_error()
        self.connection.check()
        return now

    def ended_error(self) -> WorkerGroupError:
        """Return the error for the use of a group that has been shut down."""
        return WorkerGroupError(f"{self!r}: it has been shut down; make a new group")

    def find(self, actor_id: str) -> WorkerProcess | None:
        """Return the worker of an actor, also after its replacement; None for an actor of another group."""
        return self._by_actor.get(actor_id)

    def find_handle(self, worker: WorkerProcess) -> Any | None:
        """Return the handle of a process; None once it has been replaced, or the group has ended."""
        now = self.now
        # The handle of a rank is that of its present process.
        return None if now.ended or now[worker.rank].process != worker else now[worker.rank].handle

    def is_lost(self, actor_id: str) -> bool:
        """Return whether this actor belonged to the group and is dead or replaced."""
        who = self._by_actor.get(actor_id)
        if who is None:
            return False
        member = self.now[who.rank]
        return member.failure is not None or member.process is not who

    def next_incarnation(self, rank: int) -> int:
        """Return the incarnation of a rank that is about to start, which may not be in the group yet."""
        now = self.now
        if rank < len(now.members):
            return now[rank].incarnation
        return now.departed[rank].incarnation + 1 if rank in now.departed else 0

    def commit(
        self,
        *,
        epoch: int,
        sharding: NamedSharding,
        places: Sequence[Place],
        facts: Sequence[WorkerFacts],
        started: Sequence[Started],
        resize: Resize | None,
    ) -> Snapshot:
        """Begin an epoch, with new members and new incarnations of old ones; the only way in which an epoch begins."""
        with self.lock:
            if self.ending:
                raise self.ended_error()
            now = self.now
            members = [replace(member, place=place) for member, place in zip(now.members, places, strict=False)]
            members += [
                _new_member(place, sharding, self.next_incarnation(place.rank)) for place in places[len(members) :]
            ]
            for one in started:
                self._by_actor[actor_id_of(one.handle)] = one.process
                members[one.place.rank] = replace(
                    members[one.place.rank], place=one.place, process=one.process, handle=one.handle, failure=None
                )
            cause = f"the group was resized {resize}, and this rank left it"
            left = {
                member.rank: replace(member, failure=member.failure or member.process.failure("left", cause))
                for member in now.members[len(places) :]
            }
            self._advance(
                epoch=epoch,
                sharding=sharding,
                members=tuple(members),
                facts=tuple(facts),
                departed={rank: one for rank, one in now.departed.items() if rank >= len(places)} | left,
                resizes=now.resizes if resize is None else (*now.resizes, resize),
            )
            self._show_members({one.place.rank: members[one.place.rank] for one in started})
            return self.now

    def _show_members(self, changed: Mapping[int, Member]) -> None:
        """Bring the lists of handles and descriptions up to date. The caller holds the lock."""
        # Users may hold these lists, so they change in place.
        self.handles[:] = [member.handle for member in self.now.members]
        shown = {worker["global_rank"]: worker for worker in self.worker_metadata}
        shown |= {rank: describe_place(member.place) for rank, member in changed.items()}
        self.worker_metadata[:] = [shown[rank] for rank in sorted(shown) if rank < len(self.now.members)]
        self._show_changed()

    def mark_broken(self, failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
        """Record members at which the change to this epoch has failed, as losses; return their first reports."""
        return self._record_failures(failures, lambda member, _: member.failure is None, is_broken=True)

    def mark_repaired(self) -> None:
        """Record that all members have the facts of the present epoch."""
        with self.lock:
            self._change({}, is_broken=False)

    def adopt(self, epoch: int, sharding: NamedSharding, members: Sequence[tuple[str, Member]]) -> None:
        """Replace all members by those of the process that made the group, each with the id of its actor."""
        with self.lock:
            now = self.now
            self._by_actor.update((actor_id, member.process) for actor_id, member in members)
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
            self.handles[:] = [member.handle for member in self.now.members]

    def note(self, verdicts: Iterable[Verdict]) -> tuple[WorkerFailure, ...]:
        """Record the losses among verdicts, except of replaced incarnations; return the first report of each loss."""

        def is_first(member: Member, failure: WorkerFailure) -> bool:
            is_current = (failure.node_id, failure.pid) == (member.process.node_id, member.process.pid)
            return is_current and member.failure is None

        return self._record_failures([verdict.failure() for verdict in verdicts if verdict.is_lost], is_first)

    def record_failed_restart(self, failures: Sequence[WorkerFailure], *, override: bool) -> None:
        """Record why ranks could not be restarted; with `override`, replace the reports of their losses."""
        self._record_failures(failures, lambda member, _: override or member.failure is None)

    def _record_failures(
        self, failures: Sequence[WorkerFailure], applies: Callable[[Member, WorkerFailure], bool], **others: Any
    ) -> tuple[WorkerFailure, ...]:
        """Record the first failure that applies to each member; return the report that each has now."""
        with self.lock:
            rows = [(self.now[failure.rank], failure) for failure in reversed(failures)]
            changed = {member.rank: replace(member, failure=one) for member, one in rows if applies(member, one)}
            self._change(changed, **others)
            return tuple(self.now[failure.rank].failure or failure for failure in failures)

    def mark_restarting(self, ranks: Iterable[int], running: bool = True) -> None:
        """Record that a restart of these ranks has begun, or with `running=False` that it has ended."""
        with self.lock:
            self._change({rank: replace(self.now[rank], restarting=running) for rank in ranks})

    def record_relaunch(self, ranks: Iterable[int], *, counted: Collection[int], together: bool) -> None:
        """Record the next incarnation of members, as a restart of those in `counted`, or of the group if `together`."""
        with self.lock:
            changed = {}
            for rank in ranks:
                member = self.now[rank]
                restarts = member.restarts + (rank in counted)
                changed[rank] = replace(member, incarnation=member.incarnation + 1, restarts=restarts)
            self._change(changed, restarts=self.now.restarts + (together and bool(counted)))

    def show_states(self, states: Mapping[int, str], seen: Snapshot) -> None:
        """Show states that were observed from outside, except of workers that were replaced since `seen`."""
        with self.lock:
            for shown in self.worker_metadata:
                rank = shown["global_rank"]
                if rank in states and self.now[rank].process is seen[rank].process:
                    shown["state"] = states[rank]

    def begin_end(self) -> None:
        """Record that a shutdown has begun, so that no incarnation starts any more."""
        self.ending = True

    def end(self) -> None:
        """Record that the group has no workers any more."""
        with self.lock:
            self.begin_end()
            self.handles = []
            self.worker_metadata = []
            self._advance(ended=True)

    def _change(self, changed: Mapping[int, Member], **others: Any) -> None:
        """Change some members, and show their states. The caller holds the lock."""
        self._advance(members=tuple(changed.get(member.rank, member) for member in self.now.members), **others)
        self._show_changed()

    def _advance(self, **changes: Any) -> None:
        """Make the next snapshot. The caller holds the lock."""
        self.now = replace(self.now, version=self.now.version + 1, **changes)

    def _show_changed(self) -> None:
        for shown in self.worker_metadata:
            state = self.now[shown["global_rank"]].state
            if state != "alive" or shown["state"] in ("restarting", "dead"):
                shown["state"] = state


def _new_member(place: Place, sharding: NamedSharding, incarnation: int = 0) -> Member:
    """Return a member that has not started."""
    return Member(place, make_process(place, sharding.get_worker_coords(place.rank)), incarnation=incarnation)

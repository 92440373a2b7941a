# SPDX-License-Identifier: Apache-2.0
"""What holds in every run of a group, whatever it does. Each error begins with the name of the invariant."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fairlead_workergroup import GroupState
from fairlead_workergroup.extension import Member

from .actors import Actor
from .placement import PretendedPlacement
from .ray import PretendedRay
from .scheduler import SimulatedWorld
from .seam import Call, Core, was_repeated

# Reports of losses that are about the process, so that it must have ended.
OF_PROCESSES = frozenset({"killed", "node-lost", "preempted", "out-of-memory"})
# How often a rank may be restarted, the default of `Restart`.
MAX_RESTARTS = 3


class Invariants:
    """Watch one group during a run.

    Args:
        placement: what the group claims and leases, and nobody else.
    """

    def __init__(self, world: SimulatedWorld, ray: PretendedRay, core: Core, placement: PretendedPlacement) -> None:
        self._placement = placement
        self._ray = ray
        self._core = core
        self._seen: GroupState = core.now
        self._lost: set[Any] = set()
        self._incarnations: dict[int, int] = {}
        self._calls: list[Call[Any]] = []
        ray.on_construct = self._check_one_process
        world.invariants.append(self._check_change)

    def add(self, call: Call[Any]) -> Call[Any]:
        """Check a call at the end of the run too; return it."""
        self._calls.append(call)
        return call

    def check_at_rest(self) -> None:
        """Check what holds when no task of the group does anything."""
        now = self._core.now
        for member in () if now.phase in ("ended", "broken") else now.members:
            self._check_facts(member, now)
        for call in self._calls:
            self._check_epoch(call)
        self._check_order()
        if now.phase != "ended":
            self._check_holdings(now)

    def check_ended(self) -> None:
        """Check that a group that has been shut down has left nothing behind."""
        left = [repr(actor) for actor in self._ray.actors if actor.is_running or not actor.is_created]
        assert not left, f"leak: {', '.join(left)}"
        assert not {*self._placement.claims, *self._placement.leases}, "leak: claims or leases of ports"
        pending = [future for call in self._calls for future in call.futures if not future.is_done]
        assert not pending, f"open futures: {pending}"

    def _check_holdings(self, now: GroupState) -> None:
        """Check that the group holds what its members need, and nothing else."""
        placement, expected = self._placement, {place.slot.key for place in now.places}
        claimed = {key for claim in placement.claims for key in claim.keys}
        assert claimed == expected, f"claims: {sorted(claimed)} instead of {sorted(expected)}"
        assert len(placement.leases) <= 1, f"leases: {placement.leases}"
        mine = {member.key for member in now.members}
        others = [one for one in self._ray.actors if one.is_running and one.key not in mine and one.rank is not None]
        assert not others, f"leak: {others} belong to no rank"

    def _check_change(self) -> None:
        """Check the snapshot after each step."""
        before, now = self._seen, self._core.now
        if now is before:
            return
        self._seen = now
        assert now.group_epoch - before.group_epoch in (0, 1), f"epochs: {before.group_epoch} then {now.group_epoch}"
        for member in now.members:
            earlier = self._incarnations.get(member.rank, 0)
            assert member.incarnation >= earlier, f"incarnations: rank {member.rank} goes from {earlier} back"
            self._incarnations[member.rank] = member.incarnation
            assert member.restarts <= MAX_RESTARTS, f"max_restarts: rank {member.rank} has {member.restarts}"
            if member.lost is None:
                assert member.actor_id not in self._lost, f"lost for good: {member} lives again"
            elif member.actor_id not in self._lost:
                self._lost.add(member.actor_id)
                self._check_loss(member)

    def _check_loss(self, member: Member) -> None:
        actor = self._find(member)
        is_of_process = member.lost is not None and member.lost.kind in OF_PROCESSES
        assert not (is_of_process and actor is not None and actor.is_running and not actor.is_killed), (
            f"false loss: {member.lost} and its process runs"
        )

    def _check_one_process(self, actor: Actor) -> None:
        others = [one for one in self._ray.actors if one is not actor and one.rank == actor.rank and one.is_running]
        assert not others, f"two processes: {actor} is constructed while {others} run"

    def _check_facts(self, member: Member, now: GroupState) -> None:
        actor = self._find(member)
        if member.lost is not None or actor is None or not actor.is_running or actor.running:
            return
        facts = actor.worker.facts
        has = facts.get("rank"), facts.get("epoch"), facts.get("world_size")
        expected = member.rank, now.group_epoch, len(now.members)
        assert has == expected, f"stale facts: {actor} has {has} instead of {expected}"
        for name, value in now.variables[member.rank].items() if now.variables else ():
            own = actor.worker.environ.get(name)
            assert own == value, f"stale facts: {actor} has {name}={own} instead of {value}"

    def _check_epoch(self, call: Call[Any]) -> None:
        """Check that all workers of a call that has ended ran it with the facts of its epoch."""
        if call.sending is not None or was_repeated(call):
            return
        numbers = {future.number for future in call.futures if not future.has_failed}
        ran = {one.number: one.epoch for actor in self._ray.actors for one in actor.worker.ran if one.number in numbers}
        mixed = {number: epoch for number, epoch in ran.items() if epoch != call.group_epoch}
        assert not mixed, f"epoch of a call: {call} of epoch {call.group_epoch} ran in {mixed}"

    def _check_order(self) -> None:
        """Check that all workers began the calls in one order."""
        calls = [call for call in self._calls if not was_repeated(call)]
        at = {future.number: place for place, call in enumerate(calls) for future in call.futures}
        orders: dict[Any, list[int]] = defaultdict(list)
        for actor in self._ray.actors:
            orders[actor] = [at[one.number] for one in actor.worker.ran if one.number in at]
        for actor, order in orders.items():
            for other, again in orders.items():
                shared = set(order) & set(again)
                mine, its = ([one for one in began if one in shared] for began in (order, again))
                assert mine == its, f"order of calls: {actor} began {mine}, and {other} began {its}"

    def _find(self, member: Member) -> Actor | None:
        actors: Sequence[Actor] = self._ray.actors
        return next((one for one in actors if one.key == member.key), None)

# SPDX-License-Identifier: Apache-2.0
"""The processes of a group for a change: slots, starts and ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fairlead_placement import HeadTimeoutError, PlacementError, PortLease, RayVirtualCluster, Slot

from .. import _world
from .._membership.facts import WorkerFacts
from .._membership.model import Place, Snapshot, Started
from .._membership.operations import Plan, RestartPolicy
from .._observe.evidence import check_head
from .._observe.head import alive_nodes, read_placement_group
from .._observe.publications import ANSWER_S
from .._start.layout import choose_slots, move_places, resize_places
from .._world import NEVER, Deadline
from ..exceptions import WorkerFailure, WorkerFailureError
from .launcher import Launcher, LaunchPlan
from .resources import usable_slots

# Ray reports the cause of a death that it knows at once.
CAUSE_S = 10.0


@dataclass(frozen=True)
class Staging:
    """The resources of the next epoch; `slots` are those of the cluster as the group knows them."""

    epoch: int
    places: tuple[Place, ...]
    launch: LaunchPlan
    renews_port: bool  # whether another master port is leased when the old workers have ended
    slots: Sequence[Slot]


class Crew:
    """Acquire, start and end the processes of a group, for the owner of its membership."""

    def __init__(self, launcher: Launcher, policy: RestartPolicy, slots: Sequence[Slot]) -> None:
        self.policy = policy
        self._launcher = launcher
        self._resources = launcher.resources
        self._roster = launcher.resources.roster
        # Those of the cluster when the group was made, and of the logical nodes that it was extended by.
        self._slots = slots

    def find_lost(self) -> Mapping[int, WorkerFailure]:
        """Return the workers that are dead now, by rank, including those that no call has met."""
        living = [member.process for member in self._roster.now.members if member.failure is None]
        began = _world.current.now()
        verdicts = self._roster.judge.ask(living, look="all", within_s=CAUSE_S).values()
        check_head(verdicts, since=began)
        self._roster.note(verdicts)
        return dict(self._roster.now.lost)

    def lacks_cluster(self, ranks: Iterable[int]) -> bool:
        """Return whether a rank's cluster has been shut down, so that Ray has removed its placement group.

        Placement groups of lost nodes do not count: `replace_lost_nodes` removes them, and the ranks get other slots.
        """
        now = self._roster.now
        slots = [now[rank].slot for rank in ranks]
        try:
            alive = alive_nodes()
            groups = {slot.placement_group.id: slot.placement_group for slot in slots if slot.node_id in alive}
            return any(read_placement_group(one).get("state", "REMOVED") == "REMOVED" for one in groups.values())
        except HeadTimeoutError:
            return False

    def acquire(self, before: Snapshot, plan: Plan, undo: ExitStack, deadline: Deadline) -> Staging:
        """Get slots, processes, and the environment of new workers; see `ports.Crew`."""
        if not self._roster.handles:
            return Staging(0, before.places, self._launcher.planned, False, self._slots)
        undo.callback(self._resources.drop_next_port)
        if plan.resize is not None:
            self._note_slots()
        places = self._move(before.places, plan.move) if plan.move else before.places
        stays = [rank for rank in (*plan.start, *plan.replace) if rank < len(places) and rank not in plan.move]
        moved, slots = self._find_new_slots(places, stays, before, deadline)
        if plan.resize is not None:
            added = self._claim(before, plan.sharding.size - len(before.members), plan.slots)
            moved = resize_places(moved, plan.sharding.size, added, prefix=self._roster.name_prefix)
        launch = self._launcher.planned
        if moved is not before.places:
            launch = self._launcher.plan(moved, plan.sharding, deadline=deadline)
        self._claim_for(moved, before)
        lease, survives = self._resources.lease, len(plan.replace) < len(before.members)
        # With one port, the next processes use it when the old ones have ended.
        is_new = plan.new_port and not self._resources.has_one_port
        needs_port = is_new or lease is None or lease.node_id != moved[0].slot.node_id
        if needs_port and survives:  # those that keep running use the present one until then
            self._resources.lease_next_port(moved[0].slot, deadline)
        return Staging(before.epoch + 1, moved, launch, needs_port and not survives, slots)

    def start(
        self, staged: Staging, ranks: Sequence[int], undo: ExitStack, deadline: Deadline, check: Callable[[], None]
    ) -> list[Started]:
        """Start the processes of ranks, until their constructors have finished."""
        undo.callback(self._undo_start, ranks)
        if staged.renews_port:
            self._resources.release_port()
        return self._launcher.start(
            staged.launch,
            ranks,
            lease=lambda: self._lease(staged, deadline.sooner(Deadline.after(self._launcher.spec.start_timeout_s))),
            epoch=staged.epoch,
            deadline=deadline,
            check=check,
        )

    def facts(self, staged: Staging) -> tuple[WorkerFacts, ...]:
        """Return the facts of each rank in the next epoch."""
        return self._launcher.facts(staged.launch, self._lease(staged).port, epoch=staged.epoch)

    def check_head(self) -> None:
        """Check that Ray's head answers, without which nothing starts."""
        alive_nodes()

    def commit(self, staged: Staging) -> None:
        """Use what was staged from now on."""
        if self._resources.next_lease is not None:
            self._resources.take_next_port()
        self._launcher.begin(staged.launch, self._resources.lease_master_port(staged.places[0].slot))
        self._slots = staged.slots

    def publish(self, *, wait: bool) -> None:
        """Let handles of other processes see the members; with `wait`, wait a moment until those that look now do."""
        if (registration := self._resources.registration) is not None:
            registration.publish()
            if wait and not self._roster.is_over:
                registration.await_handles(ANSWER_S)

    def end(self, ranks: Sequence[int]) -> list[str]:
        """End the processes of ranks; return descriptions of those that are still there."""
        return self._resources.end(ranks) if ranks else []

    def discard(self, ranks: Sequence[int]) -> None:
        """End the processes of ranks that have left the group, and forget them."""
        self._resources.discard(ranks)

    def settle(self) -> None:
        """Give back what the group does not use any more."""
        if self._roster.is_over:
            self._resources.give_back_late()
        elif self._roster.handles:
            self._resources.keep_slots([place.slot for place in self._roster.now.places])

    def _lease(self, staged: Staging, deadline: Deadline = NEVER) -> PortLease:
        """Return the lease of the master port of the next epoch."""
        return self._resources.next_lease or self._resources.lease_master_port(staged.places[0].slot, deadline)

    def _undo_start(self, ranks: Sequence[int]) -> None:
        """End what has been started for an epoch that has not begun."""
        self._resources.end(ranks)
        self._resources.forget([rank for rank in ranks if rank >= len(self._roster.now.members)])

    def _note_slots(self) -> None:
        """Note the slots of logical nodes that the cluster has been extended by."""
        cluster = self._launcher.spec.cluster
        if isinstance(cluster, RayVirtualCluster):
            known = {slot.node_idx for slot in self._slots}
            self._slots = [*self._slots, *(slot for slot in cluster.slots() if slot.node_idx not in known)]

    def _move(self, places: Sequence[Place], ranks: Sequence[int]) -> tuple[Place, ...]:
        """Claim free slots of the cluster for ranks, and return all places."""
        if any(len(places[rank].tied_bundles[1]) > 1 for rank in ranks):
            raise ValueError("the workers of tied groups do not move to other slots: restart them where they are")
        free = self._resources.claim_free(self._launcher.spec.slots(), len(ranks))
        if len(free) < len(ranks):
            raise ValueError(
                f"{len(ranks)} rank(s) need as many free slots, and there are {len(free)} that can be used. Make "
                "a new group on a larger cluster."
            )
        return move_places(places, dict(zip(ranks, free, strict=True)))

    def _claim(self, before: Snapshot, count: int, slots: Sequence[Slot] | None) -> list[Slot]:
        """Claim the slots of new ranks."""
        tied = len(before.places[0].tied_bundles[1])
        if count <= 0:
            return []
        if slots is not None:
            mine = {place.slot.key for place in before.places}
            if taken := [slot for slot in slots if slot.key in mine]:
                raise ValueError(
                    f"bundle {taken[0].bundle_index} of logical node {taken[0].node_idx} has a worker of this group "
                    "already; give slots that it does not use"
                )
            if choose_slots(slots, count, tied=tied) != list(slots):
                raise ValueError(f"slots must be in whole tied groups of {tied}, each on one logical node")
            self._resources.claim_slots(slots)
            return list(slots)
        cluster = self._launcher.spec.cluster
        if not isinstance(cluster, RayVirtualCluster):
            raise ValueError(f"this group was made from slots, so give the {count} new ones: resize(..., slots=...)")
        chosen = self._resources.claim_free(cluster.slots(), count, tied=tied)
        if len(chosen) < count:
            raise ValueError(
                f"{count} more workers need {count} free slots{f' in tied groups of {tied}' if tied > 1 else ''}, and "
                f"the cluster has {len(chosen)}. Give slots of another cluster (slots=...)."
            )
        return chosen

    def _claim_for(self, places: Sequence[Place], before: Snapshot) -> None:
        """Claim the slots that ranks move to."""
        held = {place.slot.key for place in before.places}
        try:
            self._resources.claim_slots([place.slot for place in places if place.slot.key not in held])
        except PlacementError as error:
            raise WorkerFailureError(tuple(before.lost.values()), f"Their new slots cannot be used: {error}") from error

    def _find_new_slots(
        self, places: tuple[Place, ...], ranks: Sequence[int], before: Snapshot, deadline: Deadline
    ) -> tuple[tuple[Place, ...], Sequence[Slot]]:
        """Return the places, with other slots of the cluster for ranks in whose slots no process can start.

        Also return the slots of the cluster, which may have replaced lost nodes for that.
        """
        slots, lost = self._slots, tuple(before.lost.values())
        usable = {slot.key for slot in usable_slots(places[rank].slot for rank in ranks)}
        stuck = [rank for rank in ranks if places[rank].slot.key not in usable]
        if not stuck:
            return places, slots
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
                    + " other slots. Create a new group on other nodes.",
                )
            places = move_places(places, dict(zip(drained, free, strict=True)))
        return places, slots

    def _replace_lost_slots(
        self, places: Sequence[Place], lost: tuple[WorkerFailure, ...], deadline: Deadline
    ) -> tuple[Sequence[Slot], tuple[Place, ...]]:
        """Let the cluster replace lost nodes; return its slots, and the places of all ranks."""
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
            self._note_slots()  # ranks may have moved to logical nodes that were added later
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

# SPDX-License-Identifier: Apache-2.0
"""The slots of a group for a change: claims, and other slots in place of those in which nothing can start."""

import contextlib
from collections.abc import Iterable, Sequence

from fairlead_placement import PlacementError, RayVirtualCluster, ResourceInsufficientError, Slot
from fairlead_placement.extension import claim_slots

from .._model import GroupState, Place
from .._observe.head import alive_nodes, draining_nodes
from .._start.layout import choose_slots, move_places, resize_places
from .._world import Deadline
from ..exceptions import WorkerFailure, WorkerFailureError
from .core import Core
from .owned import Owned


def usable_slots(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots in which a process can start now: Ray starts none on a node that is lost or drains."""
    slots = list(slots)
    nodes = alive_nodes() - draining_nodes() if slots else frozenset()
    return [slot for slot in slots if slot.node_id in nodes]


class Slots:
    """The slots that a group has claimed, and those of its cluster that it may claim."""

    def __init__(self, cluster: RayVirtualCluster | Sequence[Slot], core: Core, owned: Owned) -> None:
        self._cluster = cluster
        self._core = core
        self._owned = owned
        # Those of the cluster when the group was made, and of the logical nodes that it was extended by.
        self._known: Sequence[Slot] = self.read()
        self._next: Sequence[Slot] | None = None  # those in the epoch that is prepared, if others replace them

    def read(self) -> Sequence[Slot]:
        """Return the slots of the cluster as they are now, or those that the group was made from."""
        return self._cluster.slots() if isinstance(self._cluster, RayVirtualCluster) else tuple(self._cluster)

    def claim(self, slots: Iterable[Slot]) -> None:
        """Claim these slots in addition to those that are claimed already; all of them, or none."""
        new = [slot for slot in slots if not self._owned.holds(("slot", slot.key))]
        usable = {slot.key for slot in usable_slots(new)}
        if gone := [slot for slot in new if slot.key not in usable]:
            raise ResourceInsufficientError(
                f"{self._core.name_prefix!r} cannot run in bundle {gone[0].bundle_index} of logical node "
                f"{gone[0].node_idx}: its node {gone[0].node_id[:8]} is lost, or about to end because Ray drains it. "
                "Replace lost nodes with the cluster's replace_lost_nodes(), or use other slots."
            )
        made: list[Slot] = []
        try:
            for slot in new:
                made.append(slot)
                self._claim(slot)
        except BaseException:  # including Ctrl-C: a full slot is waited for
            self._owned.drop(("slot", slot.key) for slot in made)
            raise

    def claim_free(self, count: int, *, tied: int = 1) -> list[Slot]:
        """Claim and return the first usable slots of the cluster that no group uses, in whole tied groups.

        If there are not enough, fewer are returned, and none is claimed.
        """
        free: list[Slot] = []
        for slot in usable_slots(self.read()):
            if not self._owned.holds(("slot", slot.key)) and len(choose_slots(free, count, tied=tied)) < count:
                with contextlib.suppress(ResourceInsufficientError):  # other groups fill it
                    self._claim(slot)
                    free.append(slot)
        chosen = choose_slots(free, count, tied=tied)
        kept = {slot.key for slot in chosen} if len(chosen) == count else set()
        self._owned.drop(("slot", slot.key) for slot in free if slot.key not in kept)
        return chosen

    def _claim(self, slot: Slot) -> None:
        self._owned.own(("slot", slot.key), claim_slots([slot], self._core.name_prefix, group=self._core).release)

    def keep(self, places: Iterable[Place]) -> None:
        """Return the claims of all slots but those of these places."""
        kept = {place.slot.key for place in places}
        self._owned.drop(key for key in self._owned.keys("slot") if key[1] not in kept)

    def claim_new(self, before: GroupState, count: int, slots: Sequence[Slot] | None) -> list[Slot]:
        """Claim the slots of new ranks: those given, or free ones of the cluster."""
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
            self.claim(slots)
            return list(slots)
        if not isinstance(self._cluster, RayVirtualCluster):
            raise ValueError(f"this group was made from slots, so give the {count} new ones: resize(..., slots=...)")
        chosen = self.claim_free(count, tied=tied)
        if len(chosen) < count:
            raise ValueError(
                f"{count} more workers need {count} free slots{f' in tied groups of {tied}' if tied > 1 else ''}, and "
                f"the cluster has {len(chosen)}. Give slots of another cluster (slots=...)."
            )
        return chosen

    def move(self, places: Sequence[Place], ranks: Sequence[int]) -> tuple[Place, ...]:
        """Claim free slots of the cluster for ranks, and return all places."""
        if any(len(places[rank].tied_bundles[1]) > 1 for rank in ranks):
            raise ValueError("the workers of tied groups do not move to other slots: restart them where they are")
        free = self.claim_free(len(ranks))
        if len(free) < len(ranks):
            raise ValueError(
                f"{len(ranks)} rank(s) need as many free slots, and there are {len(free)} that can be used. Make "
                "a new group on a larger cluster."
            )
        return move_places(places, dict(zip(ranks, free, strict=True)))

    def resize(
        self, places: Sequence[Place], size: int, before: GroupState, slots: Sequence[Slot] | None
    ) -> tuple[Place, ...]:
        """Claim the slots of new ranks, and return the places of a group of another size."""
        added = self.claim_new(before, size - len(before.members), slots)
        return resize_places(places, size, added, prefix=self._core.name_prefix)

    def avoid_unusable(
        self, places: tuple[Place, ...], ranks: Sequence[int], before: GroupState, until: Deadline
    ) -> tuple[Place, ...]:
        """Return the places, with other slots of the cluster for ranks in whose slots no process can start."""
        self._next, lost = None, tuple(before.lost.values())
        usable = {slot.key for slot in usable_slots(places[rank].slot for rank in ranks)}
        stuck = [rank for rank in ranks if places[rank].slot.key not in usable]
        if not stuck:
            return places
        alive = alive_nodes()
        drained = [rank for rank in stuck if places[rank].slot.node_id in alive]
        if len(drained) < len(stuck):
            places = self._replace_lost(places, lost, until)
        if drained:
            tied = any(len(places[rank].tied_bundles[1]) > 1 for rank in drained)
            free = [] if tied else self.claim_free(len(drained))
            if len(free) < len(drained):
                raise WorkerFailureError(
                    lost,
                    f"Ray drains the nodes of rank(s) {', '.join(map(str, drained))}, so that nothing starts there. "
                    + ("The workers of tied groups do not move to" if tied else f"There are {len(free)}")
                    + " other slots. Create a new group on other nodes.",
                )
            places = move_places(places, dict(zip(drained, free, strict=True)))
        return places

    def claim_places(self, places: Sequence[Place], before: GroupState) -> None:
        """Claim the slots that ranks move to."""
        held = {place.slot.key for place in before.places}
        try:
            self.claim([place.slot for place in places if place.slot.key not in held])
        except PlacementError as error:
            raise WorkerFailureError(tuple(before.lost.values()), f"Their new slots cannot be used: {error}") from error

    def commit(self) -> None:
        """Use the slots of the epoch that has begun."""
        self._known, self._next = self._next or self._known, None

    def _replace_lost(
        self, places: Sequence[Place], lost: tuple[WorkerFailure, ...], until: Deadline
    ) -> tuple[Place, ...]:
        """Let the cluster replace lost nodes; return the places of all ranks."""
        cluster = self._cluster
        if not isinstance(cluster, RayVirtualCluster):
            alive = alive_nodes()
            lost_nodes = sorted({place.slot.node_id[:8] for place in places if place.slot.node_id not in alive})
            raise WorkerFailureError(
                lost,
                f"Their slots were on node(s) {', '.join(lost_nodes)}, which are lost. This group was made from slots, "
                "so there is no cluster that could reserve others. Get new slots, and create a new group.",
            )
        try:
            cluster.replace_lost_nodes(timeout_s=until.left() or 0.0)
        except PlacementError as error:
            raise WorkerFailureError(
                lost, f"Their nodes are lost, and other nodes have no room for them: {error}"
            ) from error
        # Another group may have replaced them before. The slots of one logical node keep their order.
        mine = {slot.node_idx for slot in self._known}
        now = sorted((slot for slot in cluster.slots() if slot.node_idx in mine), key=lambda slot: slot.node_idx)
        there = {slot.node_idx for slot in now}
        before = sorted((slot for slot in self._known if slot.node_idx in there), key=lambda slot: slot.node_idx)
        instead = dict(zip((slot.key for slot in before), now, strict=True))
        moved = move_places(places, {place.rank: instead.get(place.slot.key, place.slot) for place in places})
        if gone := [place.rank for place in moved if place.slot.node_id not in alive_nodes()]:
            raise WorkerFailureError(
                lost,
                f"The slots of rank(s) {', '.join(map(str, gone))} are lost, and are not from the cluster of this "
                "group, which could reserve others. Resize the group without these ranks.",
            )
        self._next = now
        return moved

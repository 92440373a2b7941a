# SPDX-License-Identifier: Apache-2.0
"""The slots of a group for a change: claims, and other slots in place of those in which nothing can start."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError, Slot
from fairlead_placement.extension import claim_slots, group_pairs

from .._model import Place
from .._observe.head import alive_nodes, draining_nodes
from .._start.layout import move_places
from .._world import Deadline
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
        # Of every slot that the cluster has had, by its key: which slot of which logical node it is.
        self._positions = _find_positions(self.read())

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
        try:
            for slot in new:
                self._claim(slot)
        except BaseException:  # including Ctrl-C: a full slot is waited for
            self._owned.drop(("slot", slot.key) for slot in new)
            raise

    def claim_free(self, count: int) -> list[Slot]:
        """Claim and return the first usable slots of the cluster that no group uses; if there are fewer, claim none."""
        free: list[Slot] = []
        for slot in usable_slots(self.read()):
            if not self._owned.holds(("slot", slot.key)) and len(free) < count:
                with contextlib.suppress(ResourceInsufficientError):  # other groups fill it
                    self._claim(slot)
                    free.append(slot)
        if len(free) < count:
            self._owned.drop(("slot", slot.key) for slot in free)
        return free

    def _claim(self, slot: Slot) -> None:
        self._owned.own(("slot", slot.key), claim_slots([slot], self._core.name_prefix, group=self._core).release)

    def keep(self, places: Iterable[Place]) -> None:
        """Return the claims of all slots but those of these places."""
        used = {place.slot.key for place in places}
        self._owned.drop(key for key in self._owned.keys("slot") if key[1] not in used)

    def claim_new(self, places: Sequence[Place], count: int, slots: Sequence[Slot] | None) -> list[Slot]:
        """Claim the slots of new ranks: those given, or free ones of the cluster."""
        if count <= 0:
            return []
        if slots is not None:
            mine = {place.slot.key for place in places}
            if taken := [slot for slot in slots if slot.key in mine]:
                raise ValueError(
                    f"bundle {taken[0].bundle_index} of logical node {taken[0].node_idx} has a worker of this group "
                    "already; give slots that it does not use"
                )
            self.claim(slots)
            return list(slots)
        if not isinstance(self._cluster, RayVirtualCluster):
            raise ValueError(f"this group was made from slots, so give the {count} new ones: resize(..., slots=...)")
        free = self.claim_free(count)
        if len(free) < count:
            raise ValueError(
                f"{count} more workers need {count} free slots, and the cluster has {len(free)}. Give slots of another "
                "cluster (slots=...)."
            )
        return free

    def move(self, places: Sequence[Place], ranks: Sequence[int], why: str = "") -> tuple[Place, ...]:
        """Claim free slots of the cluster for ranks, and return all places; `why` begins the errors."""
        if any(len(places[rank].tied_bundles[1]) > 1 for rank in ranks):
            raise ValueError(f"{why}the workers of tied groups do not move to other slots: restart them where they are")
        free = self.claim_free(len(ranks))
        if len(free) < len(ranks):
            raise ValueError(
                f"{why}{len(ranks)} rank(s) need as many free slots, and there are {len(free)} that can be used. Make "
                "a new group on a larger cluster."
            )
        return move_places(places, dict(zip(ranks, free, strict=True)))

    def avoid_unusable(self, places: tuple[Place, ...], ranks: Sequence[int], until: Deadline) -> tuple[Place, ...]:
        """Return the places, with other slots of the cluster for ranks in whose slots no process can start."""
        usable = {slot.key for slot in usable_slots(places[rank].slot for rank in ranks)}
        stuck = [rank for rank in ranks if places[rank].slot.key not in usable]
        if not stuck:
            return places
        alive = alive_nodes()
        drained = [rank for rank in stuck if places[rank].slot.node_id in alive]
        if len(drained) < len(stuck):
            places = self._replace_lost(places, until)
        if drained:
            names = ", ".join(map(str, drained))
            why = f"Ray drains the nodes of rank(s) {names}, so that nothing starts there: "
            places = self.move(places, drained, why)
        return places

    def _replace_lost(self, places: Sequence[Place], until: Deadline) -> tuple[Place, ...]:
        """Let the cluster replace lost nodes; return the places of all ranks."""
        if not isinstance(self._cluster, RayVirtualCluster):
            alive = alive_nodes()
            lost_nodes = sorted({place.slot.node_id[:8] for place in places if place.slot.node_id not in alive})
            raise ResourceInsufficientError(
                f"Their slots were on node(s) {', '.join(lost_nodes)}, which are lost. This group was made from slots, "
                "so there is no cluster that could reserve others. Get new slots, and create a new group."
            )
        self._cluster.replace_lost_nodes(timeout_s=until.left() or 0.0)
        # Another group may have replaced them before. The slots of one logical node keep their order.
        now, alive = self._cluster.slots(), alive_nodes()
        positions = _find_positions(now)
        self._positions |= positions
        present = {positions[slot.key]: slot for slot in now}
        known = {place.rank: self._positions.get(place.slot.key, (-1, -1)) for place in places}
        moved = move_places(places, {rank: present[where] for rank, where in known.items() if where in present})
        if gone := [place.rank for place in moved if place.slot.node_id not in alive]:
            raise ResourceInsufficientError(
                f"The slots of rank(s) {', '.join(map(str, gone))} are lost, and are not from the cluster of this "
                "group, which could reserve others. Resize the group without these ranks."
            )
        return moved


def _find_positions(slots: Iterable[Slot]) -> dict[Any, tuple[int, int]]:
    """Return the logical node of each slot, and its number there, by the key of the slot."""
    by_node = group_pairs((slot.node_idx, slot) for slot in slots)
    return {slot.key: (node, number) for node, mine in by_node.items() for number, slot in enumerate(mine)}

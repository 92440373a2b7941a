# SPDX-License-Identifier: Apache-2.0
"""The places of the ranks: which slot each one lives in, the claims of these slots, and others in their place."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError, Slot
from fairlead_placement.extension import claim_slots, group_pairs, number_slots
from fairlead_sharding import NamedSharding

from .._model import Place
from .._observe.query import alive_nodes, draining_nodes
from .._world import Deadline
from .core import Core
from .owned import Owned


def lay_out(
    slots: Sequence[Slot],
    *,
    prefix: str,
    workers_per_node: int | Sequence[int] | None = None,
    bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
) -> tuple[Place, ...]:
    """Assign a slot to each rank, in the physical order of the slots, or in the order of `bundle_indices_list`."""
    if not slots:
        raise ValueError("a worker group needs at least one slot, got none")
    if workers_per_node is not None or bundle_indices_list is not None:
        _check_numbers(slots)
    if bundle_indices_list is None:
        chosen = _choose(slots, workers_per_node)
        rows = [(slot, number, 0, (slot.node_idx, [slot.bundle_index])) for number, slot in enumerate(chosen)]
    else:
        rows = _tie(slots, bundle_indices_list)
    return _number_on_nodes([_make_place(rank, *row, prefix=prefix) for rank, row in enumerate(rows)])


def move_places(places: Sequence[Place], slots: Mapping[int, Slot]) -> tuple[Place, ...]:
    """Return the same ranks and names with some ranks in other slots, which are given by rank."""
    new = [slots.get(place.rank, place.slot) for place in places]
    bundle = {(place.tied_group, place.tied_rank): slot.bundle_index for place, slot in zip(places, new, strict=True)}
    moved = []
    for place, slot in zip(places, new, strict=True):
        node_idx, bundles = place.tied_bundles
        tied_bundles = node_idx, [bundle[place.tied_group, within] for within in range(len(bundles))]
        moved.append(replace(place, slot=slot, tied_bundles=tied_bundles))
    return _number_on_nodes(moved)


def resize_places(places: Sequence[Place], size: int, slots: Sequence[Slot], *, prefix: str) -> tuple[Place, ...]:
    """Return the first `size` ranks, or all ranks and others in the given slots, with the numbers on their nodes."""
    added = [
        _make_place(rank, slot, rank, 0, (slot.node_idx, [slot.bundle_index]), prefix=prefix)
        for rank, slot in enumerate(slots, start=len(places))
    ]
    return _number_on_nodes([*places[:size], *added])


def _make_place(
    rank: int, slot: Slot, group: int, within: int, bundles: tuple[int, list[int]], *, prefix: str
) -> Place:
    """Name the place of a rank by its tied group, or by its slot if it is alone in the group."""
    tied = len(bundles[1]) > 1
    name = f"{prefix}-grp{group}-{within}" if tied else f"{prefix}-{slot.node_idx}-{slot.bundle_index}"
    return Place(rank, slot, name, group, within, bundles, 0, 0, 0)


def _number_on_nodes(places: Sequence[Place]) -> tuple[Place, ...]:
    """Set for each place the number of its node, its own number there, and how many places the node has."""
    sizes = Counter(place.slot.node_id for place in places)
    return tuple(
        replace(place, node_rank=slot.node_rank, local_rank=slot.local_rank, local_world_size=sizes[slot.node_id])
        for place, slot in zip(places, number_slots(place.slot for place in places), strict=True)
    )


def _check_numbers(slots: Sequence[Slot]) -> None:
    """Refuse slots that their numbers do not identify."""
    (numbers, count), *_ = Counter((slot.node_idx, slot.bundle_index) for slot in slots).most_common(1)
    if count > 1:
        raise ValueError(
            f"{count} slots are bundle {numbers[1]} of logical node {numbers[0]}, because they are from different "
            "clusters. Give only the slots that shall hold workers, without workers_per_node and bundle_indices_list."
        )


def _choose(slots: Sequence[Slot], workers_per_node: Any) -> list[Slot]:
    """Return the first slots of each logical node, as many as requested."""
    if workers_per_node is None:
        return list(slots)
    by_node = group_pairs((slot.node_idx, slot) for slot in slots)
    if isinstance(workers_per_node, (list, tuple)):
        wanted = list(workers_per_node)
        if len(wanted) != len(by_node):
            raise ValueError(
                f"workers_per_node has {len(wanted)} entries {wanted}, but {len(by_node)} logical nodes are in use: "
                f"{sorted(by_node)}"
            )
    else:
        wanted = [workers_per_node] * len(by_node)
    keep: set[int] = set()
    for (node_idx, own), count in zip(sorted(by_node.items()), wanted, strict=True):
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"workers_per_node must be an int or a list of ints, got {workers_per_node!r}")
        if not 0 <= count <= len(own):
            raise ValueError(
                f"workers_per_node asks for {count} worker(s) on logical node {node_idx}, which has {len(own)} slot(s)"
            )
        keep.update(map(id, own[:count]))
    chosen = [slot for slot in slots if id(slot) in keep]
    if not chosen:
        raise ValueError(f"workers_per_node={workers_per_node!r} leaves no worker")
    return chosen


def _tie(slots: Sequence[Slot], groups: Any) -> list[tuple[Slot, int, int, tuple[int, list[int]]]]:
    """Return a row for each worker: slot, number of its tied group, its number in it, the group's bundles."""
    # In one placement group over all nodes the bundle index alone identifies a slot, and a tied group may span nodes.
    unified = len({slot.placement_group.id for slot in slots}) == 1
    by_bundle = {(None if unified else slot.node_idx, slot.bundle_index): slot for slot in slots}
    nodes = sorted({slot.node_idx for slot in slots})
    rows: list[tuple[Slot, int, int, tuple[int, list[int]]]] = []
    taken: dict[tuple[int | None, int], int] = {}
    for number, entry in enumerate(groups):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[1], (list, tuple)):
            raise TypeError(f"bundle_indices_list must hold (node_idx, [bundle indices]) pairs, got {entry!r}")
        node_idx, bundles = entry
        if node_idx not in nodes:
            raise ValueError(f"bundle_indices_list[{number}] names logical node {node_idx!r}; in use are {nodes}")
        if not bundles:
            raise ValueError(f"bundle_indices_list[{number}] names no bundle of logical node {node_idx}")
        for within, bundle in enumerate(bundles):
            key = (None if unified else node_idx, bundle)
            if key not in by_bundle:
                present = sorted(b for n, b in by_bundle if n in (None, node_idx))
                raise ValueError(
                    f"bundle_indices_list[{number}] names bundle {bundle!r} of logical node {node_idx}, "
                    f"which has {present}"
                )
            if key in taken:
                raise ValueError(
                    f"bundle {bundle} of logical node {node_idx} is in tied groups {taken[key]} and {number} of "
                    "bundle_indices_list; a slot holds one worker of a group"
                )
            taken[key] = number
            rows.append((by_bundle[key], number, within, (node_idx, list(bundles))))
    if not rows:
        raise ValueError("bundle_indices_list is empty: a worker group needs at least one worker")
    return rows


def check_sharding(given: NamedSharding | None, world_size: int) -> NamedSharding:
    """Return the axes over the ranks of a group: those given, or one axis `worker` over all."""
    if given is None:
        return NamedSharding.from_shape(worker=world_size)
    if not isinstance(given, NamedSharding):
        raise TypeError(f"sharding_annotations must be a NamedSharding, got {type(given).__name__}")
    if given.size != world_size:
        raise ValueError(
            f"sharding_annotations has {given.size} rank(s) {given.shape}, and the group has {world_size} worker(s): "
            "give axes of that size, or workers_per_node for as many workers"
        )
    if sorted(given.layout.ravel().tolist()) != list(range(world_size)):
        raise ValueError(f"sharding_annotations must hold the ranks 0 to {world_size - 1}, got {given!r}")
    return given


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

    def claim(self, slots: Iterable[Slot]) -> None:
        """Claim these slots in addition to those that are claimed already; a change that fails returns them."""
        new = [slot for slot in slots if not self._owned.holds(("slot", slot.key))]
        usable = {slot.key for slot in usable_slots(new)}
        if gone := [slot for slot in new if slot.key not in usable]:
            raise ResourceInsufficientError(
                f"{self._core.name_prefix!r} cannot run in bundle {gone[0].bundle_index} of logical node "
                f"{gone[0].node_idx}: its node {gone[0].node_id[:8]} is lost, or about to end because Ray drains it. "
                "Replace lost nodes with the cluster's replace_lost_nodes(), or use other slots."
            )
        for slot in new:
            self._claim(slot)

    def _claim_free(self, nodes: Sequence[int | None], why: str) -> list[Slot]:
        """Claim and return usable slots of the cluster that no group uses, or raise an error that begins with `why`.

        `nodes` has for each of them the logical node whose slots come first, such as that of a lost node, or None.
        """
        slots = self._cluster.slots() if isinstance(self._cluster, RayVirtualCluster) else self._cluster
        usable, free = [slot for slot in usable_slots(slots) if not self._owned.holds(("slot", slot.key))], []
        for node_idx in nodes:
            usable.sort(key=lambda slot: slot.node_idx != node_idx)
            while usable:
                with contextlib.suppress(ResourceInsufficientError):  # other groups fill it
                    self._claim(slot := usable.pop(0))
                    free.append(slot)
                    break
        if len(free) < len(nodes):
            raise ValueError(
                f"{why} need as many free slots, and there are {len(free)} that can be used. Make a new group on a "
                "larger cluster, or resize this one with slots of another cluster (slots=...)."
            )
        return free

    def _claim(self, slot: Slot) -> None:
        self._owned.own(("slot", slot.key), claim_slots([slot], self._core.name_prefix, group=self._core).release)

    def keep(self, places: Iterable[Place]) -> None:
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
        return self._claim_free([None] * count, f"{count} more worker(s)")

    def move(
        self, places: Sequence[Place], ranks: Sequence[int], why: str = "", *, near: bool = False
    ) -> tuple[Place, ...]:
        """Claim free slots of the cluster, `near` those that these ranks had, and return all places.

        Errors begin with `why`.
        """
        nodes = [places[rank].slot.node_idx if near else None for rank in ranks]
        is_tied = any(len(places[rank].tied_bundles[1]) > 1 for rank in ranks)
        free = [] if is_tied and not near else self._claim_free(nodes, f"{why}{len(ranks)} rank(s)")
        if is_tied and [slot.node_idx for slot in free] != nodes:
            raise ValueError(f"{why}the workers of tied groups do not move to other slots: restart them where they are")
        return move_places(places, dict(zip(ranks, free, strict=True)))

    def avoid_unusable(self, places: tuple[Place, ...], ranks: Sequence[int], until: Deadline) -> tuple[Place, ...]:
        """Return the places, with other slots of the cluster for ranks in whose slots no process can start."""
        usable = {slot.key for slot in usable_slots(places[rank].slot for rank in ranks)}
        stuck = [rank for rank in ranks if places[rank].slot.key not in usable]
        if not stuck:
            return places
        alive, names = alive_nodes(), ", ".join(map(str, stuck))
        if any(places[rank].slot.node_id not in alive for rank in stuck):
            if not isinstance(self._cluster, RayVirtualCluster):
                raise ResourceInsufficientError(
                    f"Rank(s) {names} were on lost nodes. The group was made from slots, so there is no cluster that "
                    "could reserve others. Create a new group on other slots, or resize this one without these ranks."
                )
            self._cluster.replace_lost_nodes(timeout_s=until.left() or 0.0)
        why = f"The nodes of rank(s) {names} are lost, or Ray drains them, so that nothing starts there: "
        return self.move(places, stuck, why, near=True)

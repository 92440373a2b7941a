# SPDX-License-Identifier: Apache-2.0
"""The layout of a group: which slot each rank lives in, and its name. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairlead_placement import Slot
from fairlead_placement.extension import group_pairs, number_slots
from fairlead_sharding import NamedSharding

from .._model import Place


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
                f"workers_per_node asks for {count} workers on logical node {node_idx}, which has {len(own)} slots"
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
        raise ValueError(f"sharding_annotations has {given.size} ranks {given.shape}, the group {world_size} workers")
    if sorted(given.layout.ravel().tolist()) != list(range(world_size)):
        raise ValueError(f"sharding_annotations must hold the ranks 0 to {world_size - 1}, got {given!r}")
    return given

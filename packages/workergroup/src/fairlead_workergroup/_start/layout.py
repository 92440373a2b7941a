# SPDX-License-Identifier: Apache-2.0
"""The layout of a group: which slot each rank lives in, and its name. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairlead_placement import Slot

from .._members import Place

__all__ = ["lay_out", "move_places"]


def lay_out(
    slots: Sequence[Slot],
    *,
    prefix: str,
    workers_per_node: int | Sequence[int] | None = None,
    bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
) -> tuple[Place, ...]:
    """Give each rank a slot, in the physical order of the slots, or in the order of `bundle_indices_list`.

    Args:
        slots: in physical order.
        prefix: first part of the workers' names.
        workers_per_node: how many workers each logical node gets: None for one per slot, a number for all nodes, or a
            number for each logical node in use.
        bundle_indices_list: one tied group each: `(node_idx, [bundle indices])`.

    Raises:
        TypeError, ValueError: what is asked does not fit the slots.
    """
    if not slots:
        raise ValueError("a worker group needs at least one slot, got none")
    if bundle_indices_list is not None and workers_per_node is not None:
        raise ValueError("give workers_per_node or bundle_indices_list, not both")
    if workers_per_node is not None or bundle_indices_list is not None:
        _check_numbers(slots)
    if bundle_indices_list is None:
        chosen = [(slot, (slot.node_idx, [slot.bundle_index])) for slot in _some(slots, workers_per_node)]
        tied = [(slot, number, 0, bundles) for number, (slot, bundles) in enumerate(chosen)]
    else:
        tied = _tied(slots, bundle_indices_list)
    places = []
    for rank, ((slot, group, within, bundles), on_node) in enumerate(
        zip(tied, _on_nodes([slot for slot, *_ in tied]), strict=True)
    ):
        several = len(bundles[1]) > 1
        places.append(
            Place(
                rank=rank,
                slot=slot,
                name=f"{prefix}-grp{group}-{within}" if several else f"{prefix}-{slot.node_idx}-{slot.bundle_index}",
                tied_group=group,
                tied_rank=within,
                tied_bundles=bundles,
                **on_node,
            )
        )
    return tuple(places)


def move_places(places: Sequence[Place], slots: Mapping[int, Slot]) -> tuple[Place, ...]:
    """The same ranks and names, some of them in other slots, given by rank; physical nodes are counted anew."""
    new = [slots.get(place.rank, place.slot) for place in places]
    bundle = {(place.tied_group, place.tied_rank): slot.bundle_index for place, slot in zip(places, new, strict=True)}
    return tuple(
        replace(
            place,
            slot=slot,
            tied_bundles=(
                place.tied_bundles[0],
                [bundle[place.tied_group, within] for within in range(len(place.tied_bundles[1]))],
            ),
            **on_node,
        )
        for place, slot, on_node in zip(places, new, _on_nodes(new), strict=True)
    )


def _on_nodes(slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """Where each slot, by rank, is among those of the group: its node's number, its own there, how many are there."""
    nodes = list(dict.fromkeys(slot.node_id for slot in slots))
    size = Counter(slot.node_id for slot in slots)
    number = {node_id: at for at, node_id in enumerate(nodes)}
    seen: Counter[str] = Counter()
    found: list[dict[str, Any]] = []
    for slot in slots:
        there = {"node_rank": number[slot.node_id], "local_rank": seen[slot.node_id]}
        found.append({**there, "local_world_size": size[slot.node_id]})
        seen[slot.node_id] += 1
    return found


def _check_numbers(slots: Sequence[Slot]) -> None:
    """Refuse slots whose numbers do not say which is meant.

    Raises:
        ValueError: two of them have the same.
    """
    (numbers, count), *_ = Counter((slot.node_idx, slot.bundle_index) for slot in slots).most_common(1)
    if count > 1:
        raise ValueError(
            f"{count} slots are bundle {numbers[1]} of logical node {numbers[0]}, each of a cluster of its own: give "
            "the slots alone that are to hold workers, without workers_per_node and bundle_indices_list"
        )


def _some(slots: Sequence[Slot], workers_per_node: Any) -> list[Slot]:
    """The first slots of each logical node, as many as asked for."""
    if workers_per_node is None:
        return list(slots)
    by_node: dict[int, list[Slot]] = {}
    for slot in slots:
        by_node.setdefault(slot.node_idx, []).append(slot)
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
    for (node_idx, there), count in zip(sorted(by_node.items()), wanted, strict=True):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"workers_per_node must be an int or a list of ints, got {workers_per_node!r}")
        if not 0 <= count <= len(there):
            raise ValueError(
                f"workers_per_node asks for {count} workers on logical node {node_idx}, which has {len(there)} slots"
            )
        keep.update(map(id, there[:count]))
    chosen = [slot for slot in slots if id(slot) in keep]
    if not chosen:
        raise ValueError(f"workers_per_node={workers_per_node!r} leaves no worker")
    return chosen


def _tied(slots: Sequence[Slot], groups: Any) -> list[tuple[Slot, int, int, tuple[int, list[int]]]]:
    """A row per worker: slot, number of its tied group, its number in it, the group's bundles."""
    # In one placement group over all nodes a bundle index says all, and a tied group may span nodes.
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
                there = sorted(b for n, b in by_bundle if n in (None, node_idx))
                raise ValueError(
                    f"bundle_indices_list[{number}] names bundle {bundle!r} of logical node {node_idx}, "
                    f"which has {there}"
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

# SPDX-License-Identifier: Apache-2.0
"""Placement groups of a plan: made, waited for, removed."""

import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from .._nodes.agent import guard_groups, is_driver, this_process
from .._nodes.inventory import alive_nodes
from .._nodes.owners import owned_name
from .._plan.model import Ask
from .._ray_private import free_per_node

__all__ = ["PLACING_S", "Demand", "Reserved", "place", "place_pinned", "remove", "unique_name"]

# Whole seconds. Ray places groups one after the other, a pinned one whose node has room within milliseconds. One that
# is not placed so long after the one before it has lost a race.
PLACING_S = 1


@dataclass(frozen=True)
class Reserved:
    """A placement group that Ray has placed: its bundles' logical nodes, node ids and contents, by bundle index."""

    group: PlacementGroup
    node_idx: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: tuple[dict[str, float], ...]


def place(
    asks: Sequence[Ask], chosen: Mapping[int, tuple[str, ...]], *, name: str, unified: bool
) -> tuple[Reserved, ...] | None:
    """Ask Ray for the groups of a plan; None, with nothing left, if it cannot place them at once."""
    batches = [list(asks)] if unified and asks else [[ask] for ask in asks]
    parts = [
        [(ask.node_idx, node_id, dict(ask.bundle)) for ask in batch for node_id in chosen[ask.node_idx]]
        for batch in batches
    ]
    wanted = {
        _prefix(name, batch[0]): [(node_id, bundle) for _, node_id, bundle in part]
        for batch, part in zip(batches, parts, strict=True)
    }
    groups = place_pinned(wanted)
    if groups is None:
        return None
    return tuple(Reserved(group, *zip(*part, strict=True)) for group, part in zip(groups, parts, strict=True))


def place_pinned(wanted: Mapping[str, Sequence[tuple[str, Mapping[str, float]]]]) -> tuple[PlacementGroup, ...] | None:
    """Ask Ray for groups whose bundles are pinned to nodes.

    A node that is lost then leaves its group parked: Ray does not look for another, nor spin its scheduler.

    Args:
        wanted: what each group's name starts with -> its bundles, each the id of a node and what it is to hold there.

    Returns:
        The groups, in this order, all placed; None, with nothing left, if Ray cannot place them at once.
    """
    made: list[PlacementGroup] = []
    guard_groups()
    try:
        for name, bundles in wanted.items():
            group = placement_group(
                [dict(bundle) for _, bundle in bundles],
                # Each bundle has its node; PACK asks nothing more of Ray.
                strategy="PACK",
                name=unique_name(name),
                bundle_label_selector=[{"ray.io/node-id": node_id} for node_id, _ in bundles],
            )
            made.append(group)
        if all(group.wait(PLACING_S) for group in made):
            return tuple(made)
    except BaseException:
        _discard(made)
        raise
    _discard(made)
    return None


class Demand:
    """Unpinned groups that tell an autoscaler what is missing; withdrawn as soon as nodes that could hold it are there.

    Withdrawn before anything is planned: what Ray may have placed for them meanwhile is free again by then.
    """

    def __init__(self, asks: Sequence[Ask], name: str) -> None:
        self._asks = asks
        self._name = name
        self._groups: list[PlacementGroup] = []

    def show(self) -> None:
        """Ask for what is missing. Can be repeated."""
        guard_groups()
        for ask in self._asks[len(self._groups) :]:
            selector = {key: condition.replace(" ", "") for key, condition in ask.labels.items()}
            group = placement_group(
                [dict(ask.bundle)] * ask.count,
                strategy=ask.strategy,
                name=unique_name(_prefix(self._name, ask)),
                bundle_label_selector=[selector] * ask.count if selector else None,
            )
            self._groups.append(group)

    def withdraw(self) -> None:
        """Take it back, and wait until nothing of it is held. Can be repeated."""
        groups, self._groups = self._groups, []
        _discard(groups)

    def __enter__(self) -> "Demand":
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()


def remove(groups: Sequence[PlacementGroup], *, timeout_s: float = 30.0) -> bool:
    """Remove groups and wait until Ray has the resources back; whether it had them within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    ids = {group.id.hex() for group in groups}
    try:
        # Nodes report with a delay. A group so young that they do not show it yet would look returned at once.
        _poll(lambda: _all_shown(ids), min(deadline, time.monotonic() + 1.0))
    finally:
        for group in groups:
            remove_placement_group(group)

    def returned() -> bool:
        # Removed in the tables is not yet returned on the nodes, which show a group's resources under its id.
        return not _rows(ids) and not any(_on(free) & ids for free in free_per_node().values())

    return not ids or _poll(returned, deadline)


def _prefix(name: str, ask: Ask) -> str:
    return f"{name or 'fairlead'}-{ask.node_idx}"


def unique_name(name: str) -> str:
    """Return a name that no other group has, which Ray would refuse, and by which this process's end is cleaned up."""
    return owned_name(name, "" if is_driver() else this_process())


def _discard(groups: Sequence[PlacementGroup]) -> None:
    if groups and ray.is_initialized():
        remove(groups)


def _rows(ids: AbstractSet[str]) -> list[dict[str, Any]]:
    """What Ray says of those of the groups that are not removed."""
    return [row for group_id, row in placement_group_table().items() if group_id in ids and row["state"] != "REMOVED"]


def _on(free: Mapping[str, float]) -> set[str]:
    """The ids of the groups of which a node shows resources: these are named "CPU_group_0_<id>"."""
    return {name.rpartition("_")[2] for name in free if "_group_" in name}


def _all_shown(ids: AbstractSet[str]) -> bool:
    """Whether the nodes show the resources of every group that is placed on nodes that are there."""
    placed = [row for row in _rows(ids) if row["state"] == "CREATED"]
    if not placed:
        return True
    shown = {node_id: _on(free) for node_id, free in free_per_node().items()}
    alive = alive_nodes()
    return all(
        row["placement_group_id"] in shown.get(node_id, ())
        for row in placed
        for node_id in alive.intersection(row["bundles_to_node_id"].values())
    )


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    pause = 0.002
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True

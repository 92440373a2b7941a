# SPDX-License-Identifier: Apache-2.0
"""Placement groups of a plan: made, waited for, removed."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from ._inventory import alive_nodes
from ._planner import Ask
from ._ray_private import free_per_node

__all__ = ["PLACING_S", "Demand", "Reserved", "place", "remove"]

# A pinned group whose node has room is placed within milliseconds. One that is not has lost a race.
PLACING_S = 1.0


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
    made: list[Reserved] = []
    try:
        for batch in batches:
            node_idx = tuple(ask.node_idx for ask in batch for _ in range(ask.count))
            node_ids = tuple(node_id for ask in batch for node_id in chosen[ask.node_idx])
            bundles = tuple(dict(ask.bundle) for ask in batch for _ in range(ask.count))
            group = placement_group(
                list(bundles),
                # The plan decides where bundles go; PACK asks nothing more of Ray.
                strategy="PACK",
                name=_name(name, batch[0]),
                # Pinned: a lost node then leaves the group parked instead of spinning the scheduler.
                bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
            )
            made.append(Reserved(group, node_idx, node_ids, bundles))
        deadline = time.monotonic() + PLACING_S
        # wait() takes whole seconds. One call each is enough: all groups are being placed meanwhile.
        if all(one.group.wait(1 if time.monotonic() < deadline else 0) for one in made):
            return tuple(made)
    except BaseException:
        _discard([one.group for one in made])
        raise
    _discard([one.group for one in made])
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
        for ask in self._asks[len(self._groups) :]:
            selector = {key: condition.replace(" ", "") for key, condition in ask.labels.items()}
            group = placement_group(
                [dict(ask.bundle)] * ask.count,
                strategy=ask.strategy,
                name=_name(self._name, ask),
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
    try:
        # Nodes report with a delay. A group so young that they do not show it yet would look returned at once.
        _poll(lambda: all(map(_shown, groups)), min(deadline, time.monotonic() + 1.0))
    finally:
        for group in groups:
            remove_placement_group(group)
    ids = [group.id.hex() for group in groups]

    def returned() -> bool:
        if any(placement_group_table(group).get("state", "REMOVED") != "REMOVED" for group in groups):
            return False
        # Removed in the tables is not yet returned on the nodes, which show a group's resources under its id.
        return not any(i in name for free in free_per_node().values() for name in free for i in ids)

    return _poll(returned, deadline)


def _name(name: str, ask: Ask) -> str:
    """Ray refuses a second group of one name."""
    return f"{name or 'fairlead'}-{ask.node_idx}-{uuid.uuid4().hex[:8]}"


def _discard(groups: Sequence[PlacementGroup]) -> None:
    if groups and ray.is_initialized():
        remove(groups)


def _shown(group: PlacementGroup) -> bool:
    """Whether the nodes of a group show its resources; also True when it is not placed, or its node is gone."""
    row = placement_group_table(group)
    if row.get("state") != "CREATED":
        return True
    free = free_per_node()
    nodes = set(row["bundles_to_node_id"].values()) & alive_nodes()
    return all(any(group.id.hex() in name for name in free.get(node_id, {})) for node_id in nodes)


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    pause = 0.002
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True

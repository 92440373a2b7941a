# SPDX-License-Identifier: Apache-2.0
"""Creates the placement groups of a plan, waits for them, and removes them."""

import functools
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

from .._init import connection
from .._model import Ask, Strategy
from .._nodes.agent import guard_groups, is_driver, this_process
from .._nodes.head import ask_head
from .._nodes.owners import owned_name
from .._ray_private import free_per_node

# Whole seconds. Ray places groups one after the other, and a pinned group whose node has room within milliseconds. A
# group that is not placed so long after the one before it has lost a race.
PLACING_S = 1


@dataclass(frozen=True)
class Reserved:
    """A placement group that Ray has placed, with the logical node, the node id and the content of each bundle."""

    group: PlacementGroup
    node_idx: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: tuple[dict[str, float], ...]


def place(
    asks: Sequence[Ask], chosen: Mapping[int, tuple[str, ...]], *, name: str, unified: bool
) -> tuple[Reserved, ...] | None:
    """Create the groups of a plan. Return None, with nothing left behind, if Ray cannot place them at once."""
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
    """Create placement groups whose bundles are pinned to nodes.

    When a node is lost, Ray then parks its group: it does not look for another node, nor spin its scheduler.

    Args:
        wanted: the bundles of each group, by the prefix of the group's name. A bundle is the id of its node and what it
            holds there.

    Returns:
        The groups in this order, all placed; None, with nothing left behind, if Ray cannot place them at once.
    """
    made: list[PlacementGroup] = []
    guard_groups()
    try:
        for name, bundles in wanted.items():
            nodes = [node_id for node_id, _ in bundles]
            made.append(create_group([bundle for _, bundle in bundles], unique_name(name), nodes=nodes))
        if all(group.wait(PLACING_S) for group in made):
            return tuple(made)
    except BaseException:
        remove(made)
        raise
    remove(made)
    return None


def create_group(
    bundles: Sequence[Mapping[str, float]],
    name: str,
    *,
    nodes: Sequence[str] = (),
    strategy: Strategy = "PACK",
    selector: Mapping[str, str] | None = None,
) -> PlacementGroup:
    """Ask Ray for a placement group, without waiting until it is placed.

    Args:
        bundles: what each bundle holds.
        name: no other group may have it; see `unique_name`.
        nodes: the id of each bundle's node. PACK then asks nothing more of Ray.
        strategy: how Ray lays out the bundles.
        selector: which nodes may be used if none are named.
    """
    selectors = [{"ray.io/node-id": node_id} for node_id in nodes] or [dict(selector or {})] * len(bundles)
    create = functools.partial(
        placement_group,
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        name=name,
        bundle_label_selector=selectors if any(selectors) else None,
    )
    return ask_head("create a placement group", create, undo=_remove_late)


def _remove_late(group: PlacementGroup) -> None:
    """Remove a group that was created after everybody had stopped waiting for it."""
    # If a group is removed while its node prepares a bundle, Ray may never free the bundle's resources: 3 of 40 times
    # with Ray 2.60 when the group was removed at once, never after this wait.
    group.wait(PLACING_S)
    remove_placement_group(group)


class Demand:
    """Unpinned groups that show an autoscaler what is missing, until there are nodes that could hold it.

    They are withdrawn before anything is planned, so that whatever Ray has placed for them is free again by then.
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
            name = unique_name(_prefix(self._name, ask))
            self._groups.append(create_group([ask.bundle] * ask.count, name, strategy=ask.strategy, selector=selector))

    def withdraw(self) -> None:
        """Remove the groups, and wait until they hold nothing. Can be repeated."""
        groups, self._groups = self._groups, []
        remove(groups)

    def __enter__(self) -> "Demand":
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()


def remove(groups: Sequence[PlacementGroup], *, timeout_s: float = 30.0) -> bool:
    """Remove placement groups and wait until Ray has their resources back. Does nothing if Ray has ended.

    Returns:
        Whether Ray had the resources within `timeout_s` seconds.

    Raises:
        HeadTimeoutError: Ray's head does not answer. The groups are removed in the background once it does.
    """
    if not groups or not ray.is_initialized():
        return True
    deadline = time.monotonic() + timeout_s
    ids = {group.id.hex() for group in groups}

    def are_returned() -> bool:
        # The tables show a group as removed before its node has the resources. The node shows them under its id.
        return not _rows(ids) and not any(_on(free) & ids for free in (free_per_node() or {}).values())

    # Nodes report the resources of a new group within a second.
    ask_head("remove placement groups", _remove, groups, connection(), min(deadline, time.monotonic() + 1.0))
    return _poll(lambda: ask_head("look whether placement groups are removed", are_returned), deadline)


def _remove(groups: Sequence[PlacementGroup], reserved_on: str, shown_by: float) -> None:
    """Remove groups, however long that takes. Groups are gone once their Ray is."""
    ids = {group.id.hex() for group in groups}
    try:
        # Nodes report with a delay. A group so young that they do not show it yet would look returned at once.
        _poll(lambda: _are_shown(ids), shown_by)
    finally:
        for group in groups:
            while connection() == reserved_on:
                try:
                    remove_placement_group(group)
                    break
                except (ray.exceptions.GetTimeoutError, ray.exceptions.RpcError):
                    time.sleep(1.0)  # Ray's own deadline for a head that does not answer


def _prefix(name: str, ask: Ask) -> str:
    return f"{name or 'fairlead'}-{ask.node_idx}"


def unique_name(name: str) -> str:
    """Return a name that no other group has, as Ray requires. It holds the id of this process unless it is the driver,
    so that node agents can remove the groups of a process that has ended."""
    return owned_name(name, "" if is_driver() else this_process())


def _rows(ids: AbstractSet[str]) -> list[dict[str, Any]]:
    """Return the rows of Ray's table for those of the groups that are not removed."""
    return [row for group_id, row in placement_group_table().items() if group_id in ids and row["state"] != "REMOVED"]


def _on(free: Mapping[str, float]) -> set[str]:
    """Return the ids of the groups of which a node shows resources, such as "CPU_group_0_<id>"."""
    return {name.rpartition("_")[2] for name in free if "_group_" in name}


def _are_shown(ids: AbstractSet[str]) -> bool:
    """Return whether the nodes show the resources of every group that is placed on nodes that are alive."""
    placed = [row for row in _rows(ids) if row["state"] == "CREATED"]
    free = free_per_node()
    if not placed or free is None:
        return True
    alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]}
    return all(
        row["placement_group_id"] in _on(free.get(node_id, {}))
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

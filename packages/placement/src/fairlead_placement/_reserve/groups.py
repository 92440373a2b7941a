# SPDX-License-Identifier: Apache-2.0
"""Creates the placement groups of a plan, waits for them, and removes them."""

import contextlib
import math
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from .._model import Node, Request
from .._nodes.head import ask_head, wait_until
from .._plan.planner import decide
from .._ray_private import connection, free_per_node
from ..exceptions import PlacementError, PlacementTimeoutError, ResourceInsufficientError

# Ray places groups one after the other, and a pinned group whose node has room within milliseconds. If it places none
# for so many seconds, and so many more for each bundle that is not placed, those that are left have lost a race.
PLACING_S = 1.0
BUNDLE_S = 0.01
# Up to so many groups are looked up one by one, and more of them in Ray's table, which lists every group since the
# cluster has started.
ASKED_ALONE = 16
# A bundle: the id of its node, and what it holds there.
Pinned = tuple[str, Mapping[str, float]]


@dataclass(frozen=True)
class Reserved:
    """A placement group that Ray has placed, with the logical node, the node id and the content of each bundle."""

    group: PlacementGroup
    node_idx: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: tuple[dict[str, float], ...]


Placed = tuple[Reserved, ...]


@dataclass(frozen=True)
class Busy:
    """Others hold what a request needs. The error is "Waited 1.0 s", then `why`, then the advice to wait longer."""

    why: str
    error: type[PlacementTimeoutError | ResourceInsufficientError] = PlacementTimeoutError


@dataclass(frozen=True)
class Impossible:
    """The nodes cannot hold a request, even when they are idle. The error consists of these sentences."""

    why: str
    advice: str


def place(request: Request, chosen: Mapping[int, tuple[str, ...]], *, deadline: float = math.inf) -> Placed | None:
    """Create the groups of a plan. Return None, with nothing left behind, if Ray cannot place them at once."""
    asks = request.asks
    parts = [
        [(ask.node_idx, node_id, dict(ask.bundle)) for ask in batch for node_id in chosen[ask.node_idx]]
        for batch in ([asks] if request.unified and asks else [(ask,) for ask in asks])
    ]
    prefix = request.name or "fairlead"
    wanted = {f"{prefix}-{part[0][0]}": [(node_id, bundle) for _, node_id, bundle in part] for part in parts}
    if (groups := place_pinned(wanted, deadline=deadline)) is None:
        return None
    return tuple(Reserved(group, *zip(*part, strict=True)) for group, part in zip(groups, parts, strict=True))


def place_pinned(
    wanted: Mapping[str, Sequence[Pinned]], *, deadline: float = math.inf
) -> tuple[PlacementGroup, ...] | None:
    """Create placement groups whose bundles are pinned to nodes.

    When a node is lost, Ray then parks its group: it does not look for another node, nor spin its scheduler.

    Args:
        wanted: the bundles of each group, by the prefix of the group's name. A bundle is the id of its node and what it
            holds there.
        deadline: as for `wait_placed`.

    Returns:
        The groups in this order, all placed; None, with nothing left behind, if Ray cannot place them at once.
    """
    made: list[PlacementGroup] = []
    placed: list[PlacementGroup] = []
    try:
        placed = create_pinned(wanted.items(), made, deadline=deadline)
    finally:
        if len(placed) < len(wanted):
            remove(made)
    return tuple(placed) if len(placed) == len(wanted) else None


def create_pinned(
    wanted: Collection[tuple[str, Sequence[Pinned]]], made: list[PlacementGroup], *, deadline: float
) -> list[PlacementGroup]:
    """Create pinned groups, and return those that Ray places. The caller removes those in `made`, which gets all."""
    options: list[dict[str, Any]] = [
        {
            "name": name,
            "bundles": [dict(bundle) for _, bundle in bundles],
            "bundle_label_selector": [{"ray.io/node-id": node_id} for node_id, _ in bundles],
        }
        for name, bundles in wanted
    ]
    try:
        for one in options:
            made.append(create_group(one))
    finally:
        # Also if it failed: Ray may never free the resources of a group that is removed while it is placed.
        placed = wait_placed(made, [len(one["bundles"]) for one in options[: len(made)]], deadline=deadline)
    return placed


def create_group(options: Mapping[str, Any]) -> PlacementGroup:
    """Create a placement group from Ray's options, without waiting until it is placed."""
    # Ray refuses a second group of one name.
    name = options["name"] and f"{options['name']}-{uuid.uuid4().hex[:8]}"
    return ask_head("create placement groups", lambda: placement_group(**{**options, "name": name}), undo=_remove_late)


def _remove_late(group: PlacementGroup) -> None:
    """Remove a group whose creation is not awaited any more."""
    # If a group is removed while its node prepares a bundle, Ray may never free the bundle's resources: 3 of 40 times
    # with Ray 2.60 when the group was removed immediately, never after this wait.
    try:
        wait_until(
            lambda: all(row["state"] == "CREATED" for row in _rows({group.id.hex()})), time.monotonic() + PLACING_S
        )
    finally:
        if (here := connection()) is not None:
            _remove([group], here, time.monotonic())


def wait_placed(
    groups: Sequence[PlacementGroup], sizes: Sequence[int], *, deadline: float = math.inf
) -> list[PlacementGroup]:
    """Return the groups that Ray has placed, once it has placed all or seems to place no more.

    `sizes` are the numbers of their bundles.
    """
    # A reservation that takes only what is free now (0 s) waits that long too.
    last = max(deadline, time.monotonic() + PLACING_S + BUNDLE_S * sum(sizes))
    waiting = {group.ready(): (group, size) for group, size in zip(groups, sizes, strict=True)}
    placed: set[Any] = set()
    pending = list(waiting)
    while pending:
        now = time.monotonic()
        patience = PLACING_S + min(BUNDLE_S * sum(waiting[ref][1] for ref in pending), max(0.0, deadline - now))
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=max(0.0, min(patience, last - now)))
        if not done:
            break
        for ref in done:
            with contextlib.suppress(ray.exceptions.RayError):  # it has been removed
                ray.get(ref)
                placed.add(waiting[ref][0].id)
    return [group for group in groups if group.id in placed]


def read_placed(groups: Sequence[PlacementGroup], *, deadline: float) -> Placed:
    """Return placement groups of others, in order, once Ray has placed all of them."""
    rows: list[dict[str, Any]] = []

    def are_placed() -> bool:
        rows[:] = ask_head("look at placement groups", lambda: [placement_group_table(group) for group in groups])
        if any(row.get("state", "REMOVED") == "REMOVED" for row in rows):
            raise PlacementError("A placement group has been removed, or is one of another cluster: create it again.")
        return all(row.get("state") == "CREATED" for row in rows)

    if not wait_until(are_placed, deadline):
        states = ", ".join(f"{row.get('name') or 'without a name'}: {row.get('state', 'unknown')}" for row in rows)
        raise PlacementTimeoutError(f"Ray has not placed all placement groups in time. Their states are: {states}.")
    return tuple(
        Reserved(
            group,
            (at,) * group.bundle_count,
            tuple(row["bundles_to_node_id"][index] for index in range(group.bundle_count)),
            tuple(group.bundle_specs),
        )
        for at, (group, row) in enumerate(zip(groups, rows, strict=True))
    )


def show_demand(request: Request, nodes: Sequence[Node]) -> list[PlacementGroup]:
    """Create one unpinned group that shows a request to an autoscaler, for removal before anything is placed."""
    asks, own = request.asks, request.unified or request.segment_size is not None
    # The first logical node without room has to be on a new node, so Ray places nothing of the group before one joins.
    # Otherwise requests that wait for the same node would take it from each other again and again.
    lacking = bisect_left(range(1, len(asks)), True, key=lambda n: decide(asks[:n], nodes, own_nodes=own)[0] is None)
    bundles, selectors = [], []
    for at, ask in enumerate(asks):
        pack = ask.strategy == "STRICT_PACK"
        whole = {name: amount * ask.count for name, amount in ask.bundle.items()}
        parts = [whole] if pack and len(asks) > 1 else [dict(ask.bundle)] * ask.count
        labels = {key: text.replace(" ", "") for key, text in ask.labels.items()}
        new = {"ray.io/node-id": f"!in({','.join(node.node_id for node in nodes)})"} if nodes and at == lacking else {}
        bundles += parts
        selectors += [{**(new if pack or part == 0 else {}), **labels} for part in range(len(parts))]
    strategy = asks[0].strategy if len(asks) == 1 else "STRICT_SPREAD" if own else "PACK"
    name = f"{request.name or 'fairlead'}-{asks[0].node_idx}"
    shown = {"name": name, "bundles": bundles, "strategy": strategy, "bundle_label_selector": selectors}
    return [create_group(shown)]


def remove(groups: Sequence[PlacementGroup], *, timeout_s: float = 30.0) -> bool:
    """Remove placement groups and wait until Ray has their resources back. Does nothing if Ray has ended.

    Args:
        groups: the placement groups.
        timeout_s: seconds to wait for the resources.

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

    # The request has a name of its own: if another removal waits for a silent head, this one must be sent too.
    others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    request = f"remove placement groups ({min(ids)[:8]}{others})"
    # Nodes report the resources of a new group within a second.
    ask_head(request, _remove, groups, connection(), min(deadline, time.monotonic() + 1.0))
    return wait_until(lambda: ask_head("look whether placement groups are removed", are_returned), deadline)


def _remove(groups: Sequence[PlacementGroup], reserved_on: object | None, shown_by: float) -> None:
    """Remove groups, however long that takes. Groups are gone once their Ray is."""
    ids = {group.id.hex() for group in groups}
    try:
        # Nodes report with a delay. A group so young that they do not show it yet would look returned at once.
        wait_until(lambda: are_shown(ids), shown_by)
    finally:
        for group in groups:
            while connection() == reserved_on:
                try:
                    remove_placement_group(group)
                    break
                except (ray.exceptions.GetTimeoutError, ray.exceptions.RpcError):
                    time.sleep(1.0)  # Ray's own deadline for a head that does not answer


@contextlib.contextmanager
def remove_on_error(groups: Callable[[], Sequence[PlacementGroup]]) -> Iterator[None]:
    """Remove the groups that a function returns if the block fails, also by an interrupt."""
    try:
        yield
    except BaseException:
        remove(groups())
        raise


def _rows(ids: AbstractSet[str]) -> list[dict[str, Any]]:
    """Return the rows of Ray's table for those of the groups that are not removed."""
    if len(ids) <= ASKED_ALONE:
        groups = (PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))) for group_id in ids)
        rows = [placement_group_table(group) for group in groups]
    else:
        rows = [row for group_id, row in placement_group_table().items() if group_id in ids]
    return [row for row in rows if row and row["state"] != "REMOVED"]


def _on(free: Mapping[str, float]) -> set[str]:
    """Return the ids of the groups of which a node shows resources, such as "CPU_group_0_<id>"."""
    return {name.rpartition("_")[2] for name in free if "_group_" in name}


def are_shown(ids: AbstractSet[str]) -> bool:
    """Return whether the nodes that are alive show the resources of every group that is placed on them."""
    # Each actor takes a thousandth of such a resource, so it is never used up and never absent.
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

# SPDX-License-Identifier: Apache-2.0
"""Creates the placement groups of a request, waits for them, and removes them."""

import contextlib
import functools
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from .._model import Request, Verdict
from .._nodes.head import alive_nodes, ask_head, wait_until
from .._ray_private import connection, free_per_node
from ..exceptions import PlacementError, PlacementTimeoutError

# Ray has at least so many seconds to place groups for which the nodes have room: a raylet may be busy.
PLACING_S = 30.0
# Nodes report the resources of a new group within this time, which is less than any request to the head gets.
SHOWN_S = 0.7
# A group that lacks room for this long has lost a race. Ray's own views of what is free differ for some moments.
NO_ROOM_S = 1.0
# For so long a group may lack room if an autoscaler may add nodes. It reads every few seconds which groups lack room.
DEMAND_S = 10.0
# What Ray reports of a group that it is about to place. In any other state it has found no room, and will try again.
_ON_ITS_WAY = ("QUEUED", "SCHEDULING_STARTED", "FINISHED")
# More groups than this are looked up in Ray's table, which lists every group since the cluster has started.
ASKED_ALONE = 16


@dataclass(frozen=True)
class Reserved:
    """A placement group that Ray has placed, with the logical node, the node id and the content of each bundle."""

    group: PlacementGroup
    node_idx: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: Sequence[dict[str, float]]


Placed = tuple[Reserved, ...]


@dataclass(frozen=True)
class Refusal:
    """A request has no room. `why` is a part of the error, in which "{holders}" stands for those who hold it."""

    why: str
    advice: str = ""
    verdict: Verdict = "taken"
    of_gpus: bool = False  # whether others hold exactly the GPUs that were named


def place(
    request: Request, plan: Mapping[int, tuple[str, ...]], *, deadline: float, room_s: float = NO_ROOM_S
) -> Placed | None:
    """Create the groups of a request. Return None, with nothing left behind, if Ray cannot place them.

    `plan` has the node ids of each logical node, and is empty if Ray chooses the nodes. The times are as for
    `create_groups`.
    """
    described: list[dict[str, Any]] = []
    numbers: list[tuple[int, ...]] = []
    for batch in [request.asks] if request.unified and request.asks else [(ask,) for ask in request.asks]:
        bundles = [(ask, index) for ask in batch for index in range(ask.count)]
        described.append(
            {
                "name": f"{request.name or 'fairlead'}-{batch[0].node_idx}",
                # When a node is lost, Ray parks a pinned group: it looks for no other node, nor spins its scheduler.
                "strategy": "PACK" if plan else batch[0].strategy,
                "bundles": [dict(ask.bundle) for ask, _ in bundles],
                "bundle_label_selector": [
                    {"ray.io/node-id": plan[ask.node_idx][index]} if plan else dict(ask.labels)
                    for ask, index in bundles
                ],
            }
        )
        numbers.append(tuple(ask.node_idx for ask, _ in bundles))
    placed = create_groups(described, deadline=deadline, room_s=room_s)
    if None in placed.values():
        remove(list(placed))
        return None
    parts = zip(placed.items(), numbers, described, strict=True)
    return tuple(Reserved(group, number, nodes or (), options["bundles"]) for (group, nodes), number, options in parts)


def create_groups(
    described: Sequence[Mapping[str, Any]], *, deadline: float, room_s: float = NO_ROOM_S
) -> dict[PlacementGroup, tuple[str, ...] | None]:
    """Create groups from Ray's options, and wait until Ray has placed all of them, or has found no room for one.

    Args:
        described: the options of each group.
        deadline: when to stop waiting, by `time.monotonic`; Ray always has `PLACING_S`, unless a group lacks room.
        room_s: how long a group may lack room.

    Returns:
        The node ids of the bundles of each group. They are None for one that Ray has not placed, which the caller
        removes. If this fails, all groups are removed.
    """
    made: list[PlacementGroup] = []
    try:
        for options in described:
            # Ray refuses a second group of one name.
            named = {**options, "name": options["name"] and f"{options['name']}-{uuid.uuid4().hex[:8]}"}
            create = functools.partial(placement_group, **named)
            made.append(ask_head("create placement groups", create, undo=_remove_late))
        # Ray places a group within two milliseconds, and a look takes one.
        last, pause, lacking_since = max(deadline, time.monotonic() + PLACING_S), 0.0015, math.inf
        ids = {group.id.hex() for group in made}
        placed: dict[str, tuple[str, ...]] = {}
        while pending := ids - placed.keys():
            time.sleep(pause)
            lacks_room = False
            rows = {row["placement_group_id"]: row for row in ask_head("look at placement groups", _rows, pending)}
            for group_id in pending:
                row = rows.get(group_id)
                if row is not None and row["state"] == "CREATED":
                    placed[group_id] = tuple(row["bundles_to_node_id"][index] for index in range(len(row["bundles"])))
                else:
                    lacks_room |= row is None or row["stats"]["scheduling_state"] not in _ON_ITS_WAY
            lacking_since = min(lacking_since, time.monotonic()) if lacks_room else math.inf
            if time.monotonic() >= min(last, lacking_since + room_s):
                break
            pause = min(1.5 * pause, 0.25)
    except BaseException:
        remove(made)
        raise
    return {group: placed.get(group.id.hex()) for group in made}


def _remove_late(group: PlacementGroup) -> None:
    """Remove a group whose creation is not awaited any more."""
    _remove([group], connection(), time.monotonic() + PLACING_S)


def read_placed(groups: Sequence[PlacementGroup], *, deadline: float) -> Placed:
    """Return placement groups, in order, once Ray has placed all of them on nodes that are alive."""
    rows: list[dict[str, Any]] = []

    def are_placed() -> bool:
        rows[:] = ask_head("look at placement groups", lambda: [placement_group_table(group) for group in groups])
        if any(row.get("state", "REMOVED") == "REMOVED" for row in rows):
            raise PlacementError("A placement group has been removed, or is one of another cluster: create it again.")
        used = {node_id for row in rows for node_id in row["bundles_to_node_id"].values()}
        return all(row.get("state") == "CREATED" for row in rows) and used <= alive_nodes()

    if not wait_until(are_placed, deadline):
        states = ", ".join(f"{row.get('name') or 'without a name'}: {row.get('state', 'unknown')}" for row in rows)
        raise PlacementTimeoutError(f"Ray has not placed all placement groups in time. Their states are: {states}.")
    placed = []
    for number, (group, row) in enumerate(zip(groups, rows, strict=True)):
        # The group itself would ask Ray's head for its bundles again, without a deadline.
        indices = range(len(row["bundles"]))
        node_ids = tuple(row["bundles_to_node_id"][index] for index in indices)
        bundles = tuple(row["bundles"][index] for index in indices)
        placed.append(Reserved(group, (number,) * len(bundles), node_ids, bundles))
    return tuple(placed)


def remove(groups: Sequence[PlacementGroup], *, timeout_s: float = 30.0) -> bool:
    """Remove placement groups, and return whether Ray had their resources back within `timeout_s` seconds.

    Does nothing if Ray has ended.

    Raises:
        HeadTimeoutError: Ray's head does not answer. The groups are removed in the background once it does.
    """
    if not groups or not ray.is_initialized():
        return True
    deadline = time.monotonic() + timeout_s
    ids = {group.id.hex() for group in groups}

    def are_returned() -> bool:
        # The tables show a group as removed before its node has the resources. The node shows them under its id.
        return not _rows(ids) and not any(_on(free) & ids for free in free_per_node().values())

    # The request has a name of its own: if another removal waits for a silent head, this one must be sent too.
    others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    request = f"remove placement groups ({min(ids)[:8]}{others})"
    ask_head(request, _remove, groups, connection(), min(deadline, time.monotonic() + SHOWN_S))
    return wait_until(lambda: ask_head("look whether placement groups are removed", are_returned), deadline)


def _remove(groups: Sequence[PlacementGroup], reserved_on: object | None, shown_by: float) -> None:
    """Remove groups, however long that takes. Groups are gone once their Ray is."""
    ids = {group.id.hex() for group in groups}
    try:
        # Nodes report with a delay. A group so young that they do not show it yet would look returned at once. If it is
        # removed while its node prepares a bundle, Ray (2.60) may never free the bundle's resources.
        wait_until(lambda: are_shown(ids), shown_by)
    finally:
        for group in groups:
            while reserved_on is not None and connection() == reserved_on:
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
        rows = [placement_group_table(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))) for group_id in ids]
    else:
        rows = [row for group_id, row in placement_group_table().items() if group_id in ids]
    return [row for row in rows if row and row["state"] != "REMOVED"]


def _on(free: Mapping[str, float]) -> set[str]:
    """Return the ids of the groups of which a node shows resources, such as "CPU_group_0_<id>"."""
    return {name.rpartition("_")[2] for name in free if "_group_" in name}


def are_shown(ids: AbstractSet[str]) -> bool:
    """Return whether the nodes that are alive show the resources of all groups that Ray has placed or is placing."""
    rows = _rows(ids)
    if any(row["stats"]["scheduling_state"] == "QUEUED" for row in rows):
        return False
    # Each actor takes a thousandth of such a resource, so it is never used up and never absent.
    placed = [row for row in rows if row["state"] == "CREATED"]
    free, alive = free_per_node(), {row["NodeID"] for row in ray.nodes() if row["Alive"]}
    return all(
        row["placement_group_id"] in _on(free.get(node_id, {}))
        for row in placed
        for node_id in alive.intersection(row["bundles_to_node_id"].values())
    )

# SPDX-License-Identifier: Apache-2.0
"""From a plan to placement groups that Ray has placed, or an error and nothing left behind."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from rich.console import Console
from rich.text import Text

from ._inventory import read_holders, read_nodes
from ._planner import Ask, Node, never_fits, plan
from ._ray_private import free_per_node
from ._report import Report
from .exceptions import PlacementTimeoutError, ResourceInsufficientError

__all__ = ["Reserved", "remove", "reserve"]

# A pinned group whose node has room is placed within milliseconds. One that is not has lost a race.
PLACING_S = 1.0
POLL_S = (0.05, 0.5)


@dataclass(frozen=True)
class Reserved:
    """A placement group that Ray has placed: its bundles' logical nodes, node ids and contents, by bundle index."""

    group: PlacementGroup
    node_idx: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: tuple[dict[str, float], ...]


def reserve(
    asks: Sequence[Ask], *, name: str, unified: bool, timeout_s: float, wait_for_nodes_s: float
) -> tuple[Reserved, ...]:
    """Reserve every ask: one group each, or one group in all.

    Raises:
        ResourceInsufficientError: the nodes cannot hold it even when idle, also after `wait_for_nodes_s`.
        PlacementTimeoutError: they could, but not within `timeout_s`.
    """
    began = time.monotonic()
    with _Waiting(name) as waiting:
        pause = POLL_S[0]
        while True:
            nodes = read_nodes()
            waited = time.monotonic() - began
            if never_fits(asks, nodes, own_nodes=unified):
                limit = wait_for_nodes_s
                if waited >= limit:
                    raise ResourceInsufficientError(_insufficient(asks, unified, waited), _report(asks, nodes))
                waiting.show(f"waiting for nodes to join, at most {limit:g} s")
            else:
                limit = timeout_s
                chosen = plan(asks, nodes, own_nodes=unified)
                if chosen is not None:
                    placed = _place(asks, chosen, name=name, unified=unified)
                    if placed is not None:
                        return placed
                if waited >= limit:
                    raise PlacementTimeoutError(
                        f"Waited {waited:.1f} s: the request would fit on these nodes, but others hold what it needs "
                        "(see below). Release some of it, or wait longer (reserve_timeout_s).",
                        _report(asks, nodes),
                    )
                waiting.show(f"waiting for resources that others hold, at most {limit:g} s")
            time.sleep(max(0.0, min(pause, began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def remove(groups: Sequence[PlacementGroup], *, timeout_s: float = 30.0) -> bool:
    """Remove groups and wait until Ray has the resources back; False if that took longer than `timeout_s`."""
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


def _place(
    asks: Sequence[Ask], chosen: dict[int, tuple[str, ...]], *, name: str, unified: bool
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
                # Ray refuses a second group of one name.
                name=f"{name or 'fairlead'}-{batch[0].node_idx}-{uuid.uuid4().hex[:8]}",
                # Pinned: a lost node then leaves the group parked instead of spinning the scheduler.
                bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
            )
            made.append(Reserved(group, node_idx, node_ids, bundles))
        deadline = time.monotonic() + PLACING_S
        # wait() takes whole seconds. One call each is enough: all groups are being placed meanwhile.
        if all(one.group.wait(1 if time.monotonic() < deadline else 0) for one in made):
            return tuple(made)
    except BaseException:
        _discard(made)
        raise
    _discard(made)
    return None


def _discard(made: Sequence[Reserved]) -> None:
    if ray.is_initialized():
        remove([one.group for one in made])


def _shown(group: PlacementGroup) -> bool:
    """Whether the nodes of a group show its resources; also True when it has not been placed, so they never will."""
    row = placement_group_table(group)
    if row.get("state") != "CREATED":
        return True
    free = free_per_node()
    nodes = set(row["bundles_to_node_id"].values())
    return all(any(group.id.hex() in name for name in free.get(node_id, {})) for node_id in nodes)


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    pause = 0.002
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


def _report(asks: Sequence[Ask], nodes: Sequence[Node]) -> Report:
    return Report(tuple(asks), tuple(nodes), read_holders())


def _insufficient(asks: Sequence[Ask], unified: bool, waited: float) -> str:
    bundles = sum(ask.count for ask in asks)
    own = ", each logical node on a physical node of its own" if unified else ""
    after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
    return (
        f"The cluster cannot hold {bundles} bundles in {len(asks)} logical node(s){own}, even when it is idle "
        f"(see below).{after} Ask for less, add nodes, or wait for nodes that are joining (wait_for_nodes_s)."
    )


class _Waiting:
    """A status line on the terminal once something takes over a second."""

    def __init__(self, name: str) -> None:
        self._name = name or "cluster"
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._shown = False

    def show(self, what: str) -> None:
        waited = time.monotonic() - self._began
        if waited < 1 or not self._console.is_terminal:
            return
        # As Text: what looks like markup in a name is not.
        self._status.update(Text(f"Reserving {self._name}: {what}, {waited:.0f} s so far"))
        if not self._shown:
            self._status.start()
            self._shown = True

    def __enter__(self) -> "_Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._status.stop()

# SPDX-License-Identifier: Apache-2.0
"""Which node each bundle goes to: pure functions of what is asked and what is there.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["STRATEGIES", "Ask", "Node", "Strategy", "physical_order", "plan"]

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
PRECISION = 10_000


@dataclass(frozen=True)
class Node:
    """A node as the planner sees it. Resources that are used up may be absent from `free`."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Ask:
    """`count` bundles of one kind for one logical node."""

    node_idx: int
    count: int
    bundle: Mapping[str, float]
    strategy: Strategy = "STRICT_PACK"

    @property
    def shape(self) -> tuple[object, ...]:
        """Asks of one shape are interchangeable."""
        return (self.count, tuple(sorted(self.bundle.items())), self.strategy)


def physical_order(node: Node) -> tuple[str, int, str]:
    """Sort key of a node: topology domain, rank in the domain, node id.

    Domain and rank are the labels `ray.io/gpu-domain` and `fairlead.io/topo-rank`, or else the custom resources
    `nvlink_domain_<id>` and `topo_rank`. Nodes without a domain come first. The node id breaks every tie, so the
    slots of two nodes never interleave.
    """
    domain = node.labels.get("ray.io/gpu-domain")
    if domain is None:
        prefix = "nvlink_domain_"
        domain = min((name.removeprefix(prefix) for name in node.total if name.startswith(prefix)), default="")
    rank = node.labels.get("fairlead.io/topo-rank", node.total.get("topo_rank", 0))
    try:
        return domain, int(float(rank)), node.node_id
    except (ValueError, OverflowError):
        raise ValueError(f"label fairlead.io/topo-rank of node {node.node_id} must be a number, got {rank!r}") from None


def plan(
    asks: Sequence[Ask], nodes: Sequence[Node], *, idle: bool = False, own_nodes: bool = False
) -> dict[int, tuple[str, ...]] | None:
    """Choose a node for every bundle.

    Args:
        asks: what is wanted, at most one entry per logical node.
        nodes: what is there, in physical order.
        idle: plan as if nothing ran on the nodes; tells "taken" from "can never fit".
        own_nodes: never put two logical nodes on one physical node.

    Returns:
        For each `node_idx` the node id of each of its bundles, in physical order; None if it does not fit.

    Logical nodes get physical nodes of their own in the order asked, if that fits; else the largest ask takes the
    tightest node that is still unused; else (unless `own_nodes`) logical nodes share physical ones. Asks of one
    shape are then handed out in physical order, so logical order follows physical order.
    """
    for attempt in (_in_order, _tightest_first) if own_nodes else (_in_order, _tightest_first, _sharing):
        room = {node.node_id: _Room(node.total if idle else node.free) for node in nodes}
        chosen = attempt(asks, room)
        if chosen is not None:
            return _by_shape(asks, chosen, {node.node_id: at for at, node in enumerate(nodes)})
    return None


class _Room:
    """What is left of a node while a plan is being made."""

    def __init__(self, resources: Mapping[str, float]) -> None:
        self.left = {name: round(amount * PRECISION) for name, amount in resources.items()}

    def holds(self, bundle: Mapping[str, float]) -> int:
        """How many such bundles fit."""
        return min(
            (self.left.get(name, 0) // round(amount * PRECISION) for name, amount in bundle.items() if amount > 0),
            default=0,
        )

    def take(self, bundle: Mapping[str, float], count: int = 1) -> None:
        for name, amount in bundle.items():
            if amount > 0:
                self.left[name] -= count * round(amount * PRECISION)


Rooms = dict[str, _Room]
Chosen = dict[int, tuple[str, ...]]


def _in_order(asks: Sequence[Ask], rooms: Rooms) -> Chosen | None:
    """Each ask, as it comes, on the first nodes nobody else in this plan uses."""
    unused = dict(rooms)
    # A node too small for a shape stays too small for it: every shape walks the nodes once.
    walks: dict[object, Iterator[str]] = {}
    chosen: Chosen = {}
    for ask in asks:
        if ask.strategy == "STRICT_PACK":
            walk = walks.setdefault(ask.shape, iter(list(rooms)))
            node = next((n for n in walk if n in unused and unused[n].holds(ask.bundle) >= ask.count), None)
            picked = None if node is None else (node,) * ask.count
        else:
            picked = _spread(ask, unused)
        if picked is None:
            return None
        chosen[ask.node_idx] = picked
        for node_id in picked:
            unused.pop(node_id, None)
    return chosen


def _tightest_first(asks: Sequence[Ask], rooms: Rooms) -> Chosen | None:
    """The largest ask first, on the unused node that it fills best."""
    if all(ask.strategy == "STRICT_PACK" for ask in asks):
        return _matched(asks, rooms)
    return _largest_first(asks, rooms, share=False)


def _sharing(asks: Sequence[Ask], rooms: Rooms) -> Chosen | None:
    return _largest_first(asks, rooms, share=True)


def _matched(asks: Sequence[Ask], rooms: Rooms) -> Chosen | None:
    """A node of its own for each ask, found whenever there is such a plan.

    Largest first is not enough where bundles differ: an ask may take the only node that has what a smaller one needs.
    It then moves on. (This is bipartite matching by augmenting paths, searched by shape, of which there are few.)
    """
    fitting: dict[object, list[str]] = {}
    for ask in asks:
        if ask.shape not in fitting:
            holds = {node_id: room.holds(ask.bundle) for node_id, room in rooms.items()}
            # A stable sort: ties go by physical order.
            fitting[ask.shape] = sorted((n for n in holds if holds[n] >= ask.count), key=holds.__getitem__)
    unused = {shape: nodes[::-1] for shape, nodes in fitting.items()}
    owner: dict[str, Ask] = {}
    for ask in sorted(asks, key=lambda ask: (-ask.count, ask.node_idx)):
        paths: deque[tuple[object, tuple[str, ...]]] = deque([(ask.shape, ())])
        seen = {ask.shape}
        while paths:
            shape, path = paths.popleft()
            while unused[shape] and unused[shape][-1] in owner:
                unused[shape].pop()  # a node that is taken may change hands, but stays taken
            if unused[shape]:
                break
            for node_id in fitting[shape]:
                if (other := owner[node_id].shape) not in seen:
                    seen.add(other)
                    paths.append((other, (*path, node_id)))
        else:
            return None
        mover: Ask | None = ask
        for node_id in (*path, unused[shape][-1]):
            assert mover is not None
            owner[node_id], mover = mover, owner.get(node_id)
    return {ask.node_idx: (node_id,) * ask.count for node_id, ask in owner.items()}


def _largest_first(asks: Sequence[Ask], rooms: Rooms, *, share: bool) -> Chosen | None:
    """The largest ask first; one that needs a single node on the node that it fills best."""
    unused = dict(rooms)
    chosen: Chosen = {}
    for ask in sorted(asks, key=lambda ask: (-ask.count, ask.node_idx)):
        if ask.strategy == "STRICT_PACK":
            fitting = [(room.holds(ask.bundle), n) for n, room in unused.items()]
            # min() keeps the first of equals: ties go by physical order.
            tightest = min((f for f in fitting if f[0] >= ask.count), key=lambda f: f[0], default=None)
            picked = None if tightest is None else (tightest[1],) * ask.count
        else:
            # Shared nodes are used up evenly: STRICT_SPREAD needs many with a little room, not few with much.
            picked = _spread(ask, unused, roomiest=share)
        if picked is None:
            return None
        chosen[ask.node_idx] = picked
        for node_id in dict.fromkeys(picked):
            if share:
                unused[node_id].take(ask.bundle, picked.count(node_id))
            else:
                del unused[node_id]
    return chosen


def _spread(ask: Ask, rooms: Rooms, *, roomiest: bool = False) -> tuple[str, ...] | None:
    """Nodes for the strategies that may use several of them for one logical node, in physical order."""
    fits = {node_id: n for node_id, room in rooms.items() if (n := room.holds(ask.bundle)) > 0}
    if roomiest:
        fits = dict(sorted(fits.items(), key=lambda fit: -fit[1]))
    if ask.strategy == "PACK":
        single = [node_id for node_id, n in fits.items() if n >= ask.count]
        # One node if one will do, else as few as possible: the roomiest first.
        order: Iterable[str] = single[:1] or sorted(fits, key=lambda node_id: -fits[node_id])
        counts: dict[str, int] = {}
        missing = ask.count
        for node_id in order:
            counts[node_id] = min(missing, fits[node_id])
            missing -= counts[node_id]
        counts = {node_id: n for node_id, n in counts.items() if n > 0}
    else:
        rounds = 1 if ask.strategy == "STRICT_SPREAD" else ask.count
        counts = {}
        missing = ask.count
        for turn in range(rounds):
            takers = [node_id for node_id, n in fits.items() if n > turn][:missing]
            if not takers:
                break
            for node_id in takers:
                counts[node_id] = counts.get(node_id, 0) + 1
            missing -= len(takers)
    if missing:
        return None
    return tuple(node_id for node_id in rooms for _ in range(counts.get(node_id, 0)))


def _by_shape(asks: Sequence[Ask], chosen: Chosen, position: Mapping[str, int]) -> Chosen:
    """Hand the nodes found for each shape out in physical order."""
    shapes: dict[object, list[int]] = {}
    for ask in asks:
        shapes.setdefault(ask.shape, []).append(ask.node_idx)
    ordered: Chosen = {}
    for members in shapes.values():
        found = sorted((chosen[m] for m in members), key=lambda ids: [position[node_id] for node_id in ids])
        ordered.update(zip(sorted(members), found, strict=True))
    return {ask.node_idx: ordered[ask.node_idx] for ask in asks}

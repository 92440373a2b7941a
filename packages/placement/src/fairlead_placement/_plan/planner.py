# SPDX-License-Identifier: Apache-2.0
"""Decides which node each logical node goes to, from what is requested and what is there.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3. Logical nodes of the same
shape are interchangeable. So the work grows with the number of nodes times that of shapes, not of logical nodes.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._model import PRECISION, Ask, Node, Verdict, group_pairs
from .topology import node_place

# By logical node, its node as a number in physical order.
Places = dict[int, int]
Amounts = tuple[int, ...]


def decide(
    asks: Sequence[Ask], nodes: Sequence[Node], own_nodes: bool = False, segment_size: int | None = None
) -> tuple[dict[int, tuple[str, ...]] | None, Verdict]:
    """Place requests of one strategy, with one label selector, on nodes in physical order, by what is free there.

    If possible, logical nodes get physical nodes of their own in the requested order. If not, the largest takes the
    tightest node that is still unused. If that fails too, logical nodes share physical nodes, the largest first. No
    choice is revised, so uneven requests may have an arrangement that is not found.

    Returns the plan and the verdict, as in `ReservationReport`; the plan is None unless the verdict is "fits".

    With `own_nodes`, no two logical nodes share a physical node. With `segment_size`, each group of that many logical
    nodes, by number, is on physical nodes of its own in one topology domain. The verdict is "taken" if there is a plan
    for the nodes when nothing runs on them, else "impossible".
    """
    own_nodes = own_nodes or segment_size is not None
    if asks and asks[0].labels:
        nodes = usable(asks, nodes)
    plan = Site(asks, nodes, False, own_nodes).make_plan(segment_size)
    if plan is not None:
        return plan, "fits"
    is_taken = is_in_use(asks, nodes) and Site(asks, nodes, True, own_nodes).make_plan(segment_size) is not None
    return None, "taken" if is_taken else "impossible"


def is_in_use(asks: Sequence[Ask], nodes: Sequence[Node]) -> bool:
    """Return whether anything that the requests need is in use on a node that they may use."""
    names = {name for ask in asks for name in ask.bundle}
    pairs = ((node, name) for node in usable(asks, nodes) for name in names)
    return any(node.free.get(name, 0.0) < node.total.get(name, 0.0) for node, name in pairs)


def usable(asks: Sequence[Ask], nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with the labels that the requests, which all have the same ones, need."""
    return [node for node in nodes if not asks or asks[0].labels.items() <= node.labels.items()]


@dataclass(frozen=True, eq=False)
class Shape:
    """Interchangeable requests, with amounts as the planner counts them.

    A unit is what has to be on one node: the whole logical node, or a bundle if Ray may spread these.
    """

    unit: Amounts
    units: int  # of a logical node
    apart: bool  # whether no two units of a logical node share a node
    fits: list[int]  # how many units each node holds


class Site:
    """The requests by shape, and the nodes by what they have for those: all of it if `idle`, else what is free."""

    def __init__(self, asks: Sequence[Ask], nodes: Sequence[Node], idle: bool, own_nodes: bool) -> None:
        self.asks = sorted(asks, key=operator.attrgetter("node_idx"))
        self.nodes, self.own_nodes = nodes, own_nodes
        shapes: dict[object, list[Ask]] = {}
        for ask in self.asks:
            shapes.setdefault((ask.count, *sorted(ask.bundle.items())), []).append(ask)
        alike = list(shapes.values())
        held = [item for ask, *_ in alike for item in ask.bundle.items()]
        names = sorted({name for name, amount in held if round(amount * PRECISION)})
        amounts = [node.total if idle else node.free for node in nodes]
        self.room: list[Amounts] = [tuple([round(has.get(n, 0) * PRECISION) for n in names]) for has in amounts]
        self.shape_of: dict[int, Shape] = {}
        for ask, *others in alike:
            is_whole = ask.strategy == "STRICT_PACK"
            unit = tuple(round(ask.bundle.get(n, 0) * PRECISION) * (ask.count if is_whole else 1) for n in names)
            sizes = [(resource, n) for resource, n in enumerate(unit) if n]
            known = {has: min((has[resource] // n for resource, n in sizes), default=0) for has in set(self.room)}
            fits = [known[has] for has in self.room]
            shape = Shape(unit, 1 if is_whole else ask.count, ask.strategy == "STRICT_SPREAD", fits)
            self.shape_of.update(dict.fromkeys((ask.node_idx, *(other.node_idx for other in others)), shape))

    def make_plan(self, segment_size: int | None) -> dict[int, tuple[str, ...]] | None:
        """Return the node ids of each logical node; nothing if Ray chooses them; None if no plan is found."""
        everywhere = range(len(self.nodes))
        if any(ask.strategy != "STRICT_PACK" for ask in self.asks):
            return None if self._lacks_room() else {}
        if segment_size is not None:
            places = self._place_in_segments(segment_size)
        else:
            places = self._place_apart(self.asks, everywhere)
            if places is None and not self.own_nodes:
                places = self._place_largest_first(self.asks, everywhere, shared=True)
        if places is None:
            return None
        return {ask.node_idx: (self.nodes[places[ask.node_idx]].node_id,) * ask.count for ask in self.asks}

    def _lacks_room(self) -> bool:
        """Return whether the nodes that hold a unit of some shape prove that they lack room for it."""
        counts = Counter(self.shape_of[ask.node_idx] for ask in self.asks)
        for shape, number in counts.items():
            most = number if shape.apart else shape.units * number
            if shape.units * number > sum(min(count, most) for count in shape.fits):
                return True
        return False

    def _place_apart(self, asks: Sequence[Ask], positions: Sequence[int]) -> Places | None:
        """Place each logical node on a node of its own: in order on the first one, or else the largest first."""
        places: Places = {}
        used: set[int] = set()
        # A node that is too small for a shape stays so, and a used node stays used. So each shape walks the nodes once.
        walks: dict[Shape, Iterator[int]] = {}
        for ask in asks:
            shape = self.shape_of[ask.node_idx]
            for position in walks.setdefault(shape, iter(positions)):
                if shape.fits[position] and position not in used:
                    used.add(position)
                    places[ask.node_idx] = position
                    break
            else:
                return self._place_largest_first(asks, positions, shared=False)
        return places

    def _place_largest_first(self, asks: Sequence[Ask], positions: Sequence[int], *, shared: bool) -> Places | None:
        """Place each logical node, the largest first, on the tightest node that has room, or that no other one uses."""
        members = group_pairs((self.shape_of[ask.node_idx], ask.node_idx) for ask in asks)
        room = {position: self.room[position] for position in positions}
        places: Places = {}
        for shape in sorted(members, key=operator.attrgetter("unit"), reverse=True):
            holds = {
                position: min((has // n for has, n in zip(left, shape.unit, strict=True) if n), default=0)
                for position, left in room.items()
                if shape.fits[position]
            }
            picked: list[int] = []
            for position in sorted(holds, key=lambda position: (room[position], position)):
                if len(picked) == len(members[shape]):
                    break
                taken = min(holds[position] if shared else 1, len(members[shape]) - len(picked))
                picked += [position] * taken
                left = room.pop(position)
                if shared:
                    room[position] = tuple([has - taken * n for has, n in zip(left, shape.unit, strict=True)])
            if len(picked) < len(members[shape]):
                return None
            places.update(zip(members[shape], sorted(picked), strict=True))
        return places

    def _place_in_segments(self, segment_size: int) -> Places | None:
        """Place the requests in groups of this many, the largest first, each in the first domain that has room."""

        def need(block: Sequence[Ask]) -> list[list[int]]:
            return sorted([-n for n in self.shape_of[ask.node_idx].unit] for ask in block)

        blocks = [self.asks[start : start + segment_size] for start in range(0, len(self.asks), segment_size)]
        places: Places = {}
        domain_of = ((node_place(node)[0], position) for position, node in enumerate(self.nodes))
        domains = [*group_pairs((domain, position) for domain, position in domain_of if domain).values()]
        first, before = 0, None
        for needed, block in sorted([(need(block), block) for block in blocks], key=operator.itemgetter(0)):
            # A domain that lacks room for a group stays so for all groups like it.
            first, before = (first if needed == before else 0), needed
            for index in range(first, len(domains)):
                if (inside := self._place_apart(block, domains[index])) is not None:
                    break
            else:
                return None
            places |= inside
            first, taken = index, set(inside.values())
            domains[index] = [position for position in domains[index] if position not in taken]
        return places

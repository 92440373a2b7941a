# SPDX-License-Identifier: Apache-2.0
"""Decides which node each logical node goes to, from what is requested and what is there.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3. Nodes that have the same
amounts are of one kind, and logical nodes of the same size are interchangeable. So the work grows with the number of
nodes and with the number of sizes, not with their product with the logical nodes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from .._model import PRECISION, Ask, Node, Verdict, group_pairs, matches
from .topology import node_place

# By logical node, its node as a number in physical order.
Places = dict[int, int]
Amounts = tuple[int, ...]


class Decision(NamedTuple):
    """Whether a request fits.

    Attributes:
        plan: by logical node, the node id of each of its bundles; None unless the verdict is "fits", and empty if Ray
            chooses the nodes.
        verdict: as in `ReservationReport`.
    """

    plan: dict[int, tuple[str, ...]] | None
    verdict: Verdict


def decide(
    asks: Sequence[Ask], nodes: Sequence[Node], *, own_nodes: bool = False, segment_size: int | None = None
) -> Decision:
    """Place requests of one strategy on nodes in physical order, by what is free there.

    If possible, logical nodes get physical nodes of their own in the requested order. If not, the largest takes the
    tightest node that is still unused. If that fails too, logical nodes share physical nodes, the largest first. No
    choice is revised, so uneven requests may have an arrangement that is not found.

    Args:
        asks: the requests. Ray chooses the nodes of those whose strategy is not STRICT_PACK.
        nodes: the nodes.
        own_nodes: whether no two logical nodes share a physical node.
        segment_size: place the complete groups of that many logical nodes, by number, on physical nodes of their own in
            one topology domain each.

    Returns:
        The plan and the verdict. It is "impossible" only if totals or the largest requests prove that, and "taken" only
        if there is a plan for the nodes when nothing runs on them.
    """
    own_nodes = own_nodes or segment_size is not None
    free = Site(asks, nodes, False, own_nodes)
    plan = free.make_plan(segment_size)
    if plan is not None:
        return Decision(plan, "fits")
    idle = Site(asks, nodes, True, own_nodes) if is_in_use(asks, nodes) else free
    if idle.is_impossible(segment_size):
        return Decision(None, "impossible")
    return Decision(None, "taken" if idle is not free and idle.make_plan(segment_size) is not None else "not found")


def is_in_use(asks: Sequence[Ask], nodes: Sequence[Node]) -> bool:
    """Return whether anything that the requests need is in use on a node that they may use."""
    names = {name for ask in asks for name in ask.bundle}
    selectors = list({tuple(ask.labels.items()): ask.labels for ask in asks}.values())
    return any(
        node.free.get(name, 0.0) < node.total.get(name, 0.0)
        for node in nodes
        if any(matches(selector, node.labels) for selector in selectors)
        for name in names
    )


@dataclass(frozen=True, eq=False)
class Shape:
    """Interchangeable requests, with amounts as the planner counts them.

    A unit is what has to be on one node: the whole logical node, or a bundle if Ray may spread these.
    """

    unit: Amounts
    selector: int
    units: int  # of a logical node
    apart: bool  # whether no two units of a logical node share a node
    fits: list[int]  # how many units a node of each kind holds


class Site:
    """The requests by shape, and the nodes by what they have for those: all of it if `idle`, else what is free."""

    def __init__(self, asks: Sequence[Ask], nodes: Sequence[Node], idle: bool, own_nodes: bool) -> None:
        self.asks = sorted(asks, key=attrgetter("node_idx"))
        self.nodes, self.own_nodes = nodes, own_nodes
        alike = list(group_pairs((ask.shape, ask) for ask in self.asks).values())
        held = [item for ask, *_ in alike for item in ask.bundle.items()]
        names = sorted({name for name, amount in held if round(amount * PRECISION)})
        selectors = list({tuple(sorted(ask.labels.items())): ask.labels for ask, *_ in alike}.values())
        numbers: dict[object, int] = {}
        # What a node of each kind has, and which selectors it matches; and the kind of each node.
        self.kinds: list[tuple[Amounts, tuple[bool, ...]]] = []
        self.kind_of: list[int] = []
        plain = (True,) * len(selectors) if not any(selectors) else None
        for node in nodes:
            has = node.total if idle else node.free
            matched = plain or tuple([matches(selector, node.labels) for selector in selectors])
            seen = (tuple(map(has.get, names)), matched)
            number = numbers.setdefault(seen, len(numbers))
            if number == len(self.kinds):
                self.kinds.append((tuple(round((amount or 0) * PRECISION) for amount in seen[0]), matched))
            self.kind_of.append(number)
        self.shape_of: dict[int, Shape] = {}
        for ask, *others in alike:
            is_whole = ask.strategy == "STRICT_PACK"
            unit = tuple(round(ask.bundle.get(n, 0) * PRECISION) * (ask.count if is_whole else 1) for n in names)
            selector = selectors.index(ask.labels)
            fits = [_count_units(amounts, unit) if matched[selector] else 0 for amounts, matched in self.kinds]
            shape = Shape(unit, selector, 1 if is_whole else ask.count, ask.strategy == "STRICT_SPREAD", fits)
            self.shape_of.update(dict.fromkeys((ask.node_idx, *(one.node_idx for one in others)), shape))

    def make_plan(self, segment_size: int | None) -> dict[int, tuple[str, ...]] | None:
        """Return the node ids of each logical node; nothing if Ray chooses them; None if no plan is found."""
        everywhere = range(len(self.nodes))
        if any(ask.strategy != "STRICT_PACK" for ask in self.asks):
            return None if self._lacks_room(self._count(self.asks), everywhere) else {}
        if segment_size is not None:
            found = self._place_in_segments(segment_size)
        else:
            found = self._place_apart(self.asks, everywhere)
            if found is None and not self.own_nodes:
                found = self._place_together()
        if found is None:
            return None
        return {ask.node_idx: (self.nodes[found[ask.node_idx]].node_id,) * ask.count for ask in self.asks}

    def is_impossible(self, segment_size: int | None) -> bool:
        """Return whether it is proven that there is no arrangement."""
        if segment_size is None:
            return self._lacks_room(self._count(self.asks), range(len(self.nodes)))
        domains, blocks = self._domains(), self._blocks(segment_size)
        inside = [at for positions in domains for at in positions]
        room = sum(len(positions) // segment_size for positions in domains)
        return (
            room * segment_size < len(self.asks)
            or self._lacks_room(self._count(self.asks), inside)
            or any(all(self._lacks_room(Counter(kind), positions) for positions in domains) for kind in blocks)
        )

    def _count(self, asks: Sequence[Ask]) -> Counter[Shape]:
        return Counter(self.shape_of[ask.node_idx] for ask in asks)

    def _lacks_room(self, counts: Mapping[Shape, int], positions: Sequence[int]) -> bool:
        """Return whether totals, or the units that are as large as those of a shape, prove that the nodes lack room."""
        nodes = Counter(self.kind_of[at] for at in positions)
        for shape in counts:
            larger = [one for one in counts if one.selector == shape.selector and _covers(one.unit, shape.unit)]
            needed = sum(one.units * counts[one] for one in larger)
            most = sum(counts[one] for one in larger) if shape.apart else needed
            if self.own_nodes and shape.units == 1:
                most = 1
            if needed > sum(min(shape.fits[kind], most) * n for kind, n in nodes.items()):
                return True
        return any(
            sum(shape.unit[r] * shape.units * n for shape, n in counts.items())
            > sum(self.kinds[kind][0][r] * n for kind, n in nodes.items())
            for r in range(len(next(iter(counts)).unit) if counts else 0)
        )

    def _place_apart(self, asks: Sequence[Ask], positions: Sequence[int]) -> Places | None:
        """Place each logical node on a node of its own."""
        asks = sorted(asks, key=attrgetter("node_idx"))
        found = self._place_in_order(asks, positions)
        if found is not None or len(asks) > len(positions):
            return found
        members = group_pairs((self.shape_of[ask.node_idx], ask.node_idx) for ask in asks)
        found, unused = {}, dict.fromkeys(positions)
        for shape in self._largest_first(members, positions):
            # The tightest are those that the fewest shapes can use.
            tightness = [(sum(one.fits[kind] > 0 for one in members), fits) for kind, fits in enumerate(shape.fits)]
            usable = [at for at in unused if shape.fits[self.kind_of[at]]]
            picked = sorted(usable, key=lambda at: (tightness[self.kind_of[at]], at))
            if len(picked) < len(members[shape]):
                return None
            for number, at in zip(members[shape], sorted(picked[: len(members[shape])]), strict=True):
                found[number] = at
                del unused[at]
        return found

    def _place_in_order(self, asks: Sequence[Ask], positions: Sequence[int]) -> Places | None:
        """Place each logical node, in order, on the first node that no other one uses."""
        found: Places = {}
        used: set[int] = set()
        # A node that is too small for a shape stays so, and a used node stays used. So each shape walks the nodes once.
        walks: dict[Shape, Iterator[int]] = {}
        for ask in asks:
            shape = self.shape_of[ask.node_idx]
            walk = walks.setdefault(shape, iter(positions))
            at = next((at for at in walk if shape.fits[self.kind_of[at]] and at not in used), None)
            if at is None:
                return None
            used.add(at)
            found[ask.node_idx] = at
        return found

    def _place_together(self) -> Places | None:
        """Place logical nodes on nodes that they share."""
        members = group_pairs((self.shape_of[ask.node_idx], ask.node_idx) for ask in self.asks)
        room = [self.kinds[kind][0] for kind in self.kind_of]
        found: Places = {}
        for shape in self._largest_first(members, range(len(room))):
            usable = [at for at, kind in enumerate(self.kind_of) if shape.fits[kind]]
            fits = sorted((units, at) for at in usable if (units := _count_units(room[at], shape.unit)))
            picked: list[int] = []
            for units, at in fits:
                taken = min(units, len(members[shape]) - len(picked))
                if not taken:
                    break
                picked += [at] * taken
                room[at] = tuple([has - taken * n for has, n in zip(room[at], shape.unit, strict=True)])
            if len(picked) < len(members[shape]):
                return None
            found.update(zip(members[shape], sorted(picked), strict=True))
        return found

    def _largest_first(self, shapes: Mapping[Shape, object], positions: Sequence[int]) -> list[Shape]:
        """Return the shapes that fit on the fewest nodes first, and of these the largest."""
        nodes = Counter(self.kind_of[at] for at in positions)

        def size(shape: Shape) -> tuple[object, ...]:
            usable = sum(n for kind, n in nodes.items() if shape.fits[kind])
            return (usable, sum(shape.fits[kind] * n for kind, n in nodes.items()), [-n for n in shape.unit])

        return sorted(shapes, key=size)

    def _domains(self) -> list[list[int]]:
        """Return the nodes of each topology domain."""
        places = ((node_place(node)[0], at) for at, node in enumerate(self.nodes))
        return list(group_pairs((domain, at) for domain, at in places if domain).values())

    def _blocks(self, segment_size: int) -> dict[tuple[Shape, ...], list[Sequence[Ask]]]:
        """Return the requests in groups of this many, by their shapes. `check_segments` has checked the number."""
        order = {shape: at for at, shape in enumerate(dict.fromkeys(self.shape_of.values()))}
        blocks = [self.asks[start : start + segment_size] for start in range(0, len(self.asks), segment_size)]
        return group_pairs(
            (tuple(sorted((self.shape_of[ask.node_idx] for ask in one), key=lambda shape: order[shape])), one)
            for one in blocks
        )

    def _place_in_segments(self, segment_size: int) -> Places | None:
        """Place the requests in groups of this many, the largest first, each in the first domain that has room."""
        domains = self._domains()
        content: list[list[Ask]] = [[] for _ in domains]
        blocks = self._blocks(segment_size)
        for kind in sorted(blocks, key=lambda kind: sorted([-n for n in shape.unit] for shape in kind)):
            left = blocks[kind]
            for inside, positions in zip(content, domains, strict=True):
                count = self._count_blocks(inside, left[: (len(positions) - len(inside)) // segment_size], positions)
                inside.extend(ask for block in left[:count] for ask in block)
                left = left[count:]
            if left:
                return None
        found: Places = {}
        for inside, positions in zip(content, domains, strict=True):
            found.update(self._place_apart(inside, positions) or {})
        return found

    def _count_blocks(self, inside: Sequence[Ask], blocks: Sequence[Sequence[Ask]], positions: Sequence[int]) -> int:
        """Return how many blocks have room beside the requests that are in a domain already."""

        def lacks_room(count: int) -> bool:
            return self._place_apart([*inside, *(ask for one in blocks[:count] for ask in one)], positions) is None

        if not blocks or not lacks_room(len(blocks)):
            return len(blocks)
        return bisect_left(range(1, len(blocks)), True, key=lacks_room)


def _covers(one: Amounts, other: Amounts) -> bool:
    """Return whether amounts are at least as large as others, each."""
    return all(a >= b for a, b in zip(one, other, strict=True))


def _count_units(amounts: Amounts, unit: Amounts) -> int:
    """Return how many units of these amounts fit into others."""
    return min((a // n for a, n in zip(amounts, unit, strict=True) if n), default=0)

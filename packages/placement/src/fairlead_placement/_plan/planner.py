# SPDX-License-Identifier: Apache-2.0
"""Decides which node each bundle goes to, from what is requested and what is there.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from .._model import PRECISION, Ask, Node, check_positive, group_pairs, matches
from .search import Amounts, Budget, Room, Search, Shape, Undecided, count_units, match
from .segments import place_blocks
from .topology import node_place

# The limit of work, in looks at a kind of node: about a second.
WORK = 1_200_000
# Per logical node, the node of each of its bundles as a number in physical order.
Places = dict[int, list[int]]


def decide(
    asks: Sequence[Ask],
    nodes: Sequence[Node],
    *,
    own_nodes: bool = False,
    segment_size: int | None = None,
    deadline: float | None = None,
) -> tuple[dict[int, tuple[str, ...]] | None, bool]:
    """Choose a node for every bundle from what is free on the nodes, which are in physical order.

    With `own_nodes`, no two logical nodes are on one physical node. With `segment_size`, groups of that many logical
    nodes, by number, are each on physical nodes of their own in one topology domain: only for STRICT_PACK, and only for
    complete groups. After the deadline, as of `time.monotonic`, no more plans are tried.

    Returns:
        The node id of each bundle of each `node_idx`, in physical order, or None if no plan was found; and whether it
        is certain that these nodes cannot hold the asks even when nothing else runs there.

    If possible, logical nodes get physical nodes of their own in the requested order. If not, the most demanding takes
    the tightest node that is still unused. If that fails too, logical nodes share physical nodes (unless `own_nodes`).
    The nodes of all asks of one shape are then assigned in physical order, so that logical order follows physical order
    (with segments: group by group, and within a domain).
    """
    chosen, impossible = Site(asks, nodes, False, own_nodes, deadline).decide(segment_size)
    names = {name for ask in asks for name in ask.bundle}
    if chosen is None and any(node.free.get(name, 0.0) < node.total.get(name, 0.0) for node in nodes for name in names):
        impossible = Site(asks, nodes, True, own_nodes, deadline).decide(segment_size)[1]
    return chosen, impossible


class Site:
    """The asks by shape, and the nodes by what they have for those asks: all of it if `idle`, else what is free."""

    def __init__(
        self, asks: Sequence[Ask], nodes: Sequence[Node], idle: bool, own_nodes: bool, deadline: float | None = None
    ) -> None:
        asks = sorted(asks, key=lambda ask: ask.node_idx)
        self.asks, self.nodes, self.own_nodes, self.deadline = asks, nodes, own_nodes, deadline
        by_shape: dict[object, int] = {}
        number_of = {ask.node_idx: by_shape.setdefault(ask.shape, len(by_shape)) for ask in asks}
        examples = {number_of[ask.node_idx]: ask for ask in reversed(asks)}
        bundles = [ask.bundle for ask in examples.values()]
        names = sorted({name for bundle in bundles for name, amount in bundle.items() if round(amount * PRECISION)})
        selectors = list({tuple(sorted(ask.labels.items())): ask.labels for ask in examples.values()}.values())
        self.shapes = [
            Shape(
                s,
                ask.count,
                tuple(round(ask.bundle.get(name, 0) * PRECISION) for name in names),
                selectors.index(ask.labels),
                ask.strategy,
            )
            for s, ask in sorted(examples.items())
        ]
        self.shape_of = {node_idx: self.shapes[s] for node_idx, s in number_of.items()}
        numbers: dict[object, int] = {}
        self.rooms: list[Room] = []
        self.kind_of: list[int] = []
        plain = (True,) * len(selectors) if not any(selectors) else None
        for node in nodes:
            has = node.total if idle else node.free
            matched = plain or tuple([matches(selector, node.labels) for selector in selectors])
            seen = (tuple(map(has.get, names)), matched)
            number = numbers.setdefault(seen, len(numbers))
            if number == len(self.rooms):
                self.rooms.append((tuple(round((amount or 0) * PRECISION) for amount in seen[0]), matched))
            self.kind_of.append(number)
        self._fits: dict[tuple[Amounts, int], tuple[list[int], list[int]]] = {}

    def decide(self, segment_size: int | None) -> tuple[dict[int, tuple[str, ...]] | None, bool]:
        """Return a plan, and whether it is certain that there is none."""
        try:
            if segment_size is None:
                found = self.place(self.asks, range(len(self.nodes)), self.own_nodes)
            else:
                found = self.place_in_segments(segment_size)
        except Undecided:
            return None, False
        if found is None:
            return None, True
        return {ask.node_idx: tuple([self.nodes[at].node_id for at in found[ask.node_idx]]) for ask in self.asks}, False

    def fits(self, shape: Shape) -> tuple[list[int], list[int]]:
        """Return how many bundles of a shape a node holds, by kind of node and by node."""
        key = (shape.bundle, shape.selector)
        if key not in self._fits:
            by_kind = [count_units(room, *key) for room in self.rooms]
            self._fits[key] = by_kind, [by_kind[kind] for kind in self.kind_of]
        return self._fits[key]

    def profiles(
        self, shapes: Sequence[Shape], groups: Sequence[Sequence[int]]
    ) -> list[dict[tuple[int, ...], list[int]]]:
        """Return the nodes of each group by how many bundles of each shape they hold; 0 if too few."""
        worth = [[units if units >= shape.least else 0 for units in self.fits(shape)[0]] for shape in shapes]
        by_kind = list(zip(*worth, strict=True)) if worth else [()] * len(self.rooms)
        return [group_pairs((by_kind[self.kind_of[at]], at) for at in group) for group in groups]

    def group_by_shape(self, asks: Sequence[Ask]) -> dict[Shape, list[int]]:
        """Return the logical nodes of each shape."""
        return group_pairs((self.shape_of[ask.node_idx], ask.node_idx) for ask in asks)

    def place(self, asks: Sequence[Ask], positions: Sequence[int], own_nodes: bool) -> Places | None:
        """Place asks on some of the nodes, and assign the nodes of all asks of a shape in physical order."""
        found = self._place_in_order(asks, positions)
        if found is None:
            try:
                found = self._place_apart(asks, positions)
            except Undecided:
                if own_nodes:
                    raise
        if found is None and not own_nodes:
            found = self._search(asks, positions, own=False)
        if found is None:
            return None
        ordered: Places = {}
        for numbers in self.group_by_shape(asks).values():
            ordered.update(zip(numbers, sorted(found[number] for number in numbers), strict=True))
        return ordered

    def _place_in_order(self, asks: Sequence[Ask], positions: Sequence[int]) -> Places | None:
        """Place each ask, in order, on the first nodes that no other ask uses."""
        used: set[int] = set()
        # A node that is too small for a shape stays so, and a used node stays used. So each shape walks the nodes once.
        walks: dict[tuple[Amounts, int, int, bool], Iterator[int]] = {}

        def unused(shape: Shape, least: int = 1, roomiest: bool = False) -> Iterator[int]:
            key = (shape.bundle, shape.selector, least, roomiest)
            if key not in walks:
                fits = self.fits(shape)[1]
                order = sorted(positions, key=lambda at: -fits[at]) if roomiest else positions
                walks[key] = (at for at in order if fits[at] >= least and at not in used)
            return walks[key]

        found: Places = {}
        for ask in asks:
            shape = self.shape_of[ask.node_idx]
            picked: list[int] = []
            if shape.strategy in ("STRICT_PACK", "PACK"):
                picked = [at for at in islice(unused(shape, ask.count), 1) for _ in range(ask.count)]
            if shape.strategy == "PACK" and not picked:
                # As few nodes as possible: the roomiest first.
                for at in unused(shape, roomiest=True):
                    picked += [at] * min(ask.count - len(picked), self.fits(shape)[1][at])
                    if len(picked) == ask.count:
                        break
            if shape.strategy in ("SPREAD", "STRICT_SPREAD"):
                takers = picked = list(islice(unused(shape), ask.count))
                turn = 1
                while shape.strategy == "SPREAD" and takers and len(picked) < ask.count:
                    takers = [at for at in takers if self.fits(shape)[1][at] > turn][: ask.count - len(picked)]
                    picked = picked + takers
                    turn += 1
            if len(picked) < ask.count:
                return None
            used.update(picked)
            found[ask.node_idx] = sorted(picked)
        return found

    def _place_apart(self, asks: Sequence[Ask], positions: Sequence[int]) -> Places | None:
        """Place each ask on nodes of its own, whenever that is possible."""
        members = self.group_by_shape(asks)
        shapes = sorted(members, key=lambda shape: (-shape.least, shape.number))
        if any(shape.strategy in ("PACK", "SPREAD") for shape in shapes):
            return self._search(asks, positions, own=True)
        (profiles,) = self.profiles(shapes, [positions])
        needs = [shape.units * len(members[shape]) for shape in shapes]
        given = match(needs, {profile: len(at) for profile, at in profiles.items()})
        if given is None:
            return None
        supply = {profile: iter(at) for profile, at in profiles.items()}
        found: Places = {}
        for shape, share in zip(shapes, given, strict=True):
            taken = iter(sorted(at for profile, count in share.items() for at in islice(supply[profile], count)))
            for number in members[shape]:
                found[number] = [at for at in islice(taken, shape.units) for _ in range(shape.least)]
        return found

    def _search(self, asks: Sequence[Ask], positions: Sequence[int], *, own: bool) -> Places | None:
        """Search for any plan with bounded work."""
        members = self.group_by_shape(asks)
        rooms = group_pairs((self.rooms[self.kind_of[at]], at) for at in positions)
        largest = [max(column, default=0) for column in zip(*(room[0] for room in rooms), strict=True)]

        def size(shape: Shape) -> tuple[float, int, int]:
            """Return a sort key: the part of the largest node that an ask takes, comparable between resources."""
            part = max((n / max(has, 1) for n, has in zip(shape.bundle, largest, strict=False)), default=0.0)
            return (-part * shape.least, -shape.count, shape.number)

        shapes = sorted(members, key=size)
        asked = [len(members[shape]) for shape in shapes]
        placed = Search(shapes, asked, rooms, own=own, budget=Budget(WORK, self.deadline)).run()
        if placed is None:
            return None
        return {
            number: sorted([at for at in units for _ in range(shape.least)])
            for shape, group in zip(shapes, placed, strict=True)
            for number, units in zip(members[shape], group, strict=True)
        }

    def place_in_segments(self, segment_size: int) -> Places | None:
        """Place the asks in groups of this many, each in one topology domain."""
        check_positive("segment_size", segment_size)
        asks = self.asks
        if len(asks) % segment_size:
            raise ValueError(
                f"the number of logical nodes in use must be divisible by segment_size, got {len(asks)} and "
                f"{segment_size}"
            )
        for ask in asks:
            if ask.strategy != "STRICT_PACK":
                raise ValueError(
                    f"segment_size needs the strategy STRICT_PACK, got {ask.strategy!r} for logical node {ask.node_idx}"
                )
        places = ((node_place(node)[0], at) for at, node in enumerate(self.nodes))
        domains = group_pairs((domain, at) for domain, at in places if domain)
        profiles = [
            {profile: len(at) for profile, at in of_domain.items()}
            for of_domain in self.profiles(self.shapes, list(domains.values()))
        ]
        blocks = [asks[start : start + segment_size] for start in range(0, len(asks), segment_size)]
        contents = [[self.shape_of[ask.node_idx].number for ask in block] for block in blocks]
        chosen = place_blocks(contents, profiles, Budget(WORK, self.deadline))
        if chosen is None:
            return None
        found: Places = {}
        for members, of_domain in zip(domains.values(), chosen, strict=True):
            part = self.place([ask for b in of_domain for ask in blocks[b]], members, True)
            assert part is not None, "place_blocks has checked it"
            found.update(part)
        return found

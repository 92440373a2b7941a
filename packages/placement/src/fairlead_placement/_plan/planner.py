# SPDX-License-Identifier: Apache-2.0
"""Decides which node each bundle goes to, from what is requested and what is there.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3. Nodes that have the same
amounts are interchangeable, and so are asks of the same shape: the work grows with the number of kinds of both.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from .._model import PRECISION, Ask, Node, Strategy, group_pairs, matches
from .match import match
from .topology import node_place

# Per logical node, the node of each of its bundles as a number in physical order.
Places = dict[int, list[int]]
Amounts = tuple[int, ...]
# What nodes of one kind have left, and which selectors they match.
Room = tuple[Amounts, tuple[bool, ...]]


@dataclass(frozen=True, eq=False)
class Shape:
    """The shape of interchangeable asks, with amounts as the planner counts them."""

    number: int
    count: int
    bundle: Amounts
    selector: int
    strategy: Strategy
    # The number of bundles that are placed together: all of them if they have to be on one node, else one. They are a
    # unit, which takes these amounts.
    least: int
    unit: Amounts
    fits: list[int]  # how many bundles a node of each kind holds


# The logical nodes of each shape.
Members = dict[Shape, list[int]]


def decide(
    asks: Sequence[Ask], nodes: Sequence[Node], *, own_nodes: bool = False, segment_size: int | None = None
) -> tuple[dict[int, tuple[str, ...]] | None, bool]:
    """Return the node id of each bundle of each `node_idx`, from what is free on the nodes, or None without a plan.

    The nodes are in physical order. The second result is whether it is certain that these nodes cannot hold the asks
    even when nothing else runs there. With `own_nodes`, no two logical nodes are on one physical node. With
    `segment_size`, the complete groups of that many logical nodes, by number, are each on physical nodes of their own
    in one topology domain.
    """
    # If possible, logical nodes get physical nodes of their own in the requested order. If not, the most demanding
    # takes the tightest node that is still unused. If that fails too, logical nodes share physical nodes, the most
    # demanding first. No choice is revised, so uneven asks on uneven nodes may have a plan that is not found. The nodes
    # of all asks of one shape are then assigned in physical order, so logical order follows physical order.
    site = Site(asks, nodes, False, own_nodes)
    if segment_size is None:
        found = site.place(site.asks, range(len(nodes)), own_nodes)
    else:
        found = site.place_in_segments(site.asks, segment_size)
    if found is not None:
        return {ask.node_idx: tuple([nodes[at].node_id for at in found[ask.node_idx]]) for ask in site.asks}, False
    names = {name for ask in asks for name in ask.bundle}
    if any(node.free.get(name, 0.0) < node.total.get(name, 0.0) for node in nodes for name in names):
        site = Site(asks, nodes, True, own_nodes)
    return None, site.is_impossible(segment_size)


class Site:
    """The asks by shape, and the nodes by what they have for those asks: all of it if `idle`, else what is free."""

    def __init__(self, asks: Sequence[Ask], nodes: Sequence[Node], idle: bool, own_nodes: bool) -> None:
        asks = sorted(asks, key=lambda ask: ask.node_idx)
        self.asks, self.nodes, self.own_nodes = asks, nodes, own_nodes
        alike = list(group_pairs((ask.shape, ask) for ask in asks).values())
        held = [item for ask, *_ in alike for item in ask.bundle.items()]
        names = sorted({name for name, amount in held if round(amount * PRECISION)})
        selectors = list({tuple(sorted(ask.labels.items())): ask.labels for ask, *_ in alike}.values())
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
        self.shape_of: dict[int, Shape] = {}
        self.members: Members = {}
        counted: dict[tuple[Amounts, int], list[int]] = {}
        for s, (ask, *others) in enumerate(alike):
            amounts = tuple(round(ask.bundle.get(name, 0) * PRECISION) for name in names)
            key = amounts, selectors.index(ask.labels)
            if key not in counted:
                counted[key] = [_count_units(room, *key) for room in self.rooms]
            least = ask.count if ask.strategy == "STRICT_PACK" else 1
            shape = Shape(s, ask.count, *key, ask.strategy, least, tuple(n * least for n in amounts), counted[key])
            self.members[shape] = [ask.node_idx, *(one.node_idx for one in others)]
            self.shape_of.update(dict.fromkeys(self.members[shape], shape))
        self.shapes = list(self.members)

    def is_impossible(self, segment_size: int | None) -> bool:
        """Return whether a necessary condition fails: what is alike has room alone, and all of it in total."""
        if segment_size is None:
            everywhere = range(len(self.nodes))
            if not self.has_room(self.members, everywhere, self.own_nodes):
                return True
            strict = all(shape.strategy in ("STRICT_PACK", "STRICT_SPREAD") for shape in self.shapes)
            return self.own_nodes and strict and self._place_apart(self.members, everywhere) is None
        room = sum(len(members) // segment_size for members in self._domains().values())
        return room < len(self.asks) // segment_size or any(
            self.place_in_segments([ask for block in alike for ask in block], segment_size) is None
            for alike in self._blocks(self.asks, segment_size).values()
        )

    def has_room(self, members: Members, positions: Sequence[int], own_nodes: bool) -> bool:
        """Return whether the asks of each shape would fit alone, and all asks together if nodes could be joined."""
        nodes = Counter(self.kind_of[at] for at in positions)
        alike = {shape: len(numbers) for shape, numbers in members.items()}
        for shape, count in alike.items():
            units = shape.count // shape.least
            # The largest number of units on one node.
            most = (1 if shape.strategy == "STRICT_SPREAD" else units) * (1 if own_nodes else count)
            if sum(min(shape.fits[kind] // shape.least, most) * n for kind, n in nodes.items()) < units * count:
                return False
        return all(
            sum(shape.bundle[r] * shape.count * n for shape, n in alike.items())
            <= sum(self.rooms[kind][0][r] * n for kind, n in nodes.items())
            for r in range(len(self.shapes[0].bundle) if self.shapes else 0)
        )

    def profiles(
        self, shapes: Sequence[Shape], groups: Sequence[Sequence[int]]
    ) -> list[dict[tuple[int, ...], list[int]]]:
        """Return the nodes of each group by how many bundles of each shape they hold; 0 if too few."""
        worth = [[units if units >= shape.least else 0 for units in shape.fits] for shape in shapes]
        by_kind = list(zip(*worth, strict=True)) if worth else [()] * len(self.rooms)
        return [group_pairs((by_kind[self.kind_of[at]], at) for at in group) for group in groups]

    def place(self, asks: Sequence[Ask], positions: Sequence[int], own_nodes: bool) -> Places | None:
        """Place asks on some of the nodes, and assign the nodes of all asks of a shape in physical order."""
        members = group_pairs((self.shape_of[ask.node_idx], ask.node_idx) for ask in asks)
        found = self._place_in_order(asks, positions)
        if found is None and self.has_room(members, positions, own_nodes):
            found = self._place_apart(members, positions)
            if found is None and not own_nodes:
                found = self._place_tightly(members, positions, own=False)
        if found is None:
            return None
        ordered: Places = {}
        for numbers in members.values():
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
                fits, kind_of = shape.fits, self.kind_of
                order = sorted(positions, key=lambda at: -fits[kind_of[at]]) if roomiest else positions
                walks[key] = (at for at in order if fits[kind_of[at]] >= least and at not in used)
            return walks[key]

        found: Places = {}
        for ask in asks:
            shape = self.shape_of[ask.node_idx]
            fits = shape.fits
            if shape.strategy in ("STRICT_PACK", "PACK"):
                picked = [at for at in islice(unused(shape, ask.count), 1) for _ in range(ask.count)]
                # As few nodes as possible: the roomiest first.
                while shape.strategy == "PACK" and len(picked) < ask.count:
                    if (at := next(unused(shape, roomiest=True), None)) is None:
                        break
                    picked += [at] * min(ask.count - len(picked), fits[self.kind_of[at]])
            else:
                takers = picked = list(islice(unused(shape), ask.count))
                turn = 1
                while shape.strategy == "SPREAD" and takers and len(picked) < ask.count:
                    takers = [at for at in takers if fits[self.kind_of[at]] > turn][: ask.count - len(picked)]
                    picked = picked + takers
                    turn += 1
            if len(picked) < ask.count:
                return None
            used.update(picked)
            found[ask.node_idx] = sorted(picked)
        return found

    def _place_apart(self, members: Members, positions: Sequence[int]) -> Places | None:
        """Place each ask on nodes of its own, whenever that is possible."""
        shapes = sorted(members, key=lambda shape: (-shape.least, shape.number))
        if any(shape.strategy in ("PACK", "SPREAD") for shape in shapes):
            return self._place_tightly(members, positions, own=True)
        (profiles,) = self.profiles(shapes, [positions])
        needs = [shape.count // shape.least * len(members[shape]) for shape in shapes]
        given = match(needs, {profile: len(at) for profile, at in profiles.items()})
        if given is None:
            return None
        supply = {profile: iter(at) for profile, at in profiles.items()}
        found: Places = {}
        for shape, share in zip(shapes, given, strict=True):
            taken = iter(sorted(at for profile, count in share.items() for at in islice(supply[profile], count)))
            for number in members[shape]:
                found[number] = [at for at in islice(taken, shape.count // shape.least) for _ in range(shape.least)]
        return found

    def _place_tightly(self, members: Members, positions: Sequence[int], *, own: bool) -> Places | None:
        """Place the most demanding ask first, each unit on the node that suits it best. With `own`, asks share none."""
        free = group_pairs((self.rooms[self.kind_of[at]], at) for at in positions)
        largest = [max(column, default=0) for column in zip(*(room[0] for room in free), strict=True)]

        def size(shape: Shape) -> tuple[float, int, int]:
            """Return a sort key: the part of the largest node that a unit takes, comparable between resources."""
            part = max((n / max(has, 1) for n, has in zip(shape.unit, largest, strict=False)), default=0.0)
            return (-part, -shape.count, shape.number)

        for heap in free.values():
            heapify(heap)
        found: Places = {}
        for shape in sorted(members, key=size):
            units = {room: _count_units(room, shape.unit, shape.selector) for room in free}
            for number in members[shape]:
                mine: dict[Room, list[int]] = {}  # the nodes that this ask uses
                picked: list[int] = []
                while len(picked) < shape.count:
                    best = _choose(shape, shape.count - len(picked), free, mine, units)
                    if best is None:
                        return None
                    is_mine, (amounts, matched) = best
                    kinds = mine if is_mine else free
                    at = heappop(kinds[amounts, matched])
                    if not kinds[amounts, matched]:
                        del kinds[amounts, matched]
                    left = tuple(a - u for a, u in zip(amounts, shape.unit, strict=True))
                    if (left, matched) not in units:
                        units[left, matched] = _count_units((left, matched), shape.unit, shape.selector)
                    heappush(mine.setdefault((left, matched), []), at)
                    picked += [at] * shape.least
                for room, used in mine.items() if not own else ():
                    for at in used:
                        heappush(free.setdefault(room, []), at)
                found[number] = sorted(picked)
        return found

    def _domains(self) -> dict[str, list[int]]:
        """Return the nodes of each topology domain."""
        places = ((node_place(node)[0], at) for at, node in enumerate(self.nodes))
        return group_pairs((domain, at) for domain, at in places if domain)

    def _blocks(self, asks: Sequence[Ask], segment_size: int) -> dict[tuple[int, ...], list[Sequence[Ask]]]:
        """Return the asks in groups of this many, as `check_segments` of `_model` has allowed it, by their shapes."""
        blocks = [asks[start : start + segment_size] for start in range(0, len(asks), segment_size)]
        return group_pairs((tuple(sorted(self.shape_of[ask.node_idx].number for ask in one)), one) for one in blocks)

    def place_in_segments(self, asks: Sequence[Ask], segment_size: int) -> Places | None:
        """Place the asks in groups of this many, the largest first, each in the first domain that has room for it."""
        domains = list(self._domains().values())
        profiles = [
            {profile: len(at) for profile, at in of_domain.items()} for of_domain in self.profiles(self.shapes, domains)
        ]
        kinds = self._blocks(asks, segment_size)
        needs = [[0] * len(self.shapes) for _ in domains]
        content: list[list[Ask]] = [[] for _ in domains]
        for kind in sorted(kinds, key=lambda kind: (-sum(self.shapes[s].count for s in kind), kind)):
            more = Counter(kind)
            at = 0  # a domain without room for a kind has none later
            for block in kinds[kind]:
                while at < len(domains):
                    wanted = [need + more[s] for s, need in enumerate(needs[at])]
                    if sum(wanted) <= len(domains[at]) and match(wanted, profiles[at]) is not None:
                        break
                    at += 1
                else:
                    return None
                needs[at] = wanted
                content[at] += block
        found: Places = {}
        for members, inside in zip(domains, content, strict=True):
            part = self.place(inside, members, True)
            assert part is not None, "the domain has room for each of its blocks"
            found.update(part)
        return found


def _choose(
    shape: Shape, left: int, free: dict[Room, list[int]], mine: dict[Room, list[int]], units: dict[Room, int]
) -> tuple[bool, Room] | None:
    """Return the kind of node for the next unit, and whether the ask uses it already. `left` are its bundles left."""

    def promise(kind: tuple[bool, Room]) -> tuple[object, ...]:
        is_mine, room = kind
        fits = units[room]
        if shape.strategy == "STRICT_PACK":
            return (fits, room)
        if shape.strategy == "PACK":
            # As few nodes as possible: a node in use, or else one that holds all of the rest, or else the roomiest.
            return (not is_mine, fits < left, fits if fits >= left else -fits, room)
        # Nodes are used up evenly: STRICT_SPREAD needs many nodes with a little room, not a few with much.
        return (is_mine, -fits, room)

    possible = [(False, room) for room in free if units[room]]
    if shape.strategy != "STRICT_SPREAD":
        possible += [(True, room) for room in mine if units[room]]
    return min(possible, key=promise, default=None)


def _count_units(room: Room, unit: Amounts, selector: int) -> int:
    """Return how many units of these amounts a node with this room holds."""
    amounts, matched = room
    return min((a // n for a, n in zip(amounts, unit, strict=True) if n), default=0) if matched[selector] else 0

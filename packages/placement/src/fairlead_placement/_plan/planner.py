# SPDX-License-Identifier: Apache-2.0
"""Decides which node each bundle goes to, from what is requested and what is there.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from .._checks import check_positive
from .._model import PRECISION, Ask, Node, Strategy, matches
from .search import Amounts, Budget, Room, Undecided, Want, match, search
from .segments import place_blocks
from .topology import node_place

# The limit of work, in looks at a kind of node: about a second.
WORK = 1_200_000
# Per logical node, the node of each of its bundles as a number in physical order.
Places = dict[int, list[int]]


@dataclass
class Shape:
    """The shape of interchangeable asks, with amounts as the planner counts them."""

    count: int
    bundle: Amounts
    selector: int
    strategy: Strategy

    @property
    def least(self) -> int:
        """The smallest number of bundles that a node must be able to hold."""
        return self.count if self.strategy == "STRICT_PACK" else 1


class Site:
    """The asks by shape, and the nodes (numbered in physical order) by what they have for those asks."""

    def __init__(self, asks: Sequence[Ask], nodes: Sequence[Node], idle: bool) -> None:
        by_shape: dict[object, int] = {}
        self.shape_of = {ask.node_idx: by_shape.setdefault(ask.shape, len(by_shape)) for ask in asks}
        examples = {self.shape_of[ask.node_idx]: ask for ask in reversed(asks)}
        exact = {
            s: {name: n for name, amount in ask.bundle.items() if (n := round(amount * PRECISION)) > 0}
            for s, ask in examples.items()
        }
        names = sorted({name for bundle in exact.values() for name in bundle})
        selectors = list({tuple(sorted(ask.labels.items())): ask.labels for ask in examples.values()}.values())
        self.shapes = [
            Shape(ask.count, tuple(exact[s].get(n, 0) for n in names), selectors.index(ask.labels), ask.strategy)
            for s, ask in sorted(examples.items())
        ]
        numbers: dict[object, int] = {}
        self.rooms: list[Room] = []
        self.kind_of: list[int] = []
        plain = (True,) * len(selectors) if not any(selectors) else None
        for node in nodes:
            has = node.total if idle else node.free
            matched = plain or tuple([matches(selector, node.labels) for selector in selectors])
            key = (tuple(map(has.get, names)), matched)
            number = numbers.setdefault(key, len(numbers))
            if number == len(self.rooms):
                self.rooms.append((tuple(round((amount or 0) * PRECISION) for amount in key[0]), matched))
            self.kind_of.append(number)
        self._fits: dict[tuple[Amounts, int], tuple[list[int], list[int]]] = {}

    def fits(self, shape: Shape) -> tuple[list[int], list[int]]:
        """Return how many bundles of a shape a node holds, by kind of node and by node."""
        key = (shape.bundle, shape.selector)
        if key not in self._fits:
            by_kind = [
                min((a // n for a, n in zip(amounts, shape.bundle, strict=True) if n), default=0)
                if matched[shape.selector]
                else 0
                for amounts, matched in self.rooms
            ]
            self._fits[key] = by_kind, [by_kind[kind] for kind in self.kind_of]
        return self._fits[key]

    def profiles(
        self, shapes: Sequence[int], groups: Sequence[Sequence[int]]
    ) -> list[dict[tuple[int, ...], list[int]]]:
        """Return the nodes of each group by how many bundles of each shape they hold; 0 if too few."""
        worth = [
            [units if units >= self.shapes[s].least else 0 for units in self.fits(self.shapes[s])[0]] for s in shapes
        ]
        by_kind = list(zip(*worth, strict=True)) if worth else [()] * len(self.rooms)
        found: list[dict[tuple[int, ...], list[int]]] = [{} for _ in groups]
        for group, profiles in zip(groups, found, strict=True):
            for at in group:
                profiles.setdefault(by_kind[self.kind_of[at]], []).append(at)
        return found


def plan(
    asks: Sequence[Ask],
    nodes: Sequence[Node],
    *,
    idle: bool = False,
    own_nodes: bool = False,
    segment_size: int | None = None,
) -> dict[int, tuple[str, ...]] | None:
    """Choose a node for every bundle.

    Args:
        asks: the requests, at most one per logical node.
        nodes: the nodes, in physical order.
        idle: plan as if nothing ran on the nodes.
        own_nodes: never put two logical nodes on one physical node.
        segment_size: place logical nodes in groups of this many, by number; each group on physical nodes of its own
            in one topology domain. Only for STRICT_PACK.

    Returns:
        The node id of each bundle of each `node_idx`, in physical order; None if no plan was found. Except for large
        and very uneven clusters, that means that there is none; `never_fits` returns True only if that is certain.

    Raises:
        ValueError: the number of logical nodes is not a multiple of `segment_size`, or they are not STRICT_PACK.

    If possible, logical nodes get physical nodes of their own in the requested order. If not, the most demanding takes
    the tightest node that is still unused. If that fails too, logical nodes share physical nodes (unless `own_nodes`).
    The nodes of all asks of one shape are then assigned in physical order, so that logical order follows physical order
    (with segments: group by group, and within a domain).
    """
    try:
        return _plan(asks, nodes, idle, own_nodes, segment_size)
    except Undecided:
        return None


def never_fits(
    asks: Sequence[Ask], nodes: Sequence[Node], *, own_nodes: bool = False, segment_size: int | None = None
) -> bool:
    """Return whether it is certain that these nodes cannot hold the asks, even when idle.

    False means that a plan for idle nodes exists, or that none was found with bounded work. Arguments and errors are
    those of `plan`.
    """
    try:
        return _plan(asks, nodes, True, own_nodes, segment_size) is None
    except Undecided:
        return False


def decide(
    asks: Sequence[Ask],
    nodes: Sequence[Node],
    *,
    own_nodes: bool = False,
    segment_size: int | None = None,
    deadline: float | None = None,
) -> tuple[dict[int, tuple[str, ...]] | None, bool]:
    """Return a plan for what is free, and whether it is certain that there is none even when nothing else runs.

    Args:
        asks: as of `plan`, as the next three.
        nodes: the nodes.
        own_nodes: never put two logical nodes on one physical node.
        segment_size: place logical nodes in groups of this many.
        deadline: when to stop looking, as of `time.monotonic`; None for the limit of work alone.

    Returns:
        The results of `plan` and `never_fits`, computed with less work than both take.
    """
    decided = True
    try:
        chosen = _plan(asks, nodes, False, own_nodes, segment_size, deadline)
        if chosen is not None:
            return chosen, False
    except Undecided:
        decided = False
    if _are_idle(asks, nodes):
        return None, decided
    try:
        return None, _plan(asks, nodes, True, own_nodes, segment_size, deadline) is None
    except Undecided:
        return None, False


def _are_idle(asks: Sequence[Ask], nodes: Sequence[Node]) -> bool:
    """Return whether all requested resources are free on all nodes."""
    names = {name for ask in asks for name in ask.bundle}
    return all(node.free.get(name, 0.0) >= node.total.get(name, 0.0) for node in nodes for name in names)


def _plan(
    asks: Sequence[Ask],
    nodes: Sequence[Node],
    idle: bool,
    own_nodes: bool,
    segment_size: int | None,
    deadline: float | None = None,
) -> dict[int, tuple[str, ...]] | None:
    ordered = sorted(asks, key=lambda ask: ask.node_idx)
    site = Site(ordered, nodes, idle)
    if segment_size is not None:
        found = _place_in_segments(ordered, site, nodes, segment_size, deadline)
    else:
        found = _place(ordered, site, range(len(nodes)), own_nodes, deadline)
    if found is None:
        return None
    return {ask.node_idx: tuple([nodes[at].node_id for at in found[ask.node_idx]]) for ask in asks}


def _place(
    asks: Sequence[Ask], site: Site, positions: Sequence[int], own_nodes: bool, deadline: float | None
) -> Places | None:
    found = _place_in_order(asks, site, positions)
    if found is None:
        try:
            found = _place_apart(asks, site, positions, deadline)
        except Undecided:
            if own_nodes:
                raise
    if found is None and not own_nodes:
        found = _place_by_search(asks, site, positions, own=False, deadline=deadline)
    return None if found is None else _sort_by_shape(asks, site, found)


def _place_in_order(asks: Sequence[Ask], site: Site, positions: Sequence[int]) -> Places | None:
    """Place each ask, in order, on the first nodes that no other ask uses."""
    used: set[int] = set()
    # A node that is too small for a shape stays so, and a used node stays used. So each shape walks the nodes once.
    walks: dict[tuple[Amounts, int, int, bool], Iterator[int]] = {}

    def unused(shape: Shape, least: int = 1, roomiest: bool = False) -> Iterator[int]:
        key = (shape.bundle, shape.selector, least, roomiest)
        if key not in walks:
            fits = site.fits(shape)[1]
            order = sorted(positions, key=lambda at: -fits[at]) if roomiest else positions
            walks[key] = (at for at in order if fits[at] >= least and at not in used)
        return walks[key]

    found: Places = {}
    for ask in asks:
        shape = site.shapes[site.shape_of[ask.node_idx]]
        picked: list[int] = []
        if shape.strategy in ("STRICT_PACK", "PACK"):
            picked = [at for at in islice(unused(shape, ask.count), 1) for _ in range(ask.count)]
        if shape.strategy == "PACK" and not picked:
            # As few nodes as possible: the roomiest first.
            for at in unused(shape, roomiest=True):
                picked += [at] * min(ask.count - len(picked), site.fits(shape)[1][at])
                if len(picked) == ask.count:
                    break
        if shape.strategy in ("SPREAD", "STRICT_SPREAD"):
            takers = picked = list(islice(unused(shape), ask.count))
            turn = 1
            while shape.strategy == "SPREAD" and takers and len(picked) < ask.count:
                takers = [at for at in takers if site.fits(shape)[1][at] > turn][: ask.count - len(picked)]
                picked = picked + takers
                turn += 1
        if len(picked) < ask.count:
            return None
        used.update(picked)
        found[ask.node_idx] = sorted(picked)
    return found


def _place_apart(asks: Sequence[Ask], site: Site, positions: Sequence[int], deadline: float | None) -> Places | None:
    """Place each ask on nodes of its own, whenever that is possible."""
    shapes = sorted({site.shape_of[ask.node_idx] for ask in asks}, key=lambda s: (-site.shapes[s].least, s))
    if any(site.shapes[s].strategy in ("PACK", "SPREAD") for s in shapes):
        return _place_by_search(asks, site, positions, own=True, deadline=deadline)
    (profiles,) = site.profiles(shapes, [positions])
    needs = dict.fromkeys(shapes, 0)
    for ask in asks:
        needs[site.shape_of[ask.node_idx]] += ask.count // site.shapes[site.shape_of[ask.node_idx]].least
    given = match(list(needs.values()), {profile: len(at) for profile, at in profiles.items()})
    if given is None:
        return None
    supply = {profile: iter(at) for profile, at in profiles.items()}
    taken = {
        s: iter(sorted(at for profile, count in share.items() for at in islice(supply[profile], count)))
        for s, share in zip(shapes, given, strict=True)
    }
    found: Places = {}
    for ask in asks:
        s = site.shape_of[ask.node_idx]
        least = site.shapes[s].least
        found[ask.node_idx] = [at for at in islice(taken[s], ask.count // least) for _ in range(least)]
    return found


def _place_by_search(
    asks: Sequence[Ask], site: Site, positions: Sequence[int], *, own: bool, deadline: float | None
) -> Places | None:
    """Search for any plan with bounded work."""
    members: dict[int, list[int]] = {}
    for ask in asks:
        members.setdefault(site.shape_of[ask.node_idx], []).append(ask.node_idx)
    rooms: dict[Room, list[int]] = {}
    for at in positions:
        rooms.setdefault(site.rooms[site.kind_of[at]], []).append(at)
    largest = [max(column, default=0) for column in zip(*(room[0] for room in rooms), strict=True)]

    def size(s: int) -> tuple[float, int, int]:
        """Return a sort key: the part that an ask takes of the largest node, so that different resources compare."""
        shape = site.shapes[s]
        part = max((n / max(has, 1) for n, has in zip(shape.bundle, largest, strict=False)), default=0.0)
        return (-part * shape.least, -shape.count, s)

    shapes = sorted(members, key=size)
    wants = []
    for s in shapes:
        shape = site.shapes[s]
        unit = tuple(n * shape.least for n in shape.bundle)
        wants.append(Want(shape.strategy, unit, shape.selector, shape.count // shape.least, len(members[s])))
    placed = search(wants, rooms, own=own, budget=Budget(WORK, deadline))
    if placed is None:
        return None
    return {
        number: sorted(at for at in units for _ in range(site.shapes[s].least))
        for s, group in zip(shapes, placed, strict=True)
        for number, units in zip(members[s], group, strict=True)
    }


def _place_in_segments(
    asks: Sequence[Ask], site: Site, nodes: Sequence[Node], segment_size: int, deadline: float | None
) -> Places | None:
    check_positive("segment_size", segment_size)
    if len(asks) % segment_size:
        raise ValueError(
            f"the number of logical nodes in use must be divisible by segment_size, got {len(asks)} and {segment_size}"
        )
    for ask in asks:
        if ask.strategy != "STRICT_PACK":
            raise ValueError(
                f"segment_size needs the strategy STRICT_PACK, got {ask.strategy!r} for logical node {ask.node_idx}"
            )
    domains: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        if domain := node_place(node)[0]:
            domains.setdefault(domain, []).append(at)
    places = site.profiles(range(len(site.shapes)), list(domains.values()))
    blocks = [asks[start : start + segment_size] for start in range(0, len(asks), segment_size)]
    contents = [[site.shape_of[ask.node_idx] for ask in block] for block in blocks]
    chosen = place_blocks(
        contents,
        [{profile: len(at) for profile, at in profiles.items()} for profiles in places],
        Budget(WORK, deadline),
    )
    if chosen is None:
        return None
    found: Places = {}
    for members, of_domain in zip(domains.values(), chosen, strict=True):
        here = [ask for b in of_domain for ask in blocks[b]]
        part = _place(here, site, members, True, None)
        assert part is not None, "place_blocks has checked it"
        found.update(part)
    return found


def _sort_by_shape(asks: Sequence[Ask], site: Site, found: Places) -> Places:
    """Assign the nodes of all asks of a shape in physical order."""
    members: dict[int, list[int]] = {}
    for ask in asks:
        members.setdefault(site.shape_of[ask.node_idx], []).append(ask.node_idx)
    ordered: Places = {}
    for numbers in members.values():
        ordered.update(zip(numbers, sorted(found[number] for number in numbers), strict=True))
    return ordered

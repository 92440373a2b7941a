# SPDX-License-Identifier: Apache-2.0
"""Which node each bundle goes to: pure functions of what is asked and what is there."""

from collections.abc import Iterator, Sequence
from itertools import islice

from .matching import match
from .model import Ask, Node
from .search import Amounts, Budget, Room, Undecided, Want, search
from .segments import place_blocks
from .site import Shape, Site
from .topology import check_size, node_place

__all__ = ["decide", "never_fits", "plan"]

# How much to try before giving up, in looks at a kind of node: about a second.
WORK = 1_200_000


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
        asks: what is wanted, at most one entry per logical node.
        nodes: what is there, in physical order.
        idle: plan as if nothing ran on the nodes.
        own_nodes: never put two logical nodes on one physical node.
        segment_size: place logical nodes in groups of this many, by number; each group on physical nodes of its own
            in one topology domain. Only for STRICT_PACK.

    Returns:
        For each `node_idx` the node id of each of its bundles, in physical order; None if no plan was found. For all
        but large and very uneven clusters that means that there is none; `never_fits` says it only if it is so.

    Raises:
        ValueError: the logical nodes are no multiple of `segment_size`, or are not STRICT_PACK.

    Logical nodes get physical nodes of their own in the order asked, if that fits; else the most demanding takes the
    tightest node that is still unused; else (unless `own_nodes`) logical nodes share physical ones. Asks of one
    shape are then handed out in physical order, so logical order follows physical order (with segments: group by
    group, and within a domain).
    """
    try:
        return _plan(asks, nodes, idle, own_nodes, segment_size)
    except Undecided:
        return None


def never_fits(
    asks: Sequence[Ask], nodes: Sequence[Node], *, own_nodes: bool = False, segment_size: int | None = None
) -> bool:
    """Whether it is certain that these nodes cannot hold the asks, even when idle.

    False means that a plan for idle nodes exists, or that none was found with a bounded effort. Arguments and errors
    as of `plan`.
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
        nodes: what is there.
        own_nodes: never put two logical nodes on one physical node.
        segment_size: place logical nodes in groups of this many.
        deadline: when to stop looking, as of `time.monotonic`; None for the limit of work alone.

    Returns:
        As `plan` and `never_fits` together, with no more work than is needed for both.
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
    """Return whether all that is asked for is free on all nodes."""
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
        found = _in_segments(ordered, site, nodes, segment_size, deadline)
    else:
        found = _found(ordered, site, range(len(nodes)), own_nodes, deadline)
    if found is None:
        return None
    return {ask.node_idx: tuple([nodes[at].node_id for at in found[ask.node_idx]]) for ask in asks}


# Per logical node, the node of each of its bundles as a number in physical order.
Found = dict[int, list[int]]


def _found(
    asks: Sequence[Ask], site: Site, positions: Sequence[int], own_nodes: bool, deadline: float | None
) -> Found | None:
    found = _in_order(asks, site, positions)
    if found is None:
        try:
            found = _matched(asks, site, positions, deadline)
        except Undecided:
            if own_nodes:
                raise
    if found is None and not own_nodes:
        found = _searched(asks, site, positions, own=False, deadline=deadline)
    return None if found is None else _by_shape(asks, site, found)


def _in_order(asks: Sequence[Ask], site: Site, positions: Sequence[int]) -> Found | None:
    """Each ask, as it comes, on the first nodes nobody else in this plan uses."""
    used: set[int] = set()
    # A node too small for a shape stays too small for it, and a used one stays used: every shape walks them once.
    walks: dict[tuple[Amounts, int, int, bool], Iterator[int]] = {}

    def unused(shape: Shape, least: int = 1, roomiest: bool = False) -> Iterator[int]:
        key = (shape.bundle, shape.selector, least, roomiest)
        if key not in walks:
            fits = site.fits(shape)[1]
            order = sorted(positions, key=lambda at: -fits[at]) if roomiest else positions
            walks[key] = (at for at in order if fits[at] >= least and at not in used)
        return walks[key]

    found: Found = {}
    for ask in asks:
        shape = site.shapes[site.shape_of[ask.node_idx]]
        picked: list[int] = []
        if shape.strategy in ("STRICT_PACK", "PACK"):
            picked = [at for at in islice(unused(shape, ask.count), 1) for _ in range(ask.count)]
        if shape.strategy == "PACK" and not picked:
            # As few as possible: the roomiest first.
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


def _matched(asks: Sequence[Ask], site: Site, positions: Sequence[int], deadline: float | None) -> Found | None:
    """Nodes of its own for each ask, whenever there is such a plan."""
    shapes = sorted({site.shape_of[ask.node_idx] for ask in asks}, key=lambda s: (-site.shapes[s].least, s))
    if any(site.shapes[s].strategy in ("PACK", "SPREAD") for s in shapes):
        return _searched(asks, site, positions, own=True, deadline=deadline)
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
    found: Found = {}
    for ask in asks:
        s = site.shape_of[ask.node_idx]
        least = site.shapes[s].least
        found[ask.node_idx] = [at for at in islice(taken[s], ask.count // least) for _ in range(least)]
    return found


def _searched(
    asks: Sequence[Ask], site: Site, positions: Sequence[int], *, own: bool, deadline: float | None
) -> Found | None:
    """Whatever plan there is, if it is found with bounded work."""
    members: dict[int, list[int]] = {}
    for ask in asks:
        members.setdefault(site.shape_of[ask.node_idx], []).append(ask.node_idx)
    rooms: dict[Room, list[int]] = {}
    for at in positions:
        rooms.setdefault(site.rooms[site.kind_of[at]], []).append(at)
    largest = [max(column, default=0) for column in zip(*(room[0] for room in rooms), strict=True)]

    def size(s: int) -> tuple[float, int, int]:
        """The part that an ask takes of the largest node, so that amounts of different resources compare."""
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


def _in_segments(
    asks: Sequence[Ask], site: Site, nodes: Sequence[Node], segment_size: int, deadline: float | None
) -> Found | None:
    check_size("segment_size", segment_size)
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
    found: Found = {}
    for members, of_domain in zip(domains.values(), chosen, strict=True):
        here = [ask for b in of_domain for ask in blocks[b]]
        part = _found(here, site, members, True, None)
        assert part is not None, "place_blocks has checked it"
        found.update(part)
    return found


def _by_shape(asks: Sequence[Ask], site: Site, found: Found) -> Found:
    """Hand the nodes found for each shape out in physical order."""
    members: dict[int, list[int]] = {}
    for ask in asks:
        members.setdefault(site.shape_of[ask.node_idx], []).append(ask.node_idx)
    ordered: Found = {}
    for numbers in members.values():
        ordered.update(zip(numbers, sorted(found[number] for number in numbers), strict=True))
    return ordered

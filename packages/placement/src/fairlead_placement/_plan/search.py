# SPDX-License-Identifier: Apache-2.0
"""Searches for a placement of all asks. The result is exact unless the budget is spent first.

Nodes that have the same amounts are interchangeable, and so are asks of the same shape. The search counts kinds of
nodes, not nodes, so its cost depends on how different nodes and asks are, and hardly on the number of nodes.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from .._model import Strategy


class Undecided(Exception):
    """The budget was spent before the answer was found."""


class Budget:
    """A limit of work that several searches share. It is counted, not timed, so that results are reproducible."""

    def __init__(self, steps: int, deadline: float | None = None) -> None:
        self._left = steps
        self._deadline = deadline

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0 or (self._deadline is not None and time.monotonic() > self._deadline):
            raise Undecided


Amounts = tuple[int, ...]
Room = tuple[Amounts, tuple[bool, ...]]
"""What nodes of one kind have left, and which selectors they match."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The shape of interchangeable asks, with amounts as the planner counts them.

    An ask is divided into units that are placed one by one: its bundles, or all of them together if they have to be on
    one node.
    """

    number: int
    count: int
    bundle: Amounts
    selector: int
    strategy: Strategy

    @cached_property
    def least(self) -> int:
        """The bundles of a unit: the smallest number that a node must be able to hold."""
        return self.count if self.strategy == "STRICT_PACK" else 1

    @cached_property
    def units(self) -> int:
        """The units of an ask."""
        return self.count // self.least

    @cached_property
    def unit(self) -> Amounts:
        """How much of each resource a unit takes."""
        return tuple(n * self.least for n in self.bundle)


def count_units(room: Room, unit: Amounts, selector: int) -> int:
    """Return how many units of these amounts a node with this room holds."""
    amounts, matched = room
    return min((a // n for a, n in zip(amounts, unit, strict=True) if n), default=0) if matched[selector] else 0


class Search:
    """Places every unit of every ask, depth first, and does not try a position again that has failed.

    A position is the number of nodes of each kind. A node that the current ask uses already is of a kind of its own.
    `asks` is how many asks each shape of `wants` has, the most demanding first. With `own`, no two asks use one node.
    """

    def __init__(
        self,
        wants: Sequence[Shape],
        asks: Sequence[int],
        rooms: Mapping[Room, Sequence[int]],
        *,
        own: bool,
        budget: Budget,
    ) -> None:
        self.wants, self.asks, self.own, self.budget = wants, asks, own, budget
        # (want, its units left in this ask, its asks after this one) of each step.
        self.steps = [
            (w, left, after)
            for w, want in enumerate(wants)
            for after in reversed(range(asks[w]))
            for left in range(want.units, 0, -1)
        ]
        # How much of each resource this want and all after it take.
        self.demands = [[0] * len(want.unit) for want in wants[:1]] or [[]]
        for want, count in zip(reversed(wants), reversed(asks), strict=True):
            total = [a + u * want.units * count for a, u in zip(self.demands[0], want.unit, strict=True)]
            self.demands.insert(0, total)
        # Kinds are numbered as they come up.
        self.numbers: dict[tuple[Room, bool], int] = {}
        self.kinds: list[tuple[Room, bool]] = []
        self.fits: list[list[int]] = []  # kind -> want -> units
        self.useful: list[int] = []  # kind -> the last want it has room for, or -1
        self.after: dict[tuple[int, int], int] = {}  # (kind, want) -> the kind it becomes with a unit
        self.free: dict[int, int] = {}  # kind -> the same, not used by the ask at hand
        self.failed: set[tuple[int, frozenset[tuple[int, int]]]] = set()
        self.nodes: dict[int, list[int]] = {}
        self.position: dict[int, int] = {}
        for room, nodes in _cap(rooms, wants).items():
            kind = self.number(room, False)
            if self.useful[kind] >= 0:
                self.nodes[kind] = list(nodes)
                self.position[kind] = len(nodes)

    def number(self, room: Room, mine: bool) -> int:
        kind = self.numbers.setdefault((room, mine), len(self.kinds))
        if kind == len(self.kinds):
            self.kinds.append((room, mine))
            fits = [count_units(room, want.unit, want.selector) for want in self.wants]
            self.fits.append(fits)
            self.useful.append(max((w for w, units in enumerate(fits) if units), default=-1))
        return kind

    def unmarked(self, kind: int) -> int:
        if kind not in self.free:
            self.free[kind] = self.number(self.kinds[kind][0], False)
        return self.free[kind]

    def run(self) -> list[list[list[int]]] | None:
        """Return the node of each unit, for each want and each of its asks; None only if they cannot be placed."""
        failed = self.failed
        open_choices: list[Iterator[int]] = []
        trail: list[tuple[int, int, dict[int, int]]] = []
        while len(trail) < len(self.steps):
            at = len(trail)
            if len(open_choices) == at:
                # Before the first failure no key is needed.
                known = bool(failed) and self.key(at) in failed
                open_choices.append(iter([] if known else self.choices(at)))
            kind = next(open_choices[-1], None)
            if kind is not None:
                trail.append(self.take(at, kind))
                continue
            failed.add(self.key(at))
            open_choices.pop()
            if not trail:
                return None
            self.apply(trail.pop()[2], -1)
        return self.replay(trail)

    def choices(self, at: int) -> list[int]:
        """Return the kinds of nodes that may take a unit, the most promising first."""
        w, left, _ = self.steps[at]
        # A search without failures may take a step per bundle. A search that turns back costs more.
        self.budget.spend(8 * bool(self.failed) + len(self.position) * (len(self.wants) - w + 1))
        if not self.hopeful(at):
            return []
        strategy = self.wants[w].strategy
        fits, kinds = self.fits, self.kinds

        def promise(kind: int) -> tuple[object, ...]:
            room, mine = kinds[kind]
            units = fits[kind][w]
            if strategy == "STRICT_PACK":
                return (units, room)
            if strategy == "PACK":
                # As few nodes as possible: a node in use, or else one that holds all of the rest, or else the roomiest.
                return (not mine, units < left, units if units >= left else -units, room)
            # Nodes are used up evenly: STRICT_SPREAD needs many nodes with a little room, not a few with much.
            return (mine, -units, room)

        possible = [
            kind for kind in self.position if fits[kind][w] and not (strategy == "STRICT_SPREAD" and kinds[kind][1])
        ]
        possible.sort(key=promise)
        if strategy == "PACK" and self.own and possible and kinds[possible[0]][1]:
            del possible[1:]  # nobody else can use what is left there
        return possible

    def hopeful(self, at: int) -> bool:
        """Return whether each want would still fit alone, and all of them together if nodes could be joined."""
        w, left, after = self.steps[at]
        wants = self.wants
        for v in range(w, len(wants)):
            want = wants[v]
            asks = self.asks[v] if v > w else after if self.own else after + 1
            needed = want.units * asks
            if v == w and not self.own:
                needed -= want.units - left
            # The largest number of units on one node.
            most = needed
            if want.strategy == "STRICT_SPREAD":
                most = 1 if self.own else asks
            elif self.own:
                most = want.units
            offered = sum(
                count * min(self.fits[kind][v], most)
                for kind, count in self.position.items()
                if not (self.own and self.kinds[kind][1])
            )
            if offered < needed:
                return False
        done = wants[w].units * (self.asks[w] - after) - left
        for r, demand in enumerate(self.demands[w]):
            there = sum(n * self.kinds[kind][0][0][r] for kind, n in self.position.items() if self.useful[kind] >= w)
            if there < demand - done * wants[w].unit[r]:
                return False
        return True

    def take(self, at: int, kind: int) -> tuple[int, int, dict[int, int]]:
        """Put a unit on a node of a kind. Return that kind, the node's new kind, and the change of the position."""
        w, left, _ = self.steps[at]
        to = self.after.get((kind, w), -1)
        if to < 0:
            amounts, labels = self.kinds[kind][0]
            room = (tuple(a - u for a, u in zip(amounts, self.wants[w].unit, strict=True)), labels)
            to = self.after[kind, w] = self.number(room, True)
        changes = {kind: -1}
        changes[to] = changes.get(to, 0) + 1
        if left == 1:  # the ask ends: its nodes can be used again, or not at all
            for used in {to, *(k for k in self.position if self.kinds[k][1])}:
                count = self.position.get(used, 0) + changes.get(used, 0)
                changes[used] = changes.get(used, 0) - count
                if not self.own:
                    free = self.unmarked(used)
                    changes[free] = changes.get(free, 0) + count
        # A node without room for any later want is dropped.
        kept = {k: n for k, n in changes.items() if n and self.useful[k] >= w}
        self.apply(kept, 1)
        return kind, to, kept

    def apply(self, changes: Mapping[int, int], sign: int) -> None:
        for kind, count in changes.items():
            now = self.position.get(kind, 0) + sign * count
            if now:
                self.position[kind] = now
            else:
                self.position.pop(kind, None)

    def key(self, at: int) -> tuple[int, frozenset[tuple[int, int]]]:
        """Return a key for the position. Positions with the same key have the same outcome."""
        w = self.steps[at][0]
        position: Mapping[int, int] = self.position
        if not self.own and self.wants[w].strategy != "STRICT_SPREAD":
            merged: Counter[int] = Counter()
            for kind, count in self.position.items():
                merged[self.unmarked(kind)] += count
            position = merged
        return at, frozenset((kind, count) for kind, count in position.items() if self.useful[kind] >= w)

    def replay(self, trail: Sequence[tuple[int, int, Mapping[int, int]]]) -> list[list[list[int]]]:
        """Return single nodes for the chosen kinds, in physical order among equal nodes."""
        nodes = self.nodes
        for equals in nodes.values():
            heapify(equals)
        found: list[list[list[int]]] = [[] for _ in self.wants]
        mine: set[int] = set()
        for (w, left, _), (kind, to, _) in zip(self.steps, trail, strict=True):
            if left == self.wants[w].units:
                found[w].append([])
            node = heappop(nodes[kind])
            found[w][-1].append(node)
            heappush(nodes.setdefault(to, []), node)
            mine.add(to)
            if left == 1:
                for used in mine:
                    free = self.unmarked(used)
                    for node in nodes.pop(used):
                        if not self.own:
                            heappush(nodes.setdefault(free, []), node)
                mine.clear()
        return found


def _cap(rooms: Mapping[Room, Sequence[int]], wants: Sequence[Shape]) -> dict[Room, list[int]]:
    """Cap amounts that no plan can use: with 8 GPUs left and a CPU per GPU, 90 CPUs are as good as 100.

    More nodes are then of one kind. If every unit takes some of q, a node can give only as much of r as its amount of q
    allows.
    """
    resources = range(len(wants[0].unit)) if wants else range(0)
    ratios = [
        (r, q, {(want.unit[r], want.unit[q]) for want in wants})
        for r in resources
        for q in resources
        if r != q and all(want.unit[q] for want in wants)
    ]
    capped: dict[Room, list[int]] = {}
    for (amounts, labels), nodes in rooms.items():
        most = list(amounts)
        for r, q, units in ratios:
            most[r] = min(most[r], max(amounts[q] * of_r // of_q for of_r, of_q in units))
        capped.setdefault((tuple(most), labels), []).extend(nodes)
    return capped


def match(needs: Sequence[int], profiles: Mapping[tuple[int, ...], int]) -> list[Counter[tuple[int, ...]]] | None:
    """Assign nodes to wants so that no two wants share a node: bipartite matching between kinds.

    Each want, the most demanding first, `needs` so many nodes. A profile is the worth of a node to each want, or 0.
    Return the number of nodes of each profile for each want, from those worth least to it, or None if it is impossible.
    A want may take the only nodes that another can use, and then has to take others: the matching follows shortest
    augmenting paths.
    """
    unused = dict(profiles)
    usable = [sorted((p for p in profiles if p[want]), key=lambda p: p[want]) for want in range(len(needs))]
    tightest = [nodes[::-1] for nodes in usable]
    given: list[Counter[tuple[int, ...]]] = [Counter() for _ in needs]
    holders: dict[tuple[int, ...], set[int]] = {profile: set() for profile in profiles}
    for want, need in enumerate(needs):
        while need:
            # Which want would have to give a node of which profile to which other, until one can take an unused node.
            reached: dict[int, tuple[int, tuple[int, ...]] | None] = {want: None}
            queue = deque([want])
            while queue:
                last = queue.popleft()
                while tightest[last] and not unused[tightest[last][-1]]:
                    tightest[last].pop()  # assigned nodes may change their want, but stay assigned
                if tightest[last]:
                    break
                for profile in usable[last]:
                    for other in holders[profile].difference(reached):
                        reached[other] = (last, profile)
                        queue.append(other)
            else:
                return None
            end = tightest[last][-1]
            amount = min(need, unused[end])
            step = reached[last]
            giver = last
            while step is not None:
                amount = min(amount, given[giver][step[1]])
                giver, step = step[0], reached[step[0]]
            unused[end] -= amount
            taken, taker = end, last
            while True:
                given[taker][taken] += amount
                holders[taken].add(taker)
                step = reached[taker]
                if step is None:
                    break
                given[taker][step[1]] -= amount
                if not given[taker][step[1]]:
                    holders[step[1]].discard(taker)
                taker, taken = step
            need -= amount
    return given

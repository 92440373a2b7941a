# SPDX-License-Identifier: Apache-2.0
"""Whether asks can be placed at all, and where: a search that is exact as far as its budget goes.

Nodes that hold the same are interchangeable, and so are asks that want the same. The search counts kinds of nodes, not
nodes, so its cost depends on how different nodes and asks are, hardly on how many nodes there are.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .model import Strategy

__all__ = ["Amounts", "Budget", "Room", "Undecided", "Want", "search"]


class Undecided(Exception):
    """The work limit was reached before the answer."""


class Budget:
    """A work limit that several searches share. Counted, not timed: the same question has the same answer.

    Args:
        steps: how much work.
        deadline: when to give up in any case, as of `time.monotonic`; None for no such limit.
    """

    def __init__(self, steps: int, deadline: float | None = None) -> None:
        self._left = steps
        self._deadline = deadline

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0 or (self._deadline is not None and time.monotonic() > self._deadline):
            raise Undecided


@dataclass(frozen=True)
class Want:
    """Asks of one shape, cut into the units that are placed one by one.

    A unit is a bundle, or all bundles together when they have to be on one node.
    """

    strategy: Strategy
    unit: tuple[int, ...]
    """How much of each resource."""
    selector: int
    units: int
    """Per ask."""
    asks: int


Amounts = tuple[int, ...]
Room = tuple[Amounts, tuple[bool, ...]]
"""What nodes of one kind have left, and which selectors they match."""


def search(
    wants: Sequence[Want], rooms: Mapping[Room, Sequence[int]], *, own: bool, budget: Budget
) -> list[list[list[int]]] | None:
    """Place every unit of every ask.

    Args:
        wants: what is asked; the most demanding first.
        rooms: the nodes of each kind, as numbers.
        own: no two asks may use one node.
        budget: how much to try.

    Returns:
        For each want and each of its asks, the node of each unit; None only if there is no way.

    Raises:
        Undecided: the budget was spent first.
    """
    return _Search(wants, rooms, own, budget).run()


class _Search:
    """Depth first, unit by unit; what failed once from the same position is not tried again.

    A position is how many nodes there are of each kind. A node that the ask at hand uses already is a kind of its own.
    """

    def __init__(self, wants: Sequence[Want], rooms: Mapping[Room, Sequence[int]], own: bool, budget: Budget) -> None:
        self.wants = wants
        self.own = own
        self.budget = budget
        # (want, its units left in this ask, its asks after this one) of each step.
        self.steps = [
            (w, left, after)
            for w, want in enumerate(wants)
            for after in reversed(range(want.asks))
            for left in range(want.units, 0, -1)
        ]
        # How much all wants from this one on take of each resource.
        self.demands = [[0] * len(want.unit) for want in wants[:1]] or [[]]
        for want in reversed(wants):
            total = [a + u * want.units * want.asks for a, u in zip(self.demands[0], want.unit, strict=True)]
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
        for room, nodes in _capped(rooms, wants).items():
            kind = self.number(room, False)
            if self.useful[kind] >= 0:
                self.nodes[kind] = list(nodes)
                self.position[kind] = len(nodes)

    def number(self, room: Room, mine: bool) -> int:
        known = self.numbers.get((room, mine))
        if known is None:
            known = self.numbers[room, mine] = len(self.kinds)
            self.kinds.append((room, mine))
            fits = [
                min((a // u for a, u in zip(room[0], want.unit, strict=True) if u), default=0)
                if room[1][want.selector]
                else 0
                for want in self.wants
            ]
            self.fits.append(fits)
            self.useful.append(max((w for w, units in enumerate(fits) if units), default=-1))
        return known

    def unmarked(self, kind: int) -> int:
        known = self.free.get(kind, -1)
        if known < 0:
            known = self.free[kind] = self.number(self.kinds[kind][0], False)
        return known

    def run(self) -> list[list[list[int]]] | None:
        failed = self.failed
        open_choices: list[Iterator[int]] = []
        trail: list[tuple[int, int, dict[int, int]]] = []
        while len(trail) < len(self.steps):
            at = len(trail)
            if len(open_choices) == at:
                # Nothing has failed on the first way down: no key is needed.
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
        """The kinds of nodes that may take a unit, the most promising first."""
        w, left, _ = self.steps[at]
        # A search that goes straight to a plan may be as long as there are bundles. One that turns back may not.
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
                # As few nodes as possible: one used already, else one for all of the rest, else the roomiest.
                return (not mine, units < left, units if units >= left else -units, room)
            # Used up evenly: the strict one needs many nodes with a little room, not few with much.
            return (mine, -units, room)

        possible = [
            kind for kind in self.position if fits[kind][w] and not (strategy == "STRICT_SPREAD" and kinds[kind][1])
        ]
        possible.sort(key=promise)
        if strategy == "PACK" and self.own and possible and kinds[possible[0]][1]:
            del possible[1:]  # nobody else can use what is left there
        return possible

    def hopeful(self, at: int) -> bool:
        """Whether each want would still fit if it were alone, and all of them if nodes could be joined."""
        w, left, after = self.steps[at]
        wants = self.wants
        for v in range(w, len(wants)):
            want = wants[v]
            asks = want.asks if v > w else after if self.own else after + 1
            needed = want.units * asks
            if v == w and not self.own:
                needed -= want.units - left
            # At most so many units on one node.
            most = needed
            if want.strategy == "STRICT_SPREAD":
                most = 1 if self.own else asks
            elif self.own:
                most = want.units
            for kind, count in self.position.items():
                if needed <= 0:
                    break
                if not (self.own and self.kinds[kind][1]):
                    needed -= count * min(self.fits[kind][v], most)
            if needed > 0:
                return False
        done = wants[w].units * (wants[w].asks - after) - left
        for r, demand in enumerate(self.demands[w]):
            needed = demand - done * wants[w].unit[r]
            for kind, count in self.position.items():
                if needed <= 0:
                    break
                if self.useful[kind] >= w:
                    needed -= count * self.kinds[kind][0][0][r]
            if needed > 0:
                return False
        return True

    def take(self, at: int, kind: int) -> tuple[int, int, dict[int, int]]:
        """Put a unit on a node of this kind; the kind that the node becomes, and how the position changed."""
        w, left, _ = self.steps[at]
        to = self.after.get((kind, w), -1)
        if to < 0:
            amounts, labels = self.kinds[kind][0]
            room = (tuple(a - u for a, u in zip(amounts, self.wants[w].unit, strict=True)), labels)
            to = self.after[kind, w] = self.number(room, True)
        changes = {kind: -1}
        changes[to] = changes.get(to, 0) + 1
        if left == 1:  # the ask ends: nodes are nobody's again, or out of the game
            for used in {to, *(k for k in self.position if self.kinds[k][1])}:
                count = self.position.get(used, 0) + changes.get(used, 0)
                changes[used] = changes.get(used, 0) - count
                if not self.own:
                    free = self.unmarked(used)
                    changes[free] = changes.get(free, 0) + count
        # A node with no room for what is still to come is forgotten.
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
        """Positions with one key have one outcome."""
        w = self.steps[at][0]
        position: Mapping[int, int] = self.position
        if not self.own and self.wants[w].strategy != "STRICT_SPREAD":
            merged: Counter[int] = Counter()
            for kind, count in self.position.items():
                merged[self.unmarked(kind)] += count
            position = merged
        return at, frozenset((kind, count) for kind, count in position.items() if self.useful[kind] >= w)

    def replay(self, trail: Sequence[tuple[int, int, Mapping[int, int]]]) -> list[list[list[int]]]:
        """Single nodes for the kinds that were chosen, in physical order among equals."""
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


def _capped(rooms: Mapping[Room, Sequence[int]], wants: Sequence[Want]) -> dict[Room, list[int]]:
    """Forget what no plan can use: with 8 GPUs left and a CPU per GPU, 90 CPUs are as good as 100.

    More nodes are then of one kind. If every unit takes some of q, what a node can give of r is limited by what it
    has of q.
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

# SPDX-License-Identifier: Apache-2.0
"""Decides which topology domain each group of logical nodes goes to."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from .._model import group_pairs
from .search import Budget, match

Profile = tuple[int, ...]


def place_blocks(
    blocks: Sequence[Sequence[int]], domains: Sequence[Mapping[Profile, int]], budget: Budget
) -> list[list[int]] | None:
    """Choose a domain for each block, so that all its asks get nodes of their own there.

    A block is the shapes of its asks. A profile is how many bundles of each shape a node holds, or 0. Return the blocks
    of each domain; None only if they cannot be placed. Blocks of the same shapes take domains in order.
    """
    kinds = group_pairs((tuple(sorted(Counter(block).items())), at) for at, block in enumerate(blocks))
    counts = _Domains([dict(kind) for kind in kinds], domains, budget).fill([len(at) for at in kinds.values()])
    if counts is None:
        return None
    left = [iter(at) for at in kinds.values()]
    return [sorted(next(left[k]) for k, count in enumerate(row) for _ in range(count)) for row in counts]


def _add(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


class _Domains:
    """Fills one domain after the other, as full as possible: blocks that fit into fewer domains also fit into more."""

    def __init__(
        self, kinds: Sequence[Mapping[int, int]], domains: Sequence[Mapping[Profile, int]], budget: Budget
    ) -> None:
        self.kinds, self.domains, self.budget = kinds, domains, budget
        self.keys = [tuple(sorted(domain.items())) for domain in domains]
        self.known: dict[tuple[object, tuple[int, ...]], bool] = {}
        # How many blocks a domain has nodes for, and how many of each kind if it takes no other.
        size = max((sum(kind.values()) for kind in kinds), default=1)
        self.space = [sum(n for profile, n in domain.items() if any(profile)) // size for domain in domains]
        self.alone = [self.only(at) for at in range(len(domains))]
        # The same for all domains from this one on.
        self.spaces = list(accumulate(reversed(self.space), initial=0))[::-1]
        self.most = list(accumulate(reversed(self.alone), _add, initial=[0] * len(kinds)))[::-1]

    def only(self, at: int) -> list[int]:
        offered = {shape for profile in self.domains[at] for shape, units in enumerate(profile) if units}
        nothing = [0] * len(self.kinds)
        return [
            self.room(at, nothing, k, self.space[at]) if offered.issuperset(kind) else 0
            for k, kind in enumerate(self.kinds)
        ]

    def fill(self, wanted: Sequence[int]) -> list[list[int]] | None:
        failed: set[tuple[int, tuple[int, ...]]] = set()
        open_choices: list[Iterator[list[int]]] = []
        rows: list[list[int]] = []
        left = list(wanted)
        while any(left):
            at = len(rows)
            if len(open_choices) == at:
                hopeless = (
                    at == len(self.domains)
                    or sum(left) > self.spaces[at]
                    or any(n > most for n, most in zip(left, self.most[at], strict=True))
                    or (at, tuple(left)) in failed
                )
                open_choices.append(iter(()) if hopeless else self.choices(at, left))
            row = next(open_choices[-1], None)
            if row is not None:
                rows.append(row)
                left = [n - taken for n, taken in zip(left, row, strict=True)]
                continue
            failed.add((at, tuple(left)))
            open_choices.pop()
            if not rows:
                return None
            left = _add(left, rows.pop())
        return rows + [[0] * len(left)] * (len(self.domains) - len(rows))

    def choices(self, at: int, left: Sequence[int]) -> Iterator[list[int]]:
        """Yield how many blocks of each kind a domain may take. The first kinds vary last, from the most down."""
        possible = [kind for kind, most in enumerate(self.alone[at]) if most and left[kind]]
        row = [0] * len(left)
        turn: int | None = 0
        while turn is not None:
            for kind in possible[turn:]:
                row[kind] = 0
            for kind in possible[turn:]:
                space = self.space[at] - sum(row)
                row[kind] = self.room(at, row, kind, min(left[kind], self.alone[at][kind], space))
            yield list(row)
            # The next row has one block less of the last kind that has any, and again the most of the kinds after it.
            turn = next((i for i in reversed(range(len(possible) - 1)) if row[possible[i]]), None)
            if turn is not None:
                row[possible[turn]] -= 1
                turn += 1

    def room(self, at: int, row: Sequence[int], kind: int, limit: int) -> int:
        """Return how many blocks of a kind a domain can hold besides the others of a row."""
        return bisect_left(
            range(1, limit + 1), True, key=lambda count: not self.holds(at, [*row[:kind], count, *row[kind + 1 :]])
        )

    def holds(self, at: int, row: Sequence[int]) -> bool:
        key = (self.keys[at], tuple(row))
        self.budget.spend(len(row))
        if key not in self.known:
            self.budget.spend(20 + len(self.keys[at]) * sum(map(bool, row)))
            needs: Counter[int] = Counter()
            for kind, count in zip(self.kinds, row, strict=True):
                for shape, asks in kind.items():
                    needs[shape] += asks * count
            shapes = sorted(shape for shape in needs if needs[shape])
            profiles: Counter[Profile] = Counter()
            for profile, count in self.domains[at].items():
                profiles[tuple(profile[shape] for shape in shapes)] += count
            self.known[key] = match([needs[shape] for shape in shapes], profiles) is not None
        return self.known[key]

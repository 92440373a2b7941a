# SPDX-License-Identifier: Apache-2.0
"""Asks and nodes as the planner counts them.

Amounts are compared in ten-thousandths, the precision Ray keeps, so that 0.1 * 3 fits in 0.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .labels import matches
from .model import PRECISION, Ask, Node, Strategy
from .search import Amounts, Room

__all__ = ["Shape", "Site"]


@dataclass
class Shape:
    """Asks that are interchangeable, with amounts as the planner counts them."""

    count: int
    bundle: Amounts
    selector: int
    strategy: Strategy

    @property
    def least(self) -> int:
        """How many bundles a node must hold to be of use."""
        return self.count if self.strategy == "STRICT_PACK" else 1


class Site:
    """Asks by shape, and nodes (numbered in physical order) by what they have for those asks."""

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
        """How many bundles of this shape a node holds, by kind and by node."""
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
        """Nodes of each group by what they are worth to each shape: how many bundles they hold, 0 if too few."""
        worth = [
            [units if units >= self.shapes[s].least else 0 for units in self.fits(self.shapes[s])[0]] for s in shapes
        ]
        by_kind = list(zip(*worth, strict=True)) if worth else [()] * len(self.rooms)
        found: list[dict[tuple[int, ...], list[int]]] = [{} for _ in groups]
        for group, profiles in zip(groups, found, strict=True):
            for at in group:
                profiles.setdefault(by_kind[self.kind_of[at]], []).append(at)
        return found

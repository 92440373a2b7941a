# SPDX-License-Identifier: Apache-2.0
"""The values that planning works on: nodes, and requests for bundles on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from .labels import check_selector

__all__ = ["PRECISION", "STRATEGIES", "Ask", "Node", "Strategy"]

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
# Ray keeps amounts of resources in ten-thousandths.
PRECISION = 10_000


@dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        node_id: Ray's id of it, hexadecimal.
        ip: its address.
        total: what it has of each resource.
        free: the free amount of each resource. A resource that is used up may be missing.
        labels: its labels.
    """

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Ask:
    """What is asked for one logical node.

    Attributes:
        node_idx: number of the logical node.
        count: how many bundles.
        bundle: what each of them holds.
        strategy: how they are laid out: "STRICT_PACK", "PACK", "SPREAD" or "STRICT_SPREAD".
        labels: which nodes may be used, in Ray's syntax.
    """

    node_idx: int
    count: int
    bundle: Mapping[str, float]
    strategy: Strategy = "STRICT_PACK"
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_selector(self.labels)

    @property
    def shape(self) -> tuple[object, ...]:
        """Asks of one shape are interchangeable."""
        return (self.count, tuple(sorted(self.bundle.items())), self.strategy, tuple(sorted(self.labels.items())))

# SPDX-License-Identifier: Apache-2.0
"""Which way tensors go: layouts, plan, orders and transports, made again only when something has changed."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ._descriptions import Selection, Tensors, check_dtypes, read_side, with_ranks
from ._layout import Layout
from ._orders import Orders, make_orders
from ._plan import TransferPlan, find_mismatches, reshard
from ._report import TransferExplanation
from ._side import Side
from .exceptions import LayoutMismatchError

Transport = Literal["auto", "shared_memory", "object_store"]


@dataclass(frozen=True)
class Route:
    """A plan and the orders that carry it out.

    Attributes:
        plan: who sends which piece to whom.
        orders: for the workers.
        sources: the source ranks that take part.
        targets: the target ranks that take part.
    """

    plan: TransferPlan
    orders: Orders
    sources: frozenset[int]
    targets: frozenset[int]


class Router:
    """Makes the routes of a link.

    Args:
        source: the side that sends.
        target: the side that receives.
        selection: which tensors travel, and how.
        transport: as of `Link`.

    Attributes:
        kept: the route of the last transfer, if nothing has changed since.
        verified: the route by which digests were compared last.
    """

    def __init__(self, source: Side, target: Side, selection: Selection, transport: Transport) -> None:
        self._source = source
        self._target = target
        self._selection = selection
        self._transport = transport
        self._numbers = 0
        self._blocked: dict[tuple[int, int], str] = {}
        self.kept: Route | None = None
        self.verified: Route | None = None

    def block(self, source: int, target: int, reason: str) -> bool:
        """Note that a pair of ranks cannot share memory; return whether another transport may be taken."""
        self._blocked[source, target] = reason
        self.kept = None
        return self._transport == "auto"

    def make(self, without: Collection[int] = ()) -> Route:
        """Make the route from the source to all target ranks, and keep it.

        Args:
            without: source ranks that take no part.

        Raises:
            LayoutMismatchError: the tensors do not fit.
        """
        source, target = self._source, self._target
        sources = frozenset(range(len(source.members))) - frozenset(without)
        held = self._read(source, sources, renamed=True)
        if target.method is None:
            wanted = whole_tensors(held, len(target.members))
        else:
            wanted = self._read(target, range(len(target.members)))
        route = self._route(source, held, wanted, sources, range(len(target.members)))
        self.kept = route if not without else None
        return route

    def make_from_replicas(self, replicas: Side, good: Collection[int], ranks: Collection[int]) -> Route:
        """Make the route from target ranks that hold a version to others.

        Raises:
            LayoutMismatchError: nobody holds some of the tensors.
        """
        held = self._read(replicas, good)
        wanted = with_ranks(self._read(self._target, ranks), ranks)
        return self._route(replicas, held, wanted, good, ranks)

    def explain(self, route: Route) -> TransferExplanation:
        """Describe a route for people."""
        reasons = {
            "shared_memory": "the ranks are on one node, and the target can open the memory of the source",
            "object_store": "the ranks are on different nodes",
        }
        if self._transport != "auto":
            reasons[self._transport] = f"transport={self._transport!r}"
        elif self._blocked:
            (source, target), reason = next(iter(self._blocked.items()))
            reasons["object_store"] += f", or cannot share memory (source {source}, target {target}: {reason})"
        return TransferExplanation(route.plan, route.orders.transports, reasons)

    def _read(self, side: Side, ranks: Collection[int], *, renamed: bool = False) -> Tensors:
        described = [side.ends[one.rank].described if one.rank in ranks else None for one in side.members]
        name = "source" if side.name == "source" else "target"
        return read_side(name, described, self._selection, renamed=renamed)

    def _route(
        self, source: Side, held: Tensors, wanted: Tensors, sources: Collection[int], targets: Collection[int]
    ) -> Route:
        if wrong := check_dtypes(held, wanted, self._selection):
            others = [one for one in find_mismatches(held.layouts, wanted.layouts) if one.name not in wrong]
            raise LayoutMismatchError((*wrong.values(), *others))
        plan = reshard(
            held.layouts,
            wanted.layouts,
            source_nodes=source.nodes,
            target_nodes=self._target.nodes,
            same_processes=source.name == "source" and source.group is self._target.group,
        )
        dtypes = {name: self._selection.travelling(dtype) for name, dtype in held.dtypes.items()}
        self._numbers += 1
        nodes = source.nodes, self._target.nodes

        def transport(sender: int, receiver: int) -> str:
            if self._transport != "auto":
                return self._transport
            shares = nodes[0][sender] == nodes[1][receiver] and (sender, receiver) not in self._blocked
            return "shared_memory" if shares else "object_store"

        orders = make_orders(self._numbers, plan, held, wanted, dtypes, transport)
        return Route(plan, orders, frozenset(sources), frozenset(targets))


def whole_tensors(held: Tensors, ranks: int) -> Tensors:
    """Return the same tensors, each as a whole on each rank."""
    layouts: dict[Layout, Layout] = {
        layout: Layout.replicated(layout.shape, ranks, itemsize=layout.itemsize)
        for layout in set(held.layouts.values())
    }
    names: Iterable[str] = held.layouts
    return Tensors(
        {name: layouts[held.layouts[name]] for name in names}, held.dtypes, {name: name for name in names}, held.library
    )

# SPDX-License-Identifier: Apache-2.0
"""From what is asked to placement groups that Ray has placed, or an error and nothing left behind."""

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from .._nodes.inventory import alive_nodes, read_holders, read_nodes
from .._plan.model import Ask, Node
from .._plan.planner import decide
from .._ray_private import autoscaler_is_there
from .._show.report import Report, Verdict
from .._show.status_line import Waiting
from .._slot import Slot
from ..exceptions import PlacementTimeoutError, ResourceInsufficientError
from .groups import Demand, Reserved, place

__all__ = ["examine", "examine_reserved", "report_of", "reserve"]

POLL_S = (0.05, 0.5)
# A plan is looked for at least so long, even by a reservation that is not to wait: most are found in milliseconds.
LEAST_PLANNING_S = 1.0


def examine(asks: Sequence[Ask], *, unified: bool, segment_size: int | None) -> Report:
    """What would become of a reservation now, without reserving."""
    nodes = read_nodes()
    chosen, impossible = decide(asks, nodes, own_nodes=unified, segment_size=segment_size)
    if chosen is not None:
        return report_of(asks, nodes, "fits", chosen)
    return report_of(asks, nodes, "impossible" if impossible else "taken")


def examine_reserved(asks: Sequence[Ask], slots: Sequence[Slot], reserved_at: float) -> Report:
    """Return what the given slots of a reservation hold, and where."""
    where: dict[int, tuple[str, ...]] = {}
    for slot in slots:
        where[slot.node_idx] = (*where.get(slot.node_idx, ()), slot.node_id)
    return Report(
        # A view has some of the slots only.
        asks=tuple(replace(ask, count=len(where[ask.node_idx])) for ask in asks if ask.node_idx in where),
        nodes=read_nodes(),
        holders=read_holders(),
        verdict="reserved",
        plan=where,
        reserved_at=reserved_at,
        lost=tuple(sorted({slot.node_id for slot in slots} - alive_nodes())),
    )


def reserve(
    asks: Sequence[Ask],
    *,
    name: str,
    unified: bool,
    segment_size: int | None = None,
    timeout_s: float,
    wait_for_nodes_s: float,
    avoid: AbstractSet[str] = frozenset(),
) -> tuple[Reserved, ...]:
    """Reserve every ask: one group each, or one group in all.

    Args:
        asks: what is wanted.
        name: shown in messages and in the groups' names.
        unified: one group, each ask on a physical node of its own.
        segment_size: asks in groups of this many, each group in one topology domain.
        timeout_s: how long to wait for what others hold, and for an autoscaler.
        wait_for_nodes_s: how long to wait for nodes that are joining.
        avoid: ids of nodes that are not used.

    Raises:
        ResourceInsufficientError: the nodes cannot hold it even when idle, also after the wait.
        PlacementTimeoutError: they could, but not within `timeout_s`.
    """
    began = time.monotonic()
    with Waiting(f"Reserving {name or 'a cluster'}") as waiting, Demand(asks, name) as demand:
        pause = POLL_S[0]
        while True:
            nodes = tuple(node for node in read_nodes() if node.node_id not in avoid)
            waited = time.monotonic() - began
            until = max(began + timeout_s, time.monotonic() + LEAST_PLANNING_S)
            chosen, impossible = decide(asks, nodes, own_nodes=unified, segment_size=segment_size, deadline=until)
            if impossible:
                limit = wait_for_nodes_s
                if autoscaler_is_there():
                    limit = max(limit, timeout_s)
                    demand.show()
                if waited >= limit:
                    raise ResourceInsufficientError(
                        _insufficient(asks, unified, segment_size, waited),
                        report_of(asks, nodes, "impossible"),
                    )
                waiting.show("nodes have to join", limit)
            else:
                demand.withdraw()
                limit = timeout_s
                if chosen is not None:
                    placed = place(asks, chosen, name=name, unified=unified)
                    if placed is not None:
                        return placed
                if waited >= limit:
                    raise PlacementTimeoutError(
                        f"Waited {waited:.1f} s: the request would fit on these nodes, but others hold what it needs "
                        "(see below). Release some of it, or wait longer (reserve_timeout_s).",
                        report_of(asks, nodes, "taken"),
                    )
                waiting.show("others hold what it needs", limit)
            time.sleep(max(0.0, min(pause, began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def report_of(
    asks: Sequence[Ask], nodes: Sequence[Node], verdict: Verdict, chosen: Mapping[int, tuple[str, ...]] | None = None
) -> Report:
    """Return what is asked, what these nodes have, and who holds it, with what the planner has found."""
    return Report(
        asks=tuple(asks), nodes=tuple(nodes), holders=read_holders(), verdict=verdict, plan=dict(chosen or {})
    )


def _insufficient(asks: Sequence[Ask], unified: bool, segment_size: int | None, waited: float) -> str:
    bundles = sum(ask.count for ask in asks)
    own = ", each logical node on a physical node of its own" if unified else ""
    segments = f", in segments of {segment_size} nodes of one topology domain" if segment_size else ""
    after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
    return (
        f"The cluster cannot hold {bundles} bundles in {len(asks)} logical node(s){own}{segments}, even when it is "
        f"idle (see below).{after} Ask for less, add nodes, or wait for nodes that are joining (wait_for_nodes_s)."
    )

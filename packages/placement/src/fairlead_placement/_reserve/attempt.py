# SPDX-License-Identifier: Apache-2.0
"""Waits until a request can be placed, or raises an error that explains why it cannot and leaves nothing behind."""

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .._model import Ask, Node, Request, group_pairs
from .._nodes.head import alive_nodes, ask_head, read_holders, read_nodes
from .._plan.planner import decide
from .._ray_private import autoscaler_is_there
from .._show import Report, Verdict, Waiting
from .._slot import Slot
from ..exceptions import PlacementTimeoutError, ResourceInsufficientError
from .groups import Demand, Reserved, place

POLL_S = (0.05, 0.5)


def examine(request: Request) -> Report:
    """Return whether a reservation would succeed now, without reserving."""
    asks, nodes = request.asks, read_nodes()
    chosen, impossible = decide(asks, nodes, own_nodes=request.unified, segment_size=request.segment_size)
    verdict: Verdict = "fits" if chosen is not None else "impossible" if impossible else "taken"
    return report_of(asks, nodes, verdict, chosen)


def examine_reserved(asks: Sequence[Ask], slots: Sequence[Slot], reserved_at: float) -> Report:
    """Return what the given slots of a reservation hold, and where."""
    there = group_pairs((slot.node_idx, slot.node_id) for slot in slots)
    where = {node_idx: tuple(node_ids) for node_idx, node_ids in there.items()}
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


class Attempt:
    """One request and how it is placed: planned on any nodes that can hold it. Its time begins when it is made.

    `held` returns, by node id, what stays taken even if the planner counts nodes as idle: that which is extended.
    """

    waits_for = "others hold what it needs"
    is_shown_to_autoscaler = True

    def __init__(self, request: Request, held: Callable[[], Mapping[str, Mapping[str, float]]] | None = None) -> None:
        self.request = request
        self._held = held
        self.deadline = time.monotonic() + request.timeout_s
        self._chosen: Mapping[int, tuple[str, ...]] | None = None

    def is_impossible(self, nodes: Sequence[Node]) -> bool:
        """Return whether it is certain that the nodes cannot hold the request, even when they are idle."""
        # The planner gets a second even for a reservation that is not to wait. Most plans take milliseconds.
        until = max(self.deadline, time.monotonic() + 1.0)
        request = self.request
        held = self._held() if self._held else {}
        left = [_without(node, held[node.node_id]) if node.node_id in held else node for node in nodes]
        self._chosen, impossible = decide(
            request.asks, left, own_nodes=request.unified, segment_size=request.segment_size, deadline=until
        )
        return impossible

    def place(self, nodes: Sequence[Node]) -> tuple[Reserved, ...] | None:
        """Place the request on nodes that `is_impossible` has seen. Return None, with nothing left, if that fails."""
        return None if self._chosen is None else place(self.request, self._chosen, deadline=self.deadline)

    def explain_impossible(self, nodes: Sequence[Node], waited: float) -> str:
        """Return why the nodes cannot hold the request."""
        request = self.request
        bundles = sum(ask.count for ask in request.asks)
        own = ", each logical node on a physical node of its own" if request.unified else ""
        size = request.segment_size
        segments = f", in segments of {size} nodes of one topology domain" if size else ""
        after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
        when = "when nothing runs beside what it extends" if self._held else "when it is idle"
        return (
            f"The cluster cannot hold {bundles} bundles in {len(request.asks)} logical node(s){own}{segments}, even "
            f"{when} (see below).{after} Ask for less, add nodes, or wait for nodes that are joining "
            "(wait_for_nodes_s)."
        )

    def refuse(self, nodes: Sequence[Node], waited: float) -> ResourceInsufficientError | PlacementTimeoutError:
        """Return the error for a request that others have kept from being placed."""
        return PlacementTimeoutError(
            f"Waited {waited:.1f} s: the request would fit on these nodes, but others hold what it needs (see below). "
            f"Release some of it, or wait longer ({self.request.timeout_name}).",
            report_of(self.request.asks, nodes, "taken"),
        )


def _without(node: Node, held: Mapping[str, float]) -> Node:
    return replace(node, total={name: amount - held.get(name, 0.0) for name, amount in node.total.items()})


def reserve(attempt: Attempt, look: Callable[[], Sequence[Node]] = read_nodes) -> tuple[Reserved, ...]:
    """Place a request, again and again until it succeeds or its time is up, and return its groups.

    `look` returns the nodes that may be used. It is called before each attempt; if it raises, the wait ends.
    """
    request = attempt.request
    began = time.monotonic()
    demand = Demand(request.asks, request.name)
    with Waiting(f"Reserving {request.name or 'a cluster'}") as waiting, contextlib.closing(demand):
        pause = POLL_S[0]
        while True:
            waited = time.monotonic() - began
            nodes = look()
            if attempt.is_impossible(nodes):
                limit = request.wait_for_nodes_s
                if attempt.is_shown_to_autoscaler and ask_head("look for an autoscaler", autoscaler_is_there):
                    limit = max(limit, request.timeout_s)
                    demand.show()
                if waited >= limit:
                    report = report_of(request.asks, nodes, "impossible")
                    raise ResourceInsufficientError(attempt.explain_impossible(nodes, waited), report)
                waiting.show("nodes have to join", limit)
            else:
                demand.close()
                limit = request.timeout_s
                if (placed := attempt.place(nodes)) is not None:
                    return placed
                if waited >= limit:
                    raise attempt.refuse(nodes, waited)
                waiting.show(attempt.waits_for, limit)
            # Not in step with others that do the same: two that hold one node's GPUs at a time both fail.
            time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def report_of(
    asks: Sequence[Ask], nodes: Sequence[Node], verdict: Verdict, chosen: Mapping[int, tuple[str, ...]] | None = None
) -> Report:
    """Return a report of what is requested, what the nodes have, who holds it, and what the planner has found."""
    return Report(
        asks=tuple(asks), nodes=tuple(nodes), holders=read_holders(), verdict=verdict, plan=dict(chosen or {})
    )

# SPDX-License-Identifier: Apache-2.0
"""Waits until a request can be placed, or raises an error that explains why it cannot and leaves nothing behind."""

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from .._model import Ask, Node, Request, group_pairs
from .._nodes.head import alive_nodes, ask_head, read_holders, read_nodes
from .._plan.planner import decide
from .._ray_private import autoscaler_is_there
from .._show import Report, Verdict, Waiting
from .._slot import Slot
from ..exceptions import ResourceInsufficientError
from .gpus import try_gpus
from .groups import Busy, Impossible, Placed, place, remove, show_demand

POLL_S = (0.05, 0.5)


def examine(request: Request) -> Report:
    """Return whether a reservation would succeed now, without reserving."""
    asks, nodes = request.asks, read_nodes()
    chosen, impossible = decide(asks, nodes, own_nodes=request.unified, segment_size=request.segment_size)
    verdict: Verdict = "fits" if chosen is not None else "impossible" if impossible else "taken"
    return _report(asks, nodes, verdict, chosen)


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


def reserve(
    request: Request,
    look: Callable[[], Sequence[Node]] = read_nodes,
    held: Callable[[], Mapping[str, Mapping[str, float]]] | None = None,
) -> Placed:
    """Place a request, again and again until it succeeds or its time is up, and return its groups.

    `look` returns the nodes that may be used. It is called before each attempt; if it raises, the wait ends. `held`
    returns, by node id, what the cluster that is extended holds, even when the planner counts nodes as idle.
    """
    began = time.monotonic()
    deadline, pause = began + request.timeout_s, POLL_S[0]
    names: dict[str, tuple[str, ...]] = {}
    shown: list[PlacementGroup] = []  # to an autoscaler

    def withdraw() -> None:
        if shown:
            remove(shown)
            shown.clear()

    with Waiting(f"Reserving {request.name or 'a cluster'}") as waiting, contextlib.ExitStack() as stack:
        stack.callback(withdraw)
        while True:
            waited = time.monotonic() - began
            nodes = look()
            if request.gpu_ids:
                outcome = try_gpus(request, nodes, names, deadline=deadline)
            else:
                outcome = try_once(request, nodes, held, withdraw, deadline=deadline)
            if isinstance(outcome, Impossible):
                limit = request.wait_for_nodes_s
                if not request.gpu_ids and ask_head("look for an autoscaler", autoscaler_is_there):
                    limit = max(limit, request.timeout_s)
                    shown += () if shown else show_demand(request.asks, request.name)
                if waited >= limit:
                    after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
                    reason = f"{outcome.why}{after} {outcome.advice}"
                    raise ResourceInsufficientError(reason, _report(request.asks, nodes, "impossible"))
                waiting.show("nodes have to join", limit)
            elif isinstance(outcome, Busy):
                limit = request.timeout_s
                if waited >= limit:
                    reason = f"Waited {waited:.1f} s{outcome.why} or wait longer ({request.timeout_name})."
                    raise outcome.error(reason, _report(request.asks, nodes, "taken"))
                waiting.show("others hold what it needs", limit)
            else:
                return outcome
            # Not in step with others that do the same: two that hold one node's GPUs at a time both fail.
            time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def try_once(
    request: Request,
    nodes: Sequence[Node],
    held: Callable[[], Mapping[str, Mapping[str, float]]] | None,
    withdraw: Callable[[], None],
    *,
    deadline: float,
) -> Placed | Busy | Impossible:
    """Plan a request on any of the nodes, and place it. `withdraw` is called before anything is placed."""
    taken = held() if held else {}
    chosen, impossible = decide(
        request.asks,
        [_without(node, taken[node.node_id]) if node.node_id in taken else node for node in nodes],
        own_nodes=request.unified,
        segment_size=request.segment_size,
    )
    if impossible:
        bundles = sum(ask.count for ask in request.asks)
        own = ", each logical node on a physical node of its own" if request.unified else ""
        size = request.segment_size
        segments = f", in segments of {size} nodes of one topology domain" if size else ""
        when = "when nothing runs beside what it extends" if held else "when it is idle"
        return Impossible(
            f"The cluster cannot hold {bundles} bundles in {len(request.asks)} logical node(s){own}{segments}, even "
            f"{when} (see below).",
            "Ask for less, add nodes, or wait for nodes that are joining (wait_for_nodes_s).",
        )
    withdraw()  # what Ray has placed for it is free again at the next look
    placed = None if chosen is None else place(request, chosen, deadline=deadline)
    if placed is not None:
        return placed
    return Busy(
        ": the request would fit on these nodes, but others hold what it needs (see below). Release some of it,"
    )


def _without(node: Node, held: Mapping[str, float]) -> Node:
    return replace(node, total={name: amount - held.get(name, 0.0) for name, amount in node.total.items()})


def _report(
    asks: Sequence[Ask], nodes: Sequence[Node], verdict: Verdict, chosen: Mapping[int, tuple[str, ...]] | None = None
) -> Report:
    """Return a report of what is requested, what the nodes have, who holds it, and what the planner has found."""
    return Report(
        asks=tuple(asks), nodes=tuple(nodes), holders=read_holders(), verdict=verdict, plan=dict(chosen or {})
    )

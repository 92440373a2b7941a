# SPDX-License-Identifier: Apache-2.0
"""Waits until a request can be placed, or raises an error that explains why it cannot and leaves nothing behind."""

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from .._model import Ask, Node, Request, group_pairs
from .._nodes.head import alive_nodes, ask_head, read_holders, read_nodes
from .._plan.planner import decide
from .._ray_private import draining_nodes, infeasible_groups
from .._show import ReservationReport, Verdict, Waiting
from .._slot import Slot
from ..exceptions import HeadTimeoutError, PlacementError, ResourceInsufficientError
from .gpus import try_gpus
from .groups import Busy, Impossible, Placed, place, remove, show_demand
from .slots import slots_of

POLL_S = (0.05, 0.5)
# An autoscaler reports every few seconds, and its report lists all nodes.
STATUS_S = 2.0


def examine(request: Request) -> ReservationReport:
    """Return whether a reservation would succeed now, without reserving."""
    asks, nodes = tuple(ask for ask in request.asks if ask.count), read_nodes()
    chosen, impossible = decide(asks, nodes, own_nodes=request.unified, segment_size=request.segment_size)
    verdict: Verdict = "fits" if chosen is not None else "impossible" if impossible else "taken"
    return ReservationReport(asks, nodes, read_holders(), verdict, dict(chosen or {}))


def examine_reserved(asks: Sequence[Ask], slots: Sequence[Slot], reserved_at: float) -> ReservationReport:
    """Return what the given slots of a reservation hold, and where."""
    there = group_pairs((slot.node_idx, slot.node_id) for slot in slots)
    where = {node_idx: tuple(node_ids) for node_idx, node_ids in there.items()}
    return ReservationReport(
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
    find_usable: Callable[[Sequence[Node]], list[Node]] = list,
    held: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
) -> tuple[Slot, ...]:
    """Place a request, again and again until it succeeds or its time is up, and return its slots.

    `find_usable` chooses among the present nodes before each attempt; if it raises, the wait ends. `held` returns, by
    node id, what the cluster that is extended holds, even when the planner counts nodes as idle.
    """
    request = replace(request, asks=tuple(ask for ask in request.asks if ask.count))
    began = time.monotonic()
    deadline, pause = began + request.timeout_s, POLL_S[0]
    owned: dict[str, frozenset[str]] = {}  # the ids of the GPUs of nodes
    shown: list[PlacementGroup] = []  # to an autoscaler
    infeasible: frozenset[str] | None = None  # the groups that it cannot add nodes for, if there is one
    asks_at = 0.0  # how long this has to have waited to ask for them again
    waiting: Waiting | None = None
    # The end of `demand` withdraws what is shown, so what Ray has placed of it is free again.
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as demand:
        while True:
            waited = time.monotonic() - began
            # Reported before the nodes are read, so the nodes that have joined since are taken into account.
            is_infeasible = any(group.id.hex() in (infeasible or ()) for group in shown)
            if shown and ask_head("look for demand", placement_group_table, shown[0]).get("state") == "CREATED":
                demand.close()
            nodes = find_usable(read_nodes())
            if request.gpu_ids:
                outcome = try_gpus(request, nodes, owned, deadline=deadline)
            else:
                outcome = try_once(request, nodes, held(), demand.close, deadline=deadline)
            if not isinstance(outcome, (Busy, Impossible)):
                try:
                    return slots_of(outcome, request.capacity, deadline=deadline)
                except BaseException as error:
                    remove([one.group for one in outcome])
                    if time.monotonic() >= deadline or not _lost_nodes(outcome, error):
                        raise
                    continue
            limit = request.timeout_s
            if not request.gpu_ids and waited >= asks_at:
                infeasible = ask_head("look for an autoscaler", infeasible_groups)
                asks_at = waited + STATUS_S
            if isinstance(outcome, Impossible):
                may_grow = infeasible is not None and not is_infeasible
                limit = max(request.wait_for_nodes_s, limit if may_grow else 0.0)
                if waited >= limit:
                    after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
                    after += " The autoscaler reports that it cannot add nodes for it." if is_infeasible else ""
                    reason = f"{outcome.why}{after} {outcome.advice}"
                    report = ReservationReport(request.asks, tuple(nodes), read_holders(), "impossible")
                    raise ResourceInsufficientError(reason, report)
            elif waited >= limit:
                reason = f"Waited {waited:.1f} s{outcome.why} or wait longer ({request.timeout_name})."
                raise outcome.error(reason, ReservationReport(request.asks, tuple(nodes), read_holders(), "taken"))
            waiting = waiting or stack.enter_context(Waiting(f"Reserving {request.name or 'a cluster'}"))
            waiting.show(
                "nodes have to join" if isinstance(outcome, Impossible) else "others hold what it needs", limit
            )
            if infeasible is not None and not shown:
                demand.callback(shown.clear)
                demand.callback(remove, shown)
                shown += show_demand(request, nodes)
            # Not in step with others that do the same: two that hold one node's GPUs at a time both fail.
            time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def _lost_nodes(placed: Placed, error: BaseException) -> bool:
    """Return whether nodes of placed groups were lost or began to drain. The next plan avoids them."""
    if not isinstance(error, (ray.exceptions.RayError, PlacementError)) or isinstance(error, HeadTimeoutError):
        return False
    staying = alive_nodes() - ask_head("list the nodes that are draining", draining_nodes)
    return not staying.issuperset(node_id for one in placed for node_id in one.node_ids)


def try_once(
    request: Request,
    nodes: Sequence[Node],
    held: Mapping[str, Mapping[str, float]],
    withdraw: Callable[[], None],
    *,
    deadline: float,
) -> Placed | Busy | Impossible:
    """Plan a request on any of the nodes, and place it. `withdraw` is called before anything is placed."""
    rest = []
    for node in nodes:
        mine = held.get(node.node_id, {})
        rest.append(
            replace(node, total={name: n - mine.get(name, 0.0) for name, n in node.total.items()}) if mine else node
        )
    chosen, impossible = decide(request.asks, rest, own_nodes=request.unified, segment_size=request.segment_size)
    if impossible:
        bundles = sum(ask.count for ask in request.asks)
        own = ", each logical node on a physical node of its own" if request.unified else ""
        size = request.segment_size
        segments = f", in segments of {size} nodes of one topology domain" if size else ""
        when = "when nothing runs beside what it extends" if held else "when they are idle"
        return Impossible(
            f"The present nodes cannot hold {bundles} bundles in {len(request.asks)} logical node(s){own}{segments}, "
            f"even {when} (see below).",
            "Ask for less, add nodes, or wait for nodes that are joining (wait_for_nodes_s).",
        )
    if chosen is not None:
        withdraw()
        if (placed := place(request, chosen, deadline=deadline)) is not None:
            return placed
    return Busy(
        ": the request would fit on these nodes, but others hold what it needs (see below). Release some of it,"
    )

# SPDX-License-Identifier: Apache-2.0
"""Waits until a request can be placed, or raises an error that explains why it cannot and leaves nothing behind."""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ray

from .._model import Ask, Node, Request, group_pairs
from .._nodes.head import alive_nodes, ask_head, read_holders, read_nodes
from .._plan.planner import decide, is_in_use
from .._ray_private import draining_nodes, infeasible_groups
from .._show import ReservationReport, Waiting, name_holders
from .._slot import Slot
from ..exceptions import HeadTimeoutError, PlacementError, ResourceInsufficientError
from .demand import Demand
from .gpus import try_gpus
from .groups import Busy, Check, Impossible, Placed, allow, find_abandoned, place, remove
from .slots import slots_of

logger = logging.getLogger(__name__)
POLL_S = (0.05, 0.5)
# How often Ray's head is asked for what changes slowly: an autoscaler reports every few seconds, with all nodes.
STATUS_S = 2.0
_ADVICE = "Ask for less, add nodes, or wait for nodes that are joining (wait_for_nodes_s)."
Amounts = Mapping[str, Mapping[str, float]]


def examine(request: Request) -> ReservationReport:
    """Return whether a reservation would succeed now, without reserving."""
    asks, nodes = tuple(ask for ask in request.asks if ask.count), read_nodes()
    plan, verdict = decide(asks, nodes, own_nodes=request.unified, segment_size=request.segment_size)
    return ReservationReport(asks, nodes, read_holders(), verdict, plan or {})


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
    held: Callable[[], Amounts] = dict,
    check: Check = allow,
) -> tuple[Slot, ...]:
    """Place a request, again and again until it succeeds or its time is up, and return its slots.

    Args:
        request: the request.
        find_usable: chooses among the present nodes before each attempt.
        held: returns, by node id, what the cluster that is extended holds, even when the planner counts nodes as idle.
        check: is called during the wait, and raises if that should end.
    """
    request = replace(request, asks=tuple(ask for ask in request.asks if ask.count))
    began = time.monotonic()
    deadline, pause, ask_again_at = began + request.timeout_s, POLL_S[0], 0.0
    owned: dict[str, frozenset[str]] = {}  # the ids of the GPUs of nodes
    infeasible: frozenset[str] | None = None  # the groups that an autoscaler cannot add nodes for, if there is one
    waiting: Waiting | None = None
    # The end of the demand withdraws what is shown, so what Ray has placed of it is free again.
    with contextlib.ExitStack() as stack, Demand(request) as demand:
        while True:
            check()
            waited = time.monotonic() - began
            # Reported before the nodes are read, so the nodes that have joined since are taken into account.
            is_infeasible = demand.is_among(infeasible or frozenset())
            demand.withdraw_if_placed()
            nodes = find_usable(read_nodes())
            outcome: Placed | Busy | Impossible
            if request.gpu_ids:
                outcome = try_gpus(request, nodes, owned, deadline=deadline)
            else:
                outcome = try_once(request, nodes, held(), demand.withdraw, deadline=deadline, check=check)
            if not isinstance(outcome, (Busy, Impossible)):
                try:
                    return slots_of(outcome, request.capacity, deadline=deadline, check=check)
                except BaseException as error:
                    remove([one.group for one in outcome])
                    if time.monotonic() >= deadline or not _lost_nodes(outcome, error):
                        raise
                    continue
            if waited >= ask_again_at:
                ask_again_at = waited + STATUS_S
                if remove_abandoned():
                    continue
                infeasible = None if request.gpu_ids else ask_head("look for an autoscaler", infeasible_groups)
            limit = request.timeout_s
            if isinstance(outcome, Impossible):
                limit = max(request.wait_for_nodes_s, 0.0 if infeasible is None or is_infeasible else limit)
            if waited >= limit:
                raise _explain(request, nodes, outcome, waited, is_infeasible=is_infeasible)
            waiting = waiting or stack.enter_context(Waiting(f"Reserving {request.name or 'a cluster'}"))
            waiting.show("nodes have to join" if isinstance(outcome, Impossible) else "there is no room for it", limit)
            if infeasible is not None:
                demand.show(nodes)
            # Not in step with others that do the same: two that hold one node's GPUs at a time both fail.
            time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def _explain(
    request: Request, nodes: Sequence[Node], outcome: Busy | Impossible, waited: float, *, is_infeasible: bool
) -> PlacementError:
    """Return the error of a request that has no room at the end of its time."""
    holders = read_holders()
    if isinstance(outcome, Impossible):
        after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
        after += " The autoscaler reports that it cannot add nodes for it." if is_infeasible else ""
        report = ReservationReport(request.asks, tuple(nodes), holders, outcome.verdict)
        return ResourceInsufficientError(f"{outcome.why}{after} {outcome.advice}", report)
    names = {name for ask in request.asks for name in ask.bundle}
    why = outcome.why.replace("{holders}", name_holders(nodes, holders, names))
    report = ReservationReport(request.asks, tuple(nodes), holders, "taken")
    return outcome.error(f"Waited {waited:.1f} s{why} or wait longer ({request.timeout_name}).", report)


def _lost_nodes(placed: Placed, error: BaseException) -> bool:
    """Return whether nodes of placed groups were lost or began to drain. The next plan avoids them."""
    if not isinstance(error, (ray.exceptions.RayError, PlacementError)) or isinstance(error, HeadTimeoutError):
        return False
    staying = alive_nodes() - ask_head("list the nodes that are draining", draining_nodes)
    return not staying.issuperset(node_id for one in placed for node_id in one.node_ids)


def remove_abandoned() -> bool:
    """Remove what this job holds for actors that are dead, and return whether there was anything.

    Ray keeps the groups of an actor that was killed until its job ends. One that Ray restarts would wait for itself.
    """
    abandoned = find_abandoned()
    if abandoned:
        logger.warning(
            "Removing %d placement group(s) that dead actors of this job have left: %s.",
            len(abandoned),
            ", ".join(abandoned.values()),
        )
        remove(list(abandoned))
    return bool(abandoned)


def try_once(
    request: Request,
    nodes: Sequence[Node],
    held: Amounts,
    withdraw: Callable[[], None],
    *,
    deadline: float,
    check: Check,
) -> Placed | Busy | Impossible:
    """Plan a request on any of the nodes, and place it. `withdraw` is called before anything is placed."""
    rest = []
    for node in nodes:
        mine = held.get(node.node_id, {})
        rest.append(
            replace(node, total={name: n - mine.get(name, 0.0) for name, n in node.total.items()}) if mine else node
        )
    plan, verdict = decide(request.asks, rest, own_nodes=request.unified, segment_size=request.segment_size)
    if verdict in ("impossible", "not found"):
        own = ", each logical node on a physical node of its own" if request.unified else ""
        size = request.segment_size
        segments = f", in segments of {size} nodes of one topology domain" if size else ""
        bundles = sum(ask.count for ask in request.asks)
        what = f"{bundles} bundles in {len(request.asks)} logical node(s){own}{segments}"
        when = "when nothing runs beside what it extends" if held else "when they are idle"
        if verdict == "impossible":
            return Impossible(f"The present nodes cannot hold {what}, even {when} (see below).", _ADVICE)
        why = (
            f"No arrangement of {what} on the present nodes was found, even {when} (see below). It is not proven that "
            "there is none."
        )
        spread = 'Use placement_group_strategy="PACK" if a logical node may be on several nodes. '
        return Impossible(why, f"{'' if own or size else spread}{_ADVICE}", "not found")
    if plan is not None:
        withdraw()
        if (placed := place(request, plan, deadline=deadline, check=check)) is not None:
            return placed
    if is_in_use(request.asks, rest):
        return Busy(
            ": the request would fit on these nodes, but others hold what it needs ({holders}; see below). Release "
            "some of it,"
        )
    return Busy(
        ": the nodes have room for the request, but Ray has not placed it. Others may have been faster for a moment, "
        "or the raylet of a node may be stopped or overloaded: look at the nodes,"
    )

# SPDX-License-Identifier: Apache-2.0
"""Waits until a request can be placed, or raises an error that explains why it cannot and leaves nothing behind."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray

from .._model import Node, Request, Verdict
from .._nodes.head import ask_head, read_holders, read_nodes
from .._plan.planner import decide, is_in_use
from .._ray_private import autoscaler_is_there
from .._show import ReservationReport, count_noun, describe_asks, name_holders
from .._slot import Slot
from ..exceptions import PlacementError, PlacementTimeoutError, ResourceInsufficientError
from .gpus import WITHOUT_GPUS, try_gpus
from .groups import DEMAND_S, Refusal, place, remove
from .slots import LEAST_S, slots_of

logger = logging.getLogger(__name__)
POLL_S = (0.05, 0.5)
_ADVICE = (
    "Request less, add nodes, or wait for nodes that are joining (wait_for_nodes_s). A local Ray gets more by "
    "init_ray(num_cpus=...) before anything else."
)


def examine(request: Request) -> ReservationReport:
    """Return whether a reservation would succeed now, without reserving."""
    asks, nodes = tuple(ask for ask in request.asks if ask.count), read_nodes()
    plan, verdict = decide(asks, nodes, request.unified, request.segment_size)
    return ReservationReport(asks, nodes, read_holders(), verdict, plan or {})


def reserve(request: Request, check: Callable[[], object] = lambda: None) -> tuple[Slot, ...]:
    """Place a request, again and again until it succeeds or its time is up, and return its slots.

    `check` is called before each try, and raises if there should be none.
    """
    request = replace(request, asks=tuple(ask for ask in request.asks if ask.count))
    began = time.monotonic()
    deadline, pause = began + request.timeout_s, POLL_S[0]
    silent_s = 1.0  # a reservation that waits for longer logs why, and again after ten times as long
    owned: dict[str, frozenset[str]] = {}  # the ids of the GPUs of nodes
    may_grow = False
    while True:
        check()
        waited = time.monotonic() - began
        nodes = read_nodes()
        if request.gpu_ids:
            outcome = try_gpus(request, nodes, owned, deadline=deadline)
        else:
            plan, verdict = decide(request.asks, nodes, request.unified, request.segment_size)
            placed = None if plan is None else place(request, plan, deadline=deadline)
            if placed is None and may_grow:  # groups without a place are demand
                placed = place(request, {}, deadline=deadline, room_s=min(DEMAND_S, deadline - time.monotonic()))
            outcome = _refuse(request, nodes, verdict) if placed is None else placed
        if not isinstance(outcome, Refusal):
            try:
                return slots_of(outcome, request.capacity, nodes, timeout_s=max(LEAST_S, deadline - time.monotonic()))
            except BaseException as error:
                remove([reserved.group for reserved in outcome])
                is_loss = isinstance(error, (ray.exceptions.RayError, PlacementError))  # of a node, most likely
                if not is_loss or isinstance(error, PlacementTimeoutError) or time.monotonic() >= deadline:
                    raise
                time.sleep(pause)
                continue
        # Ray has no request for named GPUs, and none for nodes apart.
        has_request = not (request.gpu_ids or request.segment_size or request.unified)
        may_grow = has_request and ask_head("look for an autoscaler", autoscaler_is_there)
        limit = request.timeout_s if may_grow or outcome.verdict == "taken" else request.wait_for_nodes_s
        if waited >= limit:
            raise _explain(request, nodes, outcome, waited)
        # From outside, fairlead-inspect reads `wants`, `lacks`, `began` and `limit`.
        wants = describe_asks(request.asks) + (f" for {request.name}" if request.name else "")
        lacks = "what it needs is not free" if outcome.verdict == "taken" else "the nodes are too few or too small"
        lacks += ", and the autoscaler may add some" if may_grow else ""
        if waited >= silent_s:
            silent_s *= 10
            why = _explain(request, nodes, outcome, waited)
            logger.warning("Reserving %s, for up to %g s: %s. %s", wants, limit, lacks, why.reason)
        # Not in step with others that do the same: two that hold one node's GPUs at a time both fail.
        time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), began + limit - time.monotonic())))
        pause = min(2 * pause, POLL_S[1])


def _refuse(request: Request, nodes: Sequence[Node], verdict: Verdict) -> Refusal:
    """Return why a request has no place now."""
    if verdict in ("fits", "taken"):
        if is_in_use(request.asks, nodes):
            return Refusal(
                ": the request would fit on these nodes, but others hold what it needs ({holders}). Release some of it,"
            )
        return Refusal(
            ": the nodes have room for the request, but Ray has not placed it. Others may have been faster for a "
            "moment, or the raylet of a node may be stopped or overloaded: look at the nodes,"
        )
    own = ", each logical node on a physical node of its own" if request.unified else ""
    size = request.segment_size
    segments = f", in segments of {size} nodes of one topology domain" if size else ""
    bundles = count_noun(sum(ask.count for ask in request.asks), "bundle")
    what = f"{bundles} in {count_noun(len(request.asks), 'logical node')}{own}{segments}"
    lacks_gpus = "GPU" in request.accelerators and not any(node.total.get("GPU") for node in nodes)
    advice = f"No node has a GPU. {WITHOUT_GPUS}" if lacks_gpus else _ADVICE
    spread = [replace(ask, strategy="PACK") for ask in request.asks]
    if not own and not size and decide(spread, nodes)[1] != "impossible":
        advice = f'Use placement_group_strategy="PACK" if a logical node may be on several nodes. {advice}'
    return Refusal(f"The present nodes cannot hold {what}, even when they are idle (see below).", advice, verdict)


def _explain(
    request: Request, nodes: Sequence[Node], refusal: Refusal, waited: float
) -> ResourceInsufficientError | PlacementTimeoutError:
    """Return the error of a request that has no room at the end of its time."""
    holders = read_holders()
    report = ReservationReport(request.asks, tuple(nodes), holders, refusal.verdict)
    names = {name for ask in request.asks for name in ask.bundle}
    if refusal.verdict != "taken":
        after = f" Waited {waited:.1f} s for nodes." if waited >= 1 else ""
        return ResourceInsufficientError(f"{refusal.why}{after} {refusal.advice}", report)
    why = refusal.why.replace("{holders}", name_holders(nodes, holders, names))
    longer = "wait longer (reserve_timeout_s, or timeout_s of launch or replace_lost_nodes)"
    error = ResourceInsufficientError if refusal.of_gpus else PlacementTimeoutError
    return error(
        f"Waited {waited:.1f} s{why} or {longer}.",
        report,
    )

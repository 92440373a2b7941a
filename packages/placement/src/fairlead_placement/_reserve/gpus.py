# SPDX-License-Identifier: Apache-2.0
"""Reserves particular GPUs, which Ray itself cannot do.

Ray reports the id of a GPU only to a process that holds it. So all free GPUs of a node are held one by one. Those that
are requested are released, the logical node's group is placed on them (nothing else is free there), and then the others
are released.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup

from .. import _ray_private
from .._model import Ask, Node, Request, Verdict
from .._nodes.functions import run_in_tasks
from .._plan.planner import decide, usable
from .._plan.topology import accelerator_order
from .._ray_private import visible_gpus
from .._show import count_noun
from .groups import Placed, Refusal, Reserved, create_groups, place, remove, remove_on_error
from .slots import LEAST_S, accelerator_ids

logger = logging.getLogger(__name__)

# fairlead-placement need not be installed on the nodes.
ray.cloudpickle.register_pickle_by_value(_ray_private)
# How long nodes have to report the ids of their GPUs, even after the deadline, and at most: one silent node must not
# use up the time of the whole reservation.
READ_S = (10.0, 30.0)
# Nodes named in an error. The free GPUs of each are read.
SHOWN = 4
WITHOUT_GPUS = (
    "To reserve CPUs only, pass use_gpus=False without gpu_ids (to `launch`, gpus_per_worker=0), and name no GPU in "
    "accelerators. Otherwise add nodes with GPUs, or wait for nodes that are joining (wait_for_nodes_s)."
)
Ids = dict[str, frozenset[str]]


def try_gpus(request: Request, nodes: Sequence[Node], owned: Ids, *, deadline: float) -> Placed | Refusal:
    """Place each logical node on exactly the GPUs that `gpu_ids` names, on a node of its own if possible.

    `owned` keeps the ids of the GPUs of each node for the next attempt.
    """
    owned.update(read_gpu_ids([node for node in nodes if node.node_id not in owned], deadline=deadline))
    if _examine_idle(request, nodes, owned) != "fits":
        return _refuse(request, nodes, owned)
    placed: list[Reserved] = []
    with remove_on_error(lambda: [reserved.group for reserved in placed]):
        for ask in sorted(request.asks, key=lambda ask: -ask.count):
            ids, used = request.gpu_ids[ask.node_idx], {reserved.node_ids[0] for reserved in placed}
            suitable = [node for node in usable([ask], nodes) if ids <= owned[node.node_id]]
            missing: list[tuple[Node, frozenset[str]]] = []
            for node in sorted(suitable, key=lambda node: node.node_id in used):
                reserved_here, gone = take_gpus(replace(request, asks=(ask,)), node, ids, deadline=deadline)
                placed += reserved_here
                if reserved_here:
                    break
                missing.append((node, gone))
            else:
                remove([reserved.group for reserved in placed])
                return _explain_busy(ask, missing)
    return tuple(sorted(placed, key=lambda reserved: reserved.node_idx[0]))


def take_gpus(
    request: Request, node: Node, ids: frozenset[str], *, deadline: float
) -> tuple[Sequence[Reserved], frozenset[str]]:
    """Place a single logical node on particular GPUs of a node, or return nothing and which of them are not free."""
    if node.free.get("GPU", 0) < len(ids):
        return (), ids
    (ask,) = request.asks
    placed: Sequence[Reserved] = ()
    with remove_on_error(lambda: [reserved.group for reserved in placed]), hold_free_gpus(node, deadline) as fillers:
        if missing := ids - fillers.keys():
            return (), missing
        remove([fillers[gpu] for gpu in ids])
        placed = place(request, {ask.node_idx: (node.node_id,) * ask.count}, deadline=deadline) or ()
        (held,) = accelerator_ids(placed, timeout_s=max(LEAST_S, deadline - time.monotonic())) or [[]]
        if placed and {gpu for bundle in held for gpu in bundle["GPU"]} != ids:  # another request was faster
            remove([reserved.group for reserved in placed])
            return (), ids
    return placed, frozenset()


def _examine_idle(request: Request, nodes: Sequence[Node], owned: Ids) -> Verdict:
    """Return whether the nodes could hold a request if they were idle: each GPU id counts as a resource."""
    asks = []
    for ask in request.asks:
        whole = {name: amount * ask.count for name, amount in ask.bundle.items()}
        asks.append(replace(ask, count=1, bundle=whole | dict.fromkeys(request.gpu_ids[ask.node_idx], 1.0)))
    totals = [{**node.total, **dict.fromkeys(owned[node.node_id], 1.0)} for node in nodes]
    idle = [replace(node, total=total, free=total) for node, total in zip(nodes, totals, strict=True)]
    return decide(asks, idle)[1]


def _refuse(request: Request, nodes: Sequence[Node], owned: Ids) -> Refusal:
    """Return why no node has the GPUs of a request even when it is idle."""
    has = [f"{_name(node)} has {_ids(owned[node.node_id])}" for node in nodes if owned[node.node_id]]
    listed = "; ".join([*has[:SHOWN], *(["..."] if len(has) > SHOWN else [])]) or "no node has a GPU"
    for ask in request.asks:
        if missing := request.gpu_ids[ask.node_idx].difference(*owned.values()):
            why = f"No node has GPU {_ids(missing)}, requested for logical node {ask.node_idx}: {listed}."
            return Refusal(why, "Request ids that one node has (gpu_ids)." if has else WITHOUT_GPUS, "impossible")
    what = count_noun(len(request.asks), "logical node")
    return Refusal(
        f"The cluster cannot hold {what} on the requested GPUs, even when it is idle: {listed}.",
        "The GPUs of a logical node must be on one node, which needs the other requested resources (see below).",
        "impossible",
    )


def _explain_busy(ask: Ask, missing: Sequence[tuple[Node, frozenset[str]]]) -> Refusal:
    """Return why a logical node has no place, from the GPUs that are not free on each node that has them."""
    if not missing or not all(gone for _, gone in missing):
        return Refusal(
            ": the requested GPUs are free, but others hold what else the request needs, or take turns with it (see "
            "below). Release some of it,"
        )
    reasons = ". ".join(
        f"GPU {_ids(gone)}, requested for logical node {ask.node_idx}, {'is not' if len(gone) == 1 else 'are not all'} "
        f"free on {_name(node)}, see below"
        for node, gone in missing[:SHOWN]
    )
    why = f" for particular GPUs. {reasons}. Release them, request others (gpu_ids),"
    return Refusal(why, of_gpus=True)


def _name(node: Node) -> str:
    return f"node {node.node_id[:8]} ({node.ip})"


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids, key=accelerator_order)) or "none"


def read_gpu_ids(nodes: Sequence[Node], *, deadline: float) -> Ids:
    """Return the ids of all GPUs of each node, by node id, as tasks read them there; 0, 1, ... if one fails."""
    counts = {node.node_id: int(node.total.get("GPU", 0)) for node in nodes}
    ids = {node_id: frozenset(map(str, range(count))) for node_id, count in counts.items()}
    limit_s = min(READ_S[1], max(READ_S[0], deadline - time.monotonic()))
    asked: dict[str, tuple[()]] = {node_id: () for node_id, count in counts.items() if count}
    for node_id, visible in run_in_tasks(visible_gpus, asked, timeout_s=limit_s).items():
        if isinstance(visible, Exception):
            logger.warning("Cannot read the GPU ids of node %s, and take them for 0, 1, ...: %s", node_id[:8], visible)
        elif visible:
            ids[node_id] = frozenset(visible[: counts[node_id]])
    return ids


@contextlib.contextmanager
def hold_free_gpus(node: Node, deadline: float) -> Iterator[dict[str, PlacementGroup]]:
    """Hold every whole GPU that is free on a node until the block ends; yield the groups by GPU id."""
    bundle, pin = {"GPU": 1.0}, {"ray.io/node-id": node.node_id}
    options = {"name": "", "bundles": [bundle], "bundle_label_selector": [pin]}
    groups = create_groups([options] * int(node.free.get("GPU", 0)), deadline=deadline)
    with contextlib.ExitStack() as stack:
        stack.callback(remove, list(groups))
        # GPUs that were free in sum but not as a whole, or that others have taken since, must not be taken later.
        remove([group for group, node_ids in groups.items() if node_ids is None])
        placed = [Reserved(group, (0,), node_ids, (bundle,)) for group, node_ids in groups.items() if node_ids]
        ids = accelerator_ids(placed, timeout_s=max(LEAST_S, deadline - time.monotonic()))
        yield {held["GPU"][0]: filler.group for filler, (held,) in zip(placed, ids, strict=True)}

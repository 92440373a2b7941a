# SPDX-License-Identifier: Apache-2.0
"""Reserves particular GPUs, which Ray itself cannot do.

Ray reports the id of a GPU only to a process that holds it. So all free GPUs of a node are held one by one. Those that
are requested are released, the logical node's one group is placed on them (nothing else is free there), and then the
others are released.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.util.placement_group import PlacementGroup

from .._model import Node, Request, Verdict
from .._nodes.functions import run_in_tasks
from .._plan.planner import decide
from .._plan.topology import accelerator_order
from .._ray_private import visible_gpus
from .groups import Placed, Refusal, Reserved, create_groups, place, remove, remove_on_error
from .slots import accelerator_ids

# How long the agents have to report the ids of GPUs, even after the deadline, and at most: one silent node must not use
# up the time of the whole reservation.
AGENTS_S = (10.0, 30.0)
# Nodes named in an error. The free GPUs of each are read.
SHOWN = 4
Wanted = Mapping[int, frozenset[str]]
Ids = dict[str, frozenset[str]]
Fillers = Mapping[str, Mapping[str, PlacementGroup]]


def check_gpu_ids(gpu_ids: Any, counts: Sequence[int], gpus: float, strategy: str, segment_size: int | None) -> Wanted:
    """Return the ids that the argument `gpu_ids` of a cluster names, by logical node in use."""
    if gpus != 1:
        raise ValueError(f"gpu_ids={gpu_ids!r} needs one GPU in each bundle (use_gpus=True), got {gpus:g}")
    if strategy != "STRICT_PACK":
        raise ValueError(
            f"gpu_ids={gpu_ids!r} needs placement_group_strategy='STRICT_PACK', so that the ids are those of one "
            f"node, got {strategy!r}"
        )
    if not isinstance(gpu_ids, (list, tuple)):
        raise ValueError(f"gpu_ids must be a list of ids, a list per logical node, or 'auto', got {gpu_ids!r}")
    used = [node_idx for node_idx, count in enumerate(counts) if count > 0]
    is_nested = any(isinstance(part, (list, tuple)) for part in gpu_ids)
    if not is_nested and len(used) != 1:
        raise ValueError(f"gpu_ids must be a list per logical node, as {len(used)} are in use, got {gpu_ids!r}")
    per_node = list(gpu_ids) if is_nested else [gpu_ids if count else [] for count in counts]
    if len(per_node) != len(counts):
        raise ValueError(f"gpu_ids has {len(per_node)} lists for {len(counts)} logical nodes: {gpu_ids!r}")
    for node_idx, (ids, count) in enumerate(zip(per_node, counts, strict=True)):
        if not isinstance(ids, (list, tuple)) or len(ids) != count:
            raise ValueError(
                f"gpu_ids of logical node {node_idx} must be {count} ids, one for each bundle, got {ids!r}"
            )
        for gpu in ids:
            if isinstance(gpu, bool) or not isinstance(gpu, (int, str)) or gpu == "" or str(gpu).startswith("-"):
                raise ValueError(
                    f"gpu_ids must be numbers, 0 or more, or names such as 'GPU-6a', got {gpu!r} in {ids!r}"
                )
        if len(set(map(str, ids))) < len(ids):
            raise ValueError(f"gpu_ids of a logical node must be different, got {ids!r}")
    if segment_size is not None and used:
        raise ValueError(f"give gpu_ids={gpu_ids!r} or segment_size={segment_size!r}, not both")
    return {node_idx: frozenset(map(str, per_node[node_idx])) for node_idx in used}


def try_gpus(request: Request, nodes: Sequence[Node], owned: Ids, *, deadline: float) -> Placed | Refusal:
    """Place a request on exactly the GPUs that its `gpu_ids` names. Each node that may have them free is tried once.

    `owned` keeps the ids of the GPUs of each node for the next attempt.
    """
    owned.update(read_gpu_ids([node for node in nodes if node.node_id not in owned], deadline=deadline))
    # Whole logical nodes with each GPU id as a resource, so that the planner matches ids too.
    asks = []
    for ask in request.asks:
        whole = {name: amount * ask.count for name, amount in ask.bundle.items()}
        asks.append(replace(ask, count=1, bundle=whole | _as_resources(request.gpu_ids[ask.node_idx])))
    free: Ids = {}
    placed: list[Reserved] = []
    while not placed:
        # A node counts as free until it has been looked at, so every turn rules something out.
        chosen, verdict = decide(asks, _shown(nodes, owned, free), own_nodes=request.unified)
        if chosen is None:
            is_taken = verdict == "taken" or bool(free)
            return _explain_busy(request, nodes, owned, free) if is_taken else _refuse(request, nodes, owned, verdict)
        on = {node_idx: node_id for node_idx, (node_id,) in chosen.items()}
        used = [node for node in nodes if node.node_id in on.values()]
        with (
            remove_on_error(lambda: [reserved.group for reserved in placed]),
            hold_free_gpus(used, deadline=deadline) as fillers,
        ):
            free.update({node_id: frozenset(held) for node_id, held in fillers.items()})
            if all(ids <= free[on[node_idx]] for node_idx, ids in _wanted(request)):
                placed.extend(exchange(request, on, fillers, deadline=deadline))
                if not placed:  # another request was faster
                    free.update(dict.fromkeys(on.values(), frozenset()))
    return tuple(placed)


def _wanted(request: Request) -> list[tuple[int, frozenset[str]]]:
    return [(ask.node_idx, request.gpu_ids[ask.node_idx]) for ask in request.asks]


def exchange(request: Request, on: Mapping[int, str], fillers: Fillers, *, deadline: float) -> list[Reserved]:
    """Release the requested GPUs and place the groups on them. Leave and return none if Ray gave them other GPUs."""
    made: list[Reserved] = []
    with remove_on_error(lambda: [reserved.group for reserved in made]):
        # One after the other, as Ray might swap the GPUs of logical nodes that share a node.
        for asks in [request.asks] if request.unified else [(ask,) for ask in request.asks]:
            remove([fillers[on[ask.node_idx]][gpu] for ask in asks for gpu in request.gpu_ids[ask.node_idx]])
            chosen = {ask.node_idx: (on[ask.node_idx],) * ask.count for ask in asks}
            placed = place(replace(request, asks=asks), chosen, deadline=deadline) or ()
            made += placed
            got: dict[int, set[str]] = {}
            for reserved, ids in zip(placed, accelerator_ids(placed, deadline=deadline), strict=True):
                for node_idx, of_bundle in zip(reserved.node_idx, ids, strict=True):
                    got.setdefault(node_idx, set()).update(of_bundle["GPU"])
            if got != {ask.node_idx: request.gpu_ids[ask.node_idx] for ask in asks}:
                remove([reserved.group for reserved in made])
                return []
    return made


def _shown(nodes: Sequence[Node], owned: Ids, free: Ids) -> list[Node]:
    """Return the nodes with their GPU ids as resources, all of them free where nothing else is known."""
    return [
        replace(
            node,
            total={**node.total, **_as_resources(owned[node.node_id])},
            free={**node.free, **_as_resources(free.get(node.node_id, owned[node.node_id]))},
        )
        for node in nodes
    ]


def _as_resources(gpu_ids: Iterable[str]) -> dict[str, float]:
    return {f"GPU id {gpu_id}": 1.0 for gpu_id in gpu_ids}


def _refuse(request: Request, nodes: Sequence[Node], owned: Ids, verdict: Verdict) -> Refusal:
    """Return why no node has the GPUs of a request even when it is idle."""
    has = [f"{_name(node)} has {_ids(owned[node.node_id])}" for node in nodes if owned[node.node_id]]
    listed = "; ".join([*has[:SHOWN], *(["..."] if len(has) > SHOWN else [])]) or "no node has a GPU"
    for node_idx, ids in _wanted(request):
        if not any(ids <= owned[node.node_id] for node in nodes):
            missing = ids.difference(*(owned[node.node_id] for node in nodes))
            what = f"No node has GPU {_ids(missing)}" if missing else f"No single node has the GPUs {_ids(ids)}"
            why = f"{what}, asked for logical node {node_idx}: {listed}."
            return Refusal(why, "Ask for ids that one node has (gpu_ids).", "impossible")
    is_proven = verdict == "impossible"
    return Refusal(
        f"{'The cluster cannot hold' if is_proven else 'No arrangement on the cluster was found for'} "
        f"{len(request.asks)} logical node(s) on the GPUs asked for, even when it is idle: {listed}.",
        "Every id can be in one logical node only, and the node needs what else is asked for (see below).",
        verdict,
    )


def _explain_busy(request: Request, nodes: Sequence[Node], owned: Ids, free: Ids) -> Refusal:
    """Return why a request has no place. `free` are the GPUs of the nodes that have been looked at."""
    reasons = []
    for node_idx, ids in _wanted(request):
        # A node with too few free GPUs is not looked at.
        few = {node.node_id: frozenset[str]() for node in nodes if node.free.get("GPU", 0) < len(ids)}
        missing = [(node, ids - (few | free).get(node.node_id, ids)) for node in nodes if ids <= owned[node.node_id]]
        for node, gone in missing[:SHOWN] if all(gone for _, gone in missing) else ():
            are_not = "is not" if len(gone) == 1 else "are not all"
            reasons.append(
                f"GPU {_ids(gone)}, asked for logical node {node_idx}, {are_not} free on {_name(node)}, see below"
            )
    if reasons:
        why = f" for particular GPUs. {'. '.join(reasons)}. Release them, ask for others (gpu_ids),"
        return Refusal(why, of_gpus=True)
    return Refusal(
        ": the GPUs asked for are free, but others hold what else the request needs, or take turns with it (see "
        "below). Release some of it,"
    )


def _name(node: Node) -> str:
    return f"node {node.node_id[:8]} ({node.ip})"


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids, key=accelerator_order)) or "none"


def read_gpu_ids(nodes: Sequence[Node], *, deadline: float) -> Ids:
    """Return the ids of all GPUs of each node, by node id, as the agents report them; 0, 1, ... if one is silent."""
    counts = {node.node_id: int(node.total.get("GPU", 0)) for node in nodes}
    ids = {node_id: frozenset(map(str, range(count))) for node_id, count in counts.items()}
    limit_s = min(AGENTS_S[1], max(AGENTS_S[0], deadline - time.monotonic()))
    asked: dict[str, tuple[()]] = {node_id: () for node_id, count in counts.items() if count}
    for node_id, visible in run_in_tasks(visible_gpus, asked, timeout_s=limit_s).items():
        if visible and not isinstance(visible, Exception):
            ids[node_id] = frozenset(visible[: counts[node_id]])
    return ids


@contextlib.contextmanager
def hold_free_gpus(nodes: Sequence[Node], *, deadline: float) -> Iterator[Fillers]:
    """Hold every whole GPU that is free on the nodes until the block ends; yield the groups by node id and GPU id."""
    where = [node.node_id for node in nodes for _ in range(int(node.free.get("GPU", 0)))]
    bundle = {"GPU": 1.0}
    pins = [{"name": "", "bundles": [bundle], "bundle_label_selector": [{"ray.io/node-id": one}]} for one in where]
    groups = create_groups(pins, deadline=deadline)
    with contextlib.ExitStack() as stack:
        stack.callback(remove, list(groups))
        # GPUs that were free in sum but not as a whole, or that others have taken since, must not be taken later.
        remove([group for group, node_ids in groups.items() if node_ids is None])
        placed = [Reserved(group, (0,), node_ids, (bundle,)) for group, node_ids in groups.items() if node_ids]
        held: dict[str, dict[str, PlacementGroup]] = {node.node_id: {} for node in nodes}
        for filler, (ids,) in zip(placed, accelerator_ids(placed, deadline=deadline), strict=True):
            held[filler.node_ids[0]][ids["GPU"][0]] = filler.group
        yield held

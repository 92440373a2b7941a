# SPDX-License-Identifier: Apache-2.0
"""Reservations of particular GPUs, which Ray itself cannot be asked for.

What is free on a node is held GPU by GPU, those that are wanted are given back, the logical node's one group is placed
on them - nothing else is free there - and the rest is given back.
"""

import random
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from .._nodes.inventory import read_nodes
from .._plan.model import Ask, Node
from .._plan.planner import never_fits, plan
from .._show.status_line import Waiting
from ..exceptions import PlacementTimeoutError, ResourceInsufficientError
from .accelerators import accelerator_ids
from .attempt import POLL_S, report_of
from .gpu_fillers import Fillers, drop, filled, gpu_names
from .gpu_holders import held_by
from .groups import Reserved, place

__all__ = ["check_gpu_ids", "reserve_gpus"]

# Nodes named in an error. Each is asked what is free there.
SHOWN = 4
Wanted = Mapping[int, frozenset[str]]
Ids = dict[str, frozenset[str]]


def check_gpu_ids(gpu_ids: Any, counts: Sequence[int], use_gpus: bool, strategy: str) -> Wanted:
    """What the argument `gpu_ids` of a cluster asks for: ids by logical node in use; empty when any will do.

    Raises:
        ValueError: it is not one id for each bundle, or cannot be had with the other arguments.
    """
    if gpu_ids is None or gpu_ids == "auto":
        return {}
    if not use_gpus:
        raise ValueError(f"gpu_ids={gpu_ids!r} needs use_gpus=True")
    if strategy != "STRICT_PACK":
        raise ValueError(
            f"gpu_ids={gpu_ids!r} needs placement_group_strategy='STRICT_PACK', so that the ids are those of one "
            f"node, got {strategy!r}"
        )
    if not isinstance(gpu_ids, (list, tuple)):
        raise ValueError(f"gpu_ids must be a list of ids, a list per logical node, or 'auto', got {gpu_ids!r}")
    used = [node_idx for node_idx, count in enumerate(counts) if count > 0]
    if any(isinstance(one, (list, tuple)) for one in gpu_ids):
        per_node = list(gpu_ids)
        if len(per_node) != len(counts):
            raise ValueError(f"gpu_ids has {len(per_node)} lists for {len(counts)} logical nodes: {gpu_ids!r}")
    elif len(used) == 1:
        per_node = [gpu_ids if node_idx in used else [] for node_idx in range(len(counts))]
    else:
        raise ValueError(f"gpu_ids must be a list per logical node, as {len(used)} are in use, got {gpu_ids!r}")
    for node_idx, (ids, count) in enumerate(zip(per_node, counts, strict=True)):
        if not isinstance(ids, (list, tuple)) or len(ids) != count:
            raise ValueError(
                f"gpu_ids of logical node {node_idx} must be {count} ids, one for each bundle, got {ids!r}"
            )
        for one in ids:
            if isinstance(one, bool) or not isinstance(one, int) or one < 0:
                raise ValueError(f"gpu_ids must be integers, 0 or more, got {one!r} in {ids!r}")
        if len(set(ids)) < len(ids):
            raise ValueError(f"gpu_ids of a logical node must be different, got {ids!r}")
    return {node_idx: frozenset(map(str, per_node[node_idx])) for node_idx in used}


def reserve_gpus(
    asks: Sequence[Ask],
    wanted: Wanted,
    *,
    name: str,
    unified: bool,
    timeout_s: float,
    wait_for_nodes_s: float,
    avoid: AbstractSet[str] = frozenset(),
) -> tuple[Reserved, ...]:
    """As `reserve`, on exactly the GPUs that `wanted` names for each logical node.

    Raises:
        ResourceInsufficientError: no node has these ids or can hold the request even when idle, also after
            `wait_for_nodes_s`; or others held the ids for `timeout_s`.
        PlacementTimeoutError: the ids were free, but not what else is asked for.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    names: dict[str, tuple[str, ...]] = {}
    with Waiting(f"Reserving {name or 'a cluster'}") as waiting:
        pause = POLL_S[0]
        while True:
            nodes = tuple(node for node in read_nodes() if node.node_id not in avoid)
            names.update(gpu_names([node for node in nodes if node.node_id not in names], deadline=deadline))
            owned = {node.node_id: frozenset(names[node.node_id]) for node in nodes}
            waited = time.monotonic() - began
            if never_fits(_exact(asks, wanted), _shown(nodes, owned, owned), own_nodes=unified):
                limit = wait_for_nodes_s
                if waited >= limit:
                    found = report_of(asks, nodes, "impossible")
                    raise ResourceInsufficientError(_no_node(asks, wanted, nodes, names), found)
                waiting.show("nodes have to join", limit)
            else:
                limit = timeout_s
                placed, free = _try_nodes(asks, wanted, nodes, owned, name=name, unified=unified, deadline=deadline)
                if placed is not None:
                    return placed
                if waited >= limit:
                    raise _refusal(asks, wanted, nodes, names, free, waited)
                waiting.show("others hold its GPUs", limit)
            # Not in step with others that do the same: two that fill one node at a time both miss.
            time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), began + limit - time.monotonic())))
            pause = min(2 * pause, POLL_S[1])


def _try_nodes(
    asks: Sequence[Ask],
    wanted: Wanted,
    nodes: Sequence[Node],
    owned: Ids,
    *,
    name: str,
    unified: bool,
    deadline: float,
) -> tuple[tuple[Reserved, ...] | None, Ids]:
    """Try the nodes that may have the ids free, each once; also what was found to be free on those tried."""
    found: Ids = {}
    while True:
        # A node is believed to have everything free until it has been looked at, so every turn rules something out.
        free = {**owned, **found}
        chosen = plan(_exact(asks, wanted), _shown(nodes, owned, free), own_nodes=unified)
        if chosen is None:
            return None, found
        on = {node_idx: node_id for node_idx, (node_id,) in chosen.items()}
        placed: tuple[Reserved, ...] | None = None
        try:
            with filled([node for node in nodes if node.node_id in on.values()], deadline=deadline) as fillers:
                found.update({node_id: frozenset(held) for node_id, held in fillers.items()})
                if all(wanted[node_idx] <= found[node_id] for node_idx, node_id in on.items()):
                    placed = _exchange(asks, wanted, on, fillers, name=name, unified=unified, deadline=deadline)
                    if placed is None:  # somebody was faster
                        found.update(dict.fromkeys(on.values(), frozenset()))
        except BaseException:
            drop(placed or ())
            raise
        if placed is not None:
            return placed, found


def _exchange(
    asks: Sequence[Ask],
    wanted: Wanted,
    on: Mapping[int, str],
    fillers: Fillers,
    *,
    name: str,
    unified: bool,
    deadline: float,
) -> tuple[Reserved, ...] | None:
    """Give the wanted GPUs back and place the groups on them; None, with nothing left, if they are not what Ray gave.

    Logical nodes that share a node take turns, or Ray might swap their GPUs.
    """
    turns: dict[int, list[Ask]] = {}
    on_node: dict[str, int] = {}
    for ask in asks:
        turn = on_node[on[ask.node_idx]] = on_node.get(on[ask.node_idx], -1) + 1
        turns.setdefault(turn, []).append(ask)
    made: list[Reserved] = []
    try:
        for turn_asks in turns.values():
            drop([fillers[on[ask.node_idx]][one] for ask in turn_asks for one in wanted[ask.node_idx]])
            chosen = {ask.node_idx: (on[ask.node_idx],) * ask.count for ask in turn_asks}
            placed = place(turn_asks, chosen, name=name, unified=unified)
            made.extend(placed or ())
            if placed is None or not _as_wanted(placed, wanted, deadline=deadline):
                drop(made)
                return None
    except BaseException:
        drop(made)
        raise
    return tuple(sorted(made, key=lambda one: one.node_idx[0]))


def _as_wanted(placed: Sequence[Reserved], wanted: Wanted, *, deadline: float) -> bool:
    got: dict[int, set[str]] = {}
    for one, ids in zip(placed, accelerator_ids(placed, deadline=deadline), strict=True):
        for node_idx, of_bundle in zip(one.node_idx, ids, strict=True):
            got.setdefault(node_idx, set()).update(of_bundle)
    return all(ids == wanted[node_idx] for node_idx, ids in got.items())


def _exact(asks: Sequence[Ask], wanted: Wanted) -> list[Ask]:
    """The asks as the planner can match them to nodes: whole logical nodes, with each id as a resource of its own."""
    return [
        replace(
            ask,
            count=1,
            bundle={
                **{name: amount * ask.count for name, amount in ask.bundle.items()},
                **dict.fromkeys(map(_resource, wanted[ask.node_idx]), 1.0),
            },
        )
        for ask in asks
    ]


def _shown(nodes: Sequence[Node], owned: Ids, free: Ids) -> list[Node]:
    """The nodes with their GPU ids as resources."""
    return [
        replace(
            node,
            total={**node.total, **dict.fromkeys(map(_resource, owned[node.node_id]), 1.0)},
            free={**node.free, **dict.fromkeys(map(_resource, free[node.node_id]), 1.0)},
        )
        for node in nodes
    ]


def _resource(gpu_id: str) -> str:
    return f"GPU id {gpu_id}"


def _ids(ids: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(ids, key=lambda one: (len(one), one))) or "none"


def _no_node(asks: Sequence[Ask], wanted: Wanted, nodes: Sequence[Node], names: Mapping[str, tuple[str, ...]]) -> str:
    everywhere = [
        f"node {node.node_id[:8]} ({node.ip}) has {_ids(names[node.node_id])}" for node in nodes if names[node.node_id]
    ]
    there = "; ".join(everywhere[:SHOWN]) + ("; ..." if len(everywhere) > SHOWN else "") or "no node has a GPU"
    for ask in asks:
        ids = wanted[ask.node_idx]
        if not any(ids <= set(names[node.node_id]) for node in nodes):
            missing = ids - {one for node in nodes for one in names[node.node_id]}
            what = f"No node has GPU {_ids(missing)}" if missing else f"No single node has the GPUs {_ids(ids)}"
            return f"{what}, asked for logical node {ask.node_idx}: {there}. Ask for ids that one node has (gpu_ids)."
    return (
        f"The cluster cannot hold {len(asks)} logical node(s) on the GPUs asked for, even when it is idle: {there}. "
        "Every id can be in one logical node only, and the node needs what else is asked for (see below)."
    )


def _refusal(
    asks: Sequence[Ask],
    wanted: Wanted,
    nodes: Sequence[Node],
    names: Mapping[str, tuple[str, ...]],
    found: Ids,
    waited: float,
) -> ResourceInsufficientError | PlacementTimeoutError:
    having = {
        ask.node_idx: [node for node in nodes if wanted[ask.node_idx] <= set(names[node.node_id])][:SHOWN]
        for ask in asks
    }
    # Looked at again where nothing was found, too: there somebody else may just have been faster.
    unseen = {node.node_id: node for some in having.values() for node in some if not found.get(node.node_id)}
    with filled(list(unseen.values()), deadline=time.monotonic()) as fillers:
        free = {**found, **{node_id: frozenset(held) for node_id, held in fillers.items()}}
    reasons = []
    for node_idx, candidates in having.items():
        missing = {node.node_id: wanted[node_idx] - free[node.node_id] for node in candidates}
        if all(missing.values()):
            reasons += [
                f"GPU {_ids(missing[node.node_id])}, asked for logical node {node_idx}, not free on node "
                f"{node.node_id[:8]} ({node.ip}): "
                + held_by(node.node_id, names[node.node_id], missing[node.node_id], free[node.node_id])
                for node in candidates
            ]
    if reasons:
        return ResourceInsufficientError(
            f"Waited {waited:.1f} s for particular GPUs. " + ". ".join(reasons) + ". Release them, ask for others "
            "(gpu_ids), or wait longer (reserve_timeout_s).",
            report_of(asks, nodes, "taken"),
        )
    return PlacementTimeoutError(
        f"Waited {waited:.1f} s: the GPUs asked for are free, but others hold what else the request needs, or take "
        "turns with it (see below). Release some of it, or wait longer (reserve_timeout_s).",
        report_of(asks, nodes, "taken"),
    )

# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a node has, and holding those that are free one by one, which is how Ray lets them be told apart."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._nodes.agent import guard_groups, is_driver
from .._plan.model import Node
from .._ray_private import visible_gpus
from .accelerators import LEAST_S, accelerator_ids
from .groups import PLACING_S, Reserved, remove, unique_name

__all__ = ["Fillers", "drop", "filled", "gpu_names"]

# A node that does not report its ids in this time is taken to have the usual ones: one silent node must not use up the
# time of the whole reservation.
NAMES_S = 30.0
Fillers = Mapping[str, Mapping[str, Reserved]]


def gpu_names(nodes: Sequence[Node], *, deadline: float) -> dict[str, tuple[str, ...]]:
    """The ids of all GPUs of each node, by node id, in Ray's own order; asked with one short task a node.

    They are 0, 1, ..., unless the node's Ray was started with CUDA_VISIBLE_DEVICES. A node that does not answer is
    taken to have the former.
    """
    counts = {node.node_id: int(node.total.get("GPU", 0)) for node in nodes}
    asked = {
        _ask_visible()
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(): node_id
        for node_id, count in counts.items()
        if count > 0
    }
    names = {node_id: tuple(map(str, range(count))) for node_id, count in counts.items()}
    limit_s = min(NAMES_S, max(LEAST_S, deadline - time.monotonic()))
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
    for ref in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # its node has gone
            visible = ray.get(ref)
            if visible:
                names[asked[ref]] = tuple(visible[: counts[asked[ref]]])
    return names


@contextlib.contextmanager
def filled(nodes: Sequence[Node], *, deadline: float) -> Iterator[Fillers]:
    """Hold every whole GPU that is free on the nodes, each in a placement group of its own, until the block ends.

    Yields for each node id the groups by GPU id. Whatever happens in the block, or before it, all of them are gone
    after it; one may be dropped earlier. The ids are asked for until the `deadline` of the reservation.
    """
    made: list[Reserved] = []
    guard_groups()
    try:
        for node in nodes:
            for _ in range(int(node.free.get("GPU", 0))):
                bundle = {"GPU": 1.0}
                group = placement_group(
                    [bundle],
                    name="" if is_driver() else unique_name("fairlead-gpu"),
                    bundle_label_selector=[{"ray.io/node-id": node.node_id}],
                    strategy="PACK",
                )
                made.append(Reserved(group, (0,), (node.node_id,), (bundle,)))
        placed = _placed(made)
        # What was free in sum but not as a whole, or has been taken since, must not be taken later.
        there = {one.group.id for one in placed}
        drop([one for one in made if one.group.id not in there])
        held: dict[str, dict[str, Reserved]] = {node.node_id: {} for node in nodes}
        for one, ((gpu_id,),) in zip(placed, accelerator_ids(placed, deadline=deadline), strict=True):
            held[one.node_ids[0]][gpu_id] = one
        yield held
    finally:
        drop(made)


def drop(made: Sequence[Reserved]) -> None:
    """Remove groups and wait until their resources are back; those that have been removed before are passed over."""
    if made and ray.is_initialized():
        remove([one.group for one in made])


def _placed(made: Sequence[Reserved]) -> list[Reserved]:
    """Those that Ray has placed, once it has placed all of them, or no further one for as long as one may take."""
    placed: list[Reserved] = []
    deadline = time.monotonic() + PLACING_S
    while len(placed) < len(made) and time.monotonic() < deadline:
        states = {group_id: row["state"] for group_id, row in placement_group_table().items()}
        now = [one for one in made if states.get(one.group.id.hex()) == "CREATED"]
        if len(now) > len(placed):
            placed, deadline = now, time.monotonic() + PLACING_S
        else:
            time.sleep(0.005)
    return placed


def _ask_visible() -> Any:
    return ray.remote(visible_gpus())

# SPDX-License-Identifier: Apache-2.0
"""Questions of groups to Ray's head (its GCS), and about workers to their nodes, each with a deadline.

No other module reads the tables of the head. A head that does not answer within `REQUEST_S`, or the `head_deadline` of
the caller, raises `HeadTimeoutError`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import extension
from fairlead_placement.extension import ask_head, choose_alive, group_pairs, head_deadline, run_on_nodes

from .. import _ray_private
from .._model import Member
from .._remote.node import cancel_tasks, look_from_outside, read_records, read_verdicts
from .._replies import task_of
from ..exceptions import LateWorker

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# The head answers within milliseconds.
REQUEST_S = 10.0
# Nodes answer within a second. A caller does not wait longer than this for a node that does not.
ANSWER_S = 10.0
# The deadline of a caller has passed when the nodes are asked what late workers do.
LATE_S = 0.7
# If Ray's head does not answer within this time, all nodes are asked, including dead ones.
HEAD_S = 1.0
# What callers allow may be over: a node that has no free CPU needs half a second to start what reads a verdict. A call
# raises within a second of its deadline.
VERDICT_S = 0.7
# How long the nodes may take to find the processes of workers that start, and their stacks.
STACKS_S = 2.0


def _ask(request: str, function: Callable[..., _T], *args: Any) -> _T:
    with head_deadline(REQUEST_S):
        return ask_head(request, function, *args)


def alive_nodes() -> frozenset[str]:
    """Return the nodes that are alive, including those that are draining."""
    return _ask("list the nodes", extension.alive_nodes)


def draining_nodes() -> frozenset[str]:
    """Return the nodes that are draining."""
    return frozenset(_ask("list the nodes that are draining", extension.drain_deadlines))


def dead_actors() -> frozenset[str]:
    """Return the actors of this job that are dead."""
    return _ask("list the dead actors", _ray_private.find_actors, "DEAD")


def actors_being_made() -> frozenset[str]:
    """Return the actors of this job that have been requested and not yet created."""
    states = "DEPENDENCIES_UNREADY", "PENDING_CREATION"
    return _ask("list the actors that are being created", _ray_private.find_actors, *states)


def read_placement_group(group: PlacementGroup) -> Mapping[str, Any]:
    """Return Ray's row of a placement group."""
    return _ask("look at a placement group", placement_group_table, group)


def ask_nodes(
    workers: Sequence[Member],
    function: Callable[..., Any],
    *more: Any,
    values: Sequence[Any] | None = None,
    within_s: float | None = None,
    asks_head: bool = True,
) -> list[Any]:
    """Apply a function to a value of each worker, on its node; return the results in the order of the workers.

    The function takes and returns a list for the workers of one node. Without `values`, it gets their keys. A node that
    does not answer within `within_s`, or `ANSWER_S`, gives None. Without `asks_head`, the nodes that Ray's head knows
    to be dead are asked too, because the head may be silent.
    """
    results: list[Any] = [None] * len(workers)
    if not workers:
        return results
    within_s = ANSWER_S if within_s is None else within_s
    deadline = time.monotonic() + within_s
    by_node = group_pairs((worker.node_id, index) for index, worker in enumerate(workers))
    nodes = choose_alive(by_node, timeout_s=min(HEAD_S, within_s / 2)) if asks_head else by_node
    values = [worker.key for worker in workers] if values is None else values
    asks = {node_id: ([values[index] for index in by_node[node_id]], *more) for node_id in nodes}
    for node_id, answers in run_on_nodes(function, asks, timeout_s=max(0.1, deadline - time.monotonic())).items():
        if isinstance(answers, Exception):
            if ray.is_initialized():  # otherwise another thread has ended Ray, and the workers with it
                logger.warning("Cannot look at the workers on node %s: %s", node_id[:8], answers)
            continue
        for index, answer in zip(by_node[node_id], answers, strict=True):
            results[index] = answer
    return results


def late_workers(workers: Sequence[Member]) -> tuple[LateWorker, ...]:
    """Return what each of these workers is doing now, as far as their nodes say so within `LATE_S`."""
    unknown: dict[str, Any] = {"method": None, "running_s": 0.0}
    records = ask_nodes(workers, read_records, within_s=LATE_S, asks_head=False)
    return tuple(
        LateWorker(member.rank, dict(member.coords), member.node_id, member.pid, record["method"], record["running_s"])
        for member, record in zip(workers, (record or unknown for record in records), strict=True)
    )


def look_at_starts(workers: Sequence[Member]) -> list[Any]:
    """Return what `look_from_outside` says of workers that start; None if a node does not answer in time."""
    marked = [(*worker.key, worker.mark) for worker in workers]
    return ask_nodes(workers, look_from_outside, 0.0, True, values=marked, within_s=STACKS_S, asks_head=False)


def cancel_calls(
    calls: Sequence[tuple[Member, Any]], *, in_order: bool = False, within_s: float | None = None
) -> list[Member]:
    """Cancel requests to workers, given by their futures; return the workers that may still run one of them.

    The record of a worker prevents that a method starts. Ray cancels coroutines, and drops values of cancelled tasks.

    Of workers that run their methods `in_order`, Ray has to cancel only methods that run. If Ray 2.60 cancels a call to
    such a worker before it is delivered, the worker waits 30 s for that call and then refuses the calls behind it.
    """
    tasks = [(worker.key, task_of(future)) for worker, future in calls]
    workers = [worker for worker, _ in calls]
    running = ask_nodes(workers, cancel_tasks, values=tasks, within_s=within_s)
    for future, runs in zip([future for _, future in calls], running, strict=True):
        if runs is not False or not in_order:  # also if the node has not answered
            ray.cancel(future)
    return [worker for worker, runs in zip(workers, running, strict=True) if runs is not False]


def find_killed(workers: Sequence[Member], within_s: float) -> dict[Member, str]:
    """Return the cause, with both numbers, of the ends of those workers that had passed their limit.

    A node that does not answer `VERDICT_S` after the time of the caller gives none.
    """
    limit_s = within_s + VERDICT_S
    actors = [worker.actor_id for worker in workers]
    verdicts = ask_nodes(workers, read_verdicts, values=actors, within_s=limit_s, asks_head=False)
    return {
        worker: f"its process and its descendants held {verdict[0]:,} bytes of memory, over its memory_limit of "
        f"{verdict[1]:,} bytes"
        for worker, verdict in zip(workers, verdicts, strict=True)
        if verdict is not None
    }

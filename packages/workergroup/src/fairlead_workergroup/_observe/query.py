# SPDX-License-Identifier: Apache-2.0
"""Looking at workers from outside, through the agents of their nodes: one request a node."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from fairlead_placement import HeadTimeoutError
from fairlead_placement.spi import alive_nodes, ask_head, run_on_nodes

from .._members import WorkerFacts
from .._ray_private import task_of_future
from .._remote.process import find_ended as find_ended_processes
from .._remote.progress import cancel_tasks, read_records
from ..exceptions import LateWorker

__all__ = ["ask_nodes", "cancel_calls", "find_ended", "late_workers", "logger", "process_of"]

logger = logging.getLogger(__name__)

# Agents answer in milliseconds; an answer that takes longer is not worth a caller's time.
ANSWER_S = 10.0


def ask_nodes(
    workers: Sequence[WorkerFacts],
    function: Callable[..., Any],
    what: Callable[[WorkerFacts], Any],
    *more: Any,
    within_s: float | None = None,
) -> list[Any]:
    """Apply a function to something of each worker, on the workers' nodes.

    Args:
        workers: whom.
        function: takes the list of what belongs to a node's workers, and returns a list as long.
        what: of each worker.
        more: further arguments of the function.
        within_s: seconds that Ray's head and the nodes may take; None for `ANSWER_S`.

    Returns:
        The results in the order of `workers`; None for the workers of a node that did not answer, and for all workers
        if Ray's head did not.
    """
    deadline = time.monotonic() + (ANSWER_S if within_s is None else within_s)
    by_node: dict[str, list[int]] = {}
    for at, worker in enumerate(workers):
        by_node.setdefault(worker.node_id, []).append(at)
    found: list[Any] = [None] * len(workers)
    try:
        living = ask_head("list the nodes", alive_nodes, timeout_s=max(0.0, deadline - time.monotonic()))
    except HeadTimeoutError as error:
        logger.warning("Cannot look at the workers: %s", error)
        return found
    asks = {
        node_id: ([what(workers[at]) for at in members], *more)
        for node_id, members in by_node.items()
        if node_id in living
    }
    for node_id, answers in run_on_nodes(function, asks, timeout_s=max(0.1, deadline - time.monotonic())).items():
        if isinstance(answers, Exception):
            if ray.is_initialized():  # else another thread has ended it meanwhile, and there is nobody to look at
                logger.warning("cannot look at the workers on node %s: %s", node_id[:8], answers)
            continue
        for at, answer in zip(by_node[node_id], answers, strict=True):
            found[at] = answer
    return found


def process_of(worker: WorkerFacts) -> tuple[int, int]:
    """Return the pid and the start tick of a worker."""
    return worker.process


def late_workers(workers: Sequence[WorkerFacts]) -> tuple[LateWorker, ...]:
    """Who these are, and what each is doing now."""
    records: list[Mapping[str, Any] | None] = ask_nodes(workers, read_records, process_of)
    return tuple(
        LateWorker(
            worker.rank,
            dict(worker.coords),
            worker.node_id,
            worker.pid,
            method=None if record is None else record["method"],
            running_s=0.0 if record is None else record["running_s"],
        )
        for worker, record in zip(workers, records, strict=True)
    )


def find_ended(workers: Sequence[WorkerFacts]) -> list[bool]:
    """Whose process has ended, which Ray may not know yet; not whose node does not answer within a second."""
    answers = ask_nodes(workers, find_ended_processes, process_of, within_s=1.0)
    return [bool(one) for one in answers]


def cancel_calls(calls: Sequence[tuple[WorkerFacts, Any]]) -> list[int]:
    """Give up a worker's part of a call each, by its future; the ranks that had started it and run on.

    Ray drops the value of what is cancelled, and cancels coroutines. A method that is queued behind another one it
    would still run: that is kept from starting by the worker's own record.
    """
    tasks = {}
    for worker, future in calls:
        ray.cancel(future)
        tasks[worker.rank] = (worker.process, task_of_future(future))
    workers = [worker for worker, _ in calls]
    running = ask_nodes(workers, cancel_tasks, lambda worker: tasks[worker.rank])
    return [worker.rank for worker, runs in zip(workers, running, strict=True) if runs]

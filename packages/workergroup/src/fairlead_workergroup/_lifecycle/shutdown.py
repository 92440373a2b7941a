# SPDX-License-Identifier: Apache-2.0
"""Ending the workers of a group, in order, and making sure that they are gone."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from fairlead_placement.spi import alive_nodes, run_on_nodes

from .._ray_private import actor_id_of, actors_being_made
from .._remote.process import Process, end_trees, find_children

__all__ = ["WorkerProcess", "clean_up", "kill_and_wait"]

logger = logging.getLogger(__name__)

# Ray takes one to three seconds to start processes; those that find no room are not waited for longer.
MADE_S = 5.0
# What the agents wait for: a worker that Ray does not end, and children that do not end themselves.
GONE_S = 20.0
# Nodes are asked once more when that is over.
LAST_LOOK_S = 5.0
# How long an answer may take on its way.
ANSWERED_S = 2.0
# Without an answer, children are found by their marks alone.
FIND_S = 5.0


@dataclass(frozen=True)
class WorkerProcess:
    """Where a worker runs, and what finds its process and what it has started.

    Attributes:
        node_id: Ray's id of the node.
        mark: what the identity of the worker begins with; as of `process.mark_of`.
        pid: its process; 0 until it has started.
        started: the tick that the process started at.
    """

    node_id: str
    mark: str
    pid: int = 0
    started: int = -1

    @property
    def process(self) -> Process:
        """Its pid and start tick."""
        return self.pid, self.started


def clean_up(workers: Mapping[int, Any], method: str, timeout: float | None) -> bool:
    """Run a method on the workers that live, given by rank; whether all went well."""
    ranks = {worker._fairlead_cleanup.remote(method): rank for rank, worker in workers.items()}
    done, late = ray.wait(list(ranks), num_returns=len(ranks), timeout=timeout) if ranks else ([], [])
    clean = not late
    for ref in done:
        try:
            ray.get(ref)
        except Exception as error:  # noqa: BLE001  whatever a cleanup raises: the others still have to be ended
            logger.warning("cleanup %r of rank %d failed: %s", method, ranks[ref], error)
            clean = False
    if late:
        where = sorted(ranks[ref] for ref in late)
        logger.warning("cleanup %r did not end within %s s on ranks %s", method, timeout, where)
    return clean


def kill_and_wait(workers: Mapping[int, Any], processes: Mapping[int, WorkerProcess]) -> list[str]:
    """End workers and everything that they have started, and wait until all of it is gone.

    Rank 0, which holds the store of torch.distributed, is ended when the processes of the others are gone.

    Args:
        workers: the handles, by rank.
        processes: where each runs, by rank.

    Returns:
        What is still there, for people; nothing if all is gone. It is logged too.
    """
    others = {rank: worker for rank, worker in workers.items() if rank}
    first: dict[int, Any] = {rank: worker for rank, worker in workers.items() if not rank}
    children: dict[WorkerProcess, list[Process]] = {}
    try:
        try:
            _let_them_be_made(workers)
            # When the parent has died, its children can no longer be found through it.
            children = _find_children(processes.values())
        finally:  # also at a second Ctrl-C
            _kill(others)
        left = _wait(others, [processes[rank] for rank in processes if rank], children)
    finally:
        _kill(first)
    left += _wait(first, [processes[rank] for rank in processes if not rank], children)
    if left:
        logger.warning("Still there after workers were ended: %s.", "; ".join(left))
    return left


def _kill(workers: Mapping[int, Any]) -> None:
    for _, worker in sorted(workers.items(), reverse=True):
        ray.kill(worker)


def _wait(
    workers: Mapping[int, Any], processes: Sequence[WorkerProcess], children: Mapping[WorkerProcess, Sequence[Process]]
) -> list[str]:
    """Wait until workers that were killed are gone, end what they had started, and return what is still there."""
    # An actor that is dead answers this at once with an error, and nothing else does after a kill.
    refs = [worker.__ray_ready__.remote() for worker in workers.values()]
    deadline = time.monotonic() + GONE_S
    _, alive = ray.wait(refs, num_returns=len(refs), timeout=GONE_S) if refs else ([], [])
    there = _end_trees(processes, children, deadline)
    return there if there or not alive else [f"{len(alive)} worker(s) that Ray has not ended within {GONE_S:g} s"]


def _let_them_be_made(workers: Mapping[int, Any]) -> None:
    """Wait a moment for actors that are not there yet.

    Of one that is killed between the lease of a process for it and its creation there, Ray (2.60) leaves the process
    behind: it holds the slot, and the next worker there waits for ever. The more workers start, the longer that moment.
    """
    ours = {actor_id_of(worker) for worker in workers.values()}
    deadline = time.monotonic() + MADE_S
    pause = 0.02
    while ours & actors_being_made() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _by_node(processes: Iterable[WorkerProcess]) -> dict[str, list[WorkerProcess]]:
    by_node: dict[str, list[WorkerProcess]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append(process)
    return by_node


def _find_children(processes: Iterable[WorkerProcess]) -> dict[WorkerProcess, list[Process]]:
    """Return what is below each worker now, as far as the nodes answer; one request to each."""
    alive = alive_nodes()
    by_node = _by_node(one for one in processes if one.pid and one.node_id in alive)
    asks = {node_id: ([one.process for one in there],) for node_id, there in by_node.items()}
    children: dict[WorkerProcess, list[Process]] = {}
    for node_id, found in run_on_nodes(find_children, asks, timeout_s=FIND_S).items():
        if not isinstance(found, Exception):
            children.update(zip(by_node[node_id], found, strict=True))
    return children


def _end_trees(
    processes: Sequence[WorkerProcess], children: Mapping[WorkerProcess, Sequence[Process]], deadline: float
) -> list[str]:
    """Return what is still there at the deadline; all nodes are asked at once."""
    left = _by_node(processes)
    pause = 0.1
    while True:
        alive = alive_nodes() if left else frozenset()
        left = {node_id: there for node_id, there in left.items() if node_id in alive}
        if not left:
            return []
        within_s = max(LAST_LOOK_S, deadline - time.monotonic())
        asks = {
            node_id: (
                [one.process for one in there if one.pid],
                [child for one in there for child in children.get(one, ())],
                [one.mark for one in there],
                within_s - ANSWERED_S,
            )
            for node_id, there in left.items()
        }
        found = run_on_nodes(end_trees, asks, timeout_s=within_s)
        silent = {node_id: answer for node_id, answer in found.items() if isinstance(answer, Exception)}
        there = [
            f"pid {pid} on node {node_id[:8]}"
            for node_id, answer in found.items()
            if not isinstance(answer, Exception)
            for pid, _ in answer
        ]
        # A node that does not answer may be going.
        if there or not silent or time.monotonic() >= deadline:
            return there + [f"workers on node {one[:8]}, whose agent says: {error}" for one, error in silent.items()]
        left = {node_id: left[node_id] for node_id in silent}
        time.sleep(pause)
        pause = min(2 * pause, 0.5)

# SPDX-License-Identifier: Apache-2.0
"""Ending the workers of a group, in order, and making sure that they are gone."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from fairlead_placement import alive_nodes, run_on_nodes

from . import _processes
from ._ray_private import actor_id_of, actors_being_made

__all__ = ["clean_up", "kill_and_wait"]

logger = logging.getLogger(__name__)
ray.cloudpickle.register_pickle_by_value(_processes)

# Ray takes one to three seconds to start processes; those that find no room are not waited for longer.
MADE_S = 5.0
# Ray takes about 5 s at worst to end a process that does not end itself.
GONE_S = 15.0
# Nodes are asked once more when that is over.
LAST_LOOK_S = 5.0


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


def kill_and_wait(workers: Mapping[int, Any], processes: Sequence[tuple[str, int, int]]) -> bool:
    """End the workers, the last rank first, and wait until their processes are gone; whether they are.

    Args:
        workers: the handles, by rank; rank 0, which holds the store of torch.distributed, is ended last.
        processes: (node id, pid, start tick) of those that had started.
    """
    try:
        _let_them_be_made(workers)
    finally:  # also at a second Ctrl-C
        for _, worker in sorted(workers.items(), reverse=True):
            ray.kill(worker)
    # An actor that is dead answers this at once with an error, and nothing else does after a kill.
    refs = [worker.__ray_ready__.remote() for worker in workers.values()]
    deadline = time.monotonic() + GONE_S
    _, alive = ray.wait(refs, num_returns=len(refs), timeout=GONE_S) if refs else ([], [])
    there = _remaining(processes, deadline)
    if alive or there:
        logger.warning("%d worker(s) did not end within %g s: pids %s", max(len(alive), len(there)), GONE_S, there)
    return not alive and not there


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


def _remaining(processes: Sequence[tuple[str, int, int]], deadline: float) -> list[int]:
    """The pids that are still there at the deadline; all nodes are asked at once each time."""
    by_node: dict[str, list[tuple[int, int]]] = {}
    for node_id, pid, started in processes:
        by_node.setdefault(node_id, []).append((pid, started))
    pause = 0.01
    while True:
        alive = alive_nodes()
        asks = {node_id: (there,) for node_id, there in by_node.items() if node_id in alive}
        left = max(LAST_LOOK_S, deadline - time.monotonic())
        by_node = {}
        for node_id, there in run_on_nodes(_processes.still_there, asks, timeout_s=left).items():
            if isinstance(there, Exception):
                logger.warning("cannot ask node %s which workers are still there: %s", node_id[:8], there)
                by_node[node_id] = asks[node_id][0]
            elif there:
                by_node[node_id] = [one for one in asks[node_id][0] if one[0] in there]
        if not by_node or time.monotonic() >= deadline:
            return [pid for ones in by_node.values() for pid, _ in ones]
        time.sleep(pause)
        pause = min(2 * pause, 0.5)

# SPDX-License-Identifier: Apache-2.0
"""The end of workers, in order, until all of their processes are gone."""

import contextlib
import logging
import time
from collections.abc import Collection, Sequence

import ray

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import choose_alive, collect, group_pairs, head_deadline, run_on_nodes, wait_until

from .._model import Member
from .._observe.head import actors_being_made, draining_nodes
from .._remote.process import WORKER_GRACE_S, end_trees
from .._world import Deadline

logger = logging.getLogger(__name__)

# Ray takes one to three seconds to start processes. Actors that find no room are not waited for longer than this.
MADE_S = 5.0
# How long the nodes wait for a worker that Ray does not end, and for children that do not end.
GONE_S = 20.0
# The time for the end of workers when the deadline is about to pass.
LAST_LOOK_S = 5.0
# How long an answer may take on its way.
ANSWERED_S = 2.0


def kill_and_wait(workers: Collection[Member], until: Deadline = Deadline()) -> list[str]:  # noqa: B008  frozen
    """End workers and all that they have started; log and return descriptions of what is left.

    Rank 0 has the store of torch.distributed, so it is ended when the processes of the others are gone. If Ray's head
    does not answer, functions on the nodes end the processes. It takes less time than is left, because other things are
    returned after it, but `LAST_LOOK_S` in any case.
    """
    deadline = time.monotonic() + max(LAST_LOOK_S, 0.8 * (until.left(at_most=2 * GONE_S) or 0.0))
    others = [worker for worker in sorted(workers, key=lambda worker: -worker.rank) if worker.rank]
    first = [worker for worker in workers if not worker.rank]
    by_ray = True
    try:
        try:
            by_ray = _wait_until_created(workers, deadline)
        finally:  # also after a second Ctrl-C
            _kill(others)
        left = _wait(others, deadline, by_ray=by_ray)
    finally:
        _kill(first)
    left += _wait(first, deadline, by_ray=by_ray)
    if not by_ray:
        left.append(f"{len(workers)} worker(s) whose end Ray's head has not confirmed, because it does not answer")
    if left:
        logger.warning("Still alive after the end of workers: %s.", "; ".join(left))
    return left


def _kill(workers: Sequence[Member]) -> None:
    for worker in workers:
        ray.kill(worker.handle)


def _wait(workers: Sequence[Member], until: float, *, by_ray: bool) -> list[str]:
    """Wait for the end of killed workers, end their processes, and return descriptions of those still alive."""
    now = time.monotonic()
    if not by_ray:
        return _end_trees(workers, min(until, now + LAST_LOOK_S), grace_s=0.0)
    # A dead actor answers this at once with an error; nothing answers after a kill except that.
    deadline = min(until, now + GONE_S)
    sends = {number: worker.handle.__ray_ready__.remote for number, worker in enumerate(workers)}
    answers = collect(sends, max(0.1, deadline - now))
    alive = [error for _, error in answers.values() if isinstance(error, ray.exceptions.GetTimeoutError)]
    left = _end_trees(workers, deadline, grace_s=WORKER_GRACE_S)
    return left if left or not alive else [f"{len(alive)} worker(s) that Ray has not ended within {GONE_S:g} s"]


def _wait_until_created(workers: Collection[Member], until: float) -> bool:
    """Wait a moment for actors that Ray has not created yet; return whether Ray's head answers.

    If an actor is killed after Ray has leased a process for it and before it is created there, Ray (2.60) leaves the
    process behind. That process holds the slot, and the next worker in the slot waits for ever.
    """
    ours = {worker.actor_id for worker in workers}
    within_s = min(MADE_S, max(0.1, until - time.monotonic()))
    try:
        with head_deadline(within_s):
            wait_until(lambda: not ours & actors_being_made(), time.monotonic() + within_s, longest_s=0.5)
    except HeadTimeoutError as error:
        logger.warning("Workers are ended without Ray's head: %s", error)
        return False
    return True


def _end_trees(workers: Sequence[Member], deadline: float, *, grace_s: float) -> list[str]:
    """End the processes of workers on all nodes at once; return descriptions of those alive at the deadline."""
    by_node = group_pairs((worker.node_id, worker) for worker in workers)
    pause = 0.1
    while by_node:
        alive = set(choose_alive(by_node))
        within_s = max(0.5, deadline - time.monotonic())
        asks = {
            node_id: (
                [worker.key for worker in ours if worker.pid],
                [worker.mark for worker in ours],
                max(0.1, within_s - ANSWERED_S),
                grace_s,
            )
            for node_id, ours in by_node.items()
            if node_id in alive
        }
        answers = run_on_nodes(end_trees, asks, timeout_s=within_s)
        silent = {node_id: answer for node_id, answer in answers.items() if isinstance(answer, Exception)}
        left = [
            f"pid {pid} on node {node_id[:8]}"
            for node_id, answer in answers.items()
            if not isinstance(answer, Exception)
            for pid, _ in answer
        ]
        draining = frozenset[str]()
        if silent:
            with contextlib.suppress(HeadTimeoutError), head_deadline(LAST_LOOK_S):
                draining = draining_nodes()
        # Ray starts no task on a node that drains, and the node ends by itself.
        for node_id in silent.keys() & draining:
            logger.warning(
                "Cannot look for processes of workers on node %s, which drains; they end with it at the latest: %s",
                node_id[:8],
                silent.pop(node_id),
            )
        # A node that does not answer may be about to go.
        if left or not silent or time.monotonic() >= deadline:
            return left + [
                f"workers on node {node_id[:8]}, which does not answer: {error}" for node_id, error in silent.items()
            ]
        by_node = {node_id: by_node[node_id] for node_id in silent}
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return []

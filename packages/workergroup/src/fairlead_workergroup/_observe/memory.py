# SPDX-License-Identifier: Apache-2.0
"""The memory limit of workers: its text, its enforcement by the node agents, and the losses that it caused."""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from fairlead_placement.extension import (
    call_in_agents,
    call_in_present_agents,
    choose_alive,
    group_pairs,
    leave_agents,
)

from .._model import Member
from .._remote.process import read_verdicts, start_guard
from .._world import Deadline
from ..exceptions import WorkerGroupError
from .query import ANSWER_S

logger = logging.getLogger(__name__)
UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}}
UNITS |= {unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}

# Between two requests to an agent that does not answer.
PAUSE_S = 0.2


def parse_memory(size: int | str) -> int:
    """Return a number of bytes, given as a number, or as text such as "8GB" (powers of 1000) or "512MiB" (of 1024).

    Raises:
        ValueError: the size is neither, or it is not positive.

    >>> parse_memory("1.5GB"), parse_memory("2KiB"), parse_memory(100)
    (1500000000, 2048, 100)
    """
    wrong = f"a memory limit is a positive number of bytes, or text such as '8GB' or '512MiB', got {size!r}"
    if isinstance(size, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if parts is None or parts[2].upper() not in UNITS:
            raise ValueError(wrong)
        size = int(float(parts[1]) * UNITS[parts[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(wrong)
    return size


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes on a worker and the processes it has started together, which the nodes' agents enforce."""

    token: str
    limit: int
    # The workers that agents have been asked to guard. Any thread changes it, by single operations.
    guarded: dict[Member, None] = field(default_factory=dict, compare=False, repr=False)

    def guard(self, workers: Sequence[Member], deadline: Deadline, group: Any) -> None:
        """Make the nodes' agents end workers that pass the limit, with one request for each node.

        An agent that does not answer is asked again until the deadline, because it may be about to start.
        """
        self.guarded.update(dict.fromkeys(workers))
        unguarded = list(workers)
        while unguarded:
            guarded = self._start(unguarded)
            unguarded = [worker for worker, answer in zip(unguarded, guarded, strict=True) if answer is None]
            if unguarded and group.ending:
                raise group.ended_error()
            if unguarded and (deadline.passed or _is_gone(unguarded[0].node_id)):
                raise WorkerGroupError(
                    f"memory_limit cannot be enforced on {unguarded[0]}: the node's agent did not answer. Look at the "
                    "node, or use another one."
                )
            if unguarded:
                time.sleep(PAUSE_S)

    def _guard_again(self, node_id: str) -> None:
        """Make a new agent guard the workers of a node, because the agent before it has died."""
        workers = [worker for worker in list(self.guarded) if worker.node_id == node_id]
        for worker, is_alive in zip(workers, self._start(workers), strict=True):
            if is_alive is None:
                logger.warning("memory_limit is not enforced on %s any more: its node's agent did not answer", worker)
            elif not is_alive:
                self.guarded.pop(worker, None)

    def _start(self, workers: Sequence[Member]) -> list[bool | None]:
        """Have agents guard workers; return whether each worker is alive, None if its agent did not answer."""
        on_node = group_pairs((worker.node_id, worker) for worker in workers)
        asks = {
            node_id: ([(*one.key, one.mark) for one in its], self.token, self.limit) for node_id, its in on_node.items()
        }
        answers = call_in_agents(start_guard, asks, self._name, timeout_s=ANSWER_S, on_loss=self._guard_again)
        return self._by_worker(workers, on_node, answers)

    @property
    def _name(self) -> str:
        return f"guard-{self.token}"

    def release(self) -> None:
        """End the agents that only guard the workers of this group, which have ended."""
        self.guarded.clear()
        leave_agents(self._name)

    @staticmethod
    def _by_worker(
        workers: Sequence[Member], on_node: Mapping[str, Sequence[Member]], answers: Mapping[str, Any]
    ) -> list[Any]:
        """Return the answer for each worker, None if the agent of its node did not answer or there is none."""
        found = {
            worker: answer
            for node_id, its in on_node.items()
            if isinstance(answers.get(node_id), list)
            for worker, answer in zip(its, answers[node_id], strict=True)
        }
        return [found.get(worker) for worker in workers]

    def find_killed(self, workers: Sequence[Member], within_s: float) -> dict[Member, str]:
        """Return the cause, with both numbers, of the end of the workers that a guard has ended."""
        on_node = group_pairs((worker.node_id, worker) for worker in workers)
        asks = {node_id: ([worker.key for worker in its], self.token) for node_id, its in on_node.items()}
        sizes = self._by_worker(workers, on_node, call_in_present_agents(read_verdicts, asks, timeout_s=within_s))
        cause = f"over its memory_limit of {self.limit:,} bytes"
        return {
            worker: f"its process and those that it had started held {size:,} bytes of memory, {cause}"
            for worker, size in zip(workers, sizes, strict=True)
            if size is not None
        }


def _is_gone(node_id: str) -> bool:
    """Return whether a node, or Ray itself, has ended, so that its agent will not answer any more."""
    return not ray.is_initialized() or not choose_alive([node_id])

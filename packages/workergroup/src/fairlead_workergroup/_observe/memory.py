# SPDX-License-Identifier: Apache-2.0
"""Memory limits of workers: parsing, enforcement by the node agents, and which losses they caused."""

import re
from collections.abc import Sequence
from dataclasses import replace

from .._members import WorkerFacts
from .._remote.process import mark_of, read_verdicts, start_guard
from ..exceptions import WorkerFailure, WorkerGroupError
from .query import ask_nodes, process_of

__all__ = ["MemoryLimit", "parse_memory"]

UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}}
UNITS |= {unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}


def parse_memory(size: int | str) -> int:
    """Bytes of a number, or of text such as "8GB" (powers of 1000) or "512MiB" (of 1024).

    Raises:
        ValueError: it is neither, or not positive.

    >>> parse_memory("1.5GB"), parse_memory("2KiB"), parse_memory(100)
    (1500000000, 2048, 100)
    """
    wrong = f"a memory limit is a positive number of bytes, or text such as '8GB' or '512MiB', got {size!r}"
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if found is None or found[2].upper() not in UNITS:
            raise ValueError(wrong)
        size = int(float(found[1]) * UNITS[found[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(wrong)
    return size


class MemoryLimit:
    """A limit of the memory of each worker of a group, which the nodes' agents enforce.

    Args:
        token: identifies the group among all groups of all drivers.
        limit: bytes, of a worker and the processes it has started together.
    """

    def __init__(self, token: str, limit: int) -> None:
        self._token = token
        self._limit = limit

    def guard(self, workers: Sequence[WorkerFacts]) -> None:
        """Have the nodes' agents end workers that pass the limit; one request a node.

        Raises:
            WorkerGroupError: a node's agent did not start to watch.
        """
        started = ask_nodes(workers, start_guard, self._marked, self._token, self._limit)
        if unguarded := [worker for worker, there in zip(workers, started, strict=True) if there is None]:
            raise WorkerGroupError(
                f"memory_limit cannot be enforced on {unguarded[0]}: the node's agent did not answer"
            )

    def judge(self, failures: Sequence[WorkerFailure], workers: Sequence[WorkerFacts]) -> tuple[WorkerFailure, ...]:
        """Return the failures; those that a guard has caused become "out-of-memory", with both numbers."""
        killed = [failure for failure in failures if failure.kind == "killed"]
        asked = [workers[failure.rank] for failure in killed]
        found = ask_nodes(asked, read_verdicts, process_of, self._token) if asked else []
        sizes = {failure.rank: size for failure, size in zip(killed, found, strict=True) if size is not None}
        return tuple(
            replace(
                failure,
                kind="out-of-memory",
                cause=f"its process and those that it had started held {sizes[failure.rank]:,} bytes of memory, over "
                f"its memory_limit of {self._limit:,} bytes",
            )
            if failure.rank in sizes
            else failure
            for failure in failures
        )

    def _marked(self, worker: WorkerFacts) -> tuple[int, int, str]:
        return (*worker.process, mark_of(self._token, worker.rank))

# SPDX-License-Identifier: Apache-2.0
"""Limits of workers' memory: reading them, having them enforced, and telling who was ended for one."""

import re
from collections.abc import Sequence
from dataclasses import replace

from .._remote.guard import start_guard, verdicts
from .._remote.process import mark_of
from ..exceptions import WorkerFailure, WorkerGroupError
from .failures import WorkerFacts
from .query import looked_at

__all__ = ["guard", "judge", "parse_memory"]


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


def guard(name: str, workers: Sequence[WorkerFacts], limit: int) -> None:
    """Have the nodes' agents end those that pass the limit; one request a node.

    Args:
        name: the group's token.
        workers: whom.
        limit: bytes, of a worker and of what it has started together.

    Raises:
        WorkerGroupError: a node's agent did not take it on.
    """
    started = looked_at(workers, start_guard, lambda worker: _marked(worker, name), name, limit)
    if unguarded := [worker for worker, there in zip(workers, started, strict=True) if there is None]:
        raise WorkerGroupError(f"memory_limit cannot be enforced on {unguarded[0]}: the node's agent did not answer")


def judge(
    name: str, failures: Sequence[WorkerFailure], workers: Sequence[WorkerFacts], limit: int
) -> tuple[WorkerFailure, ...]:
    """The failures, with those that a guard has caused called "out-of-memory", with both numbers."""
    killed = [failure for failure in failures if failure.kind == "killed"]
    asked = [workers[failure.rank] for failure in killed]
    found = looked_at(asked, verdicts, _process, name) if asked else []
    sizes = {failure.rank: size for failure, size in zip(killed, found, strict=True) if size is not None}
    return tuple(
        replace(
            failure,
            kind="out-of-memory",
            cause=f"its process and those that it had started held {sizes[failure.rank]:,} bytes of memory, over its "
            f"memory_limit of {limit:,} bytes",
        )
        if failure.rank in sizes
        else failure
        for failure in failures
    )


def _marked(worker: WorkerFacts, name: str) -> tuple[int, int, str]:
    return (*worker.process, mark_of(name, worker.rank))


def _process(worker: WorkerFacts) -> tuple[int, int]:
    return worker.process

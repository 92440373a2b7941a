# SPDX-License-Identifier: Apache-2.0
"""The memory limit of workers: its text, and the losses that it caused. The reapers of the workers enforce it."""

import re
from collections.abc import Sequence
from operator import attrgetter

from .._model import Member
from .._remote.node import read_verdicts
from .query import ask_nodes

# What callers allow may be over: a node that has no free CPU needs half a second to start what reads a verdict. A call
# raises within a second of its deadline.
VERDICT_S = 0.7

UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}}
UNITS |= {unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}


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


def find_killed(workers: Sequence[Member], within_s: float) -> dict[Member, str]:
    """Return the cause, with both numbers, of the ends of those workers that had passed their limit.

    A node that does not answer `VERDICT_S` after the time of the caller gives none.
    """
    limit_s = within_s + VERDICT_S
    verdicts = ask_nodes(workers, read_verdicts, what=attrgetter("actor_id"), within_s=limit_s, asks_head=False)
    return {
        worker: f"its process and its descendants held {verdict[0]:,} bytes of memory, over its memory_limit of "
        f"{verdict[1]:,} bytes"
        for worker, verdict in zip(workers, verdicts, strict=True)
        if verdict is not None
    }

# SPDX-License-Identifier: Apache-2.0
"""The unfinished calls of workers whose async methods overlap.

Ray delivers a call to such a worker when its arguments are there, which may be after a request that was sent later.
"""

from collections.abc import Iterable
from typing import Any

import ray
from ray import ObjectRef, ObjectRefGenerator

from .._deadline import Deadline
from .._ray_private import still_referenced

# Finished calls are dropped whenever there are more than this, or twice the unfinished ones.
MOST_NOTED = 4096


class OverlappingCalls:
    """The calls of one group. The lock of those who send protects it."""

    def __init__(self) -> None:
        # Ids: references would keep the results alive.
        self._ids: list[bytes] = []
        self._most = MOST_NOTED

    def note(self, futures: Iterable[Any]) -> None:
        """Note a call that has been sent, given by the future of each worker."""
        if len(self._ids) >= self._most:
            self._ids = [ref.binary() for ref in self._find_unfinished(0.0)]
            self._most = max(MOST_NOTED, 2 * len(self._ids))
        for future in futures:
            ref: ObjectRef = future.completed() if isinstance(future, ObjectRefGenerator) else future
            self._ids.append(ref.binary())

    def wait(self, deadline: Deadline) -> bool:
        """Wait for all calls whose results somebody still refers to; return whether they end by the deadline."""
        self._ids = [ref.binary() for ref in self._find_unfinished(deadline.left())]
        return not self._ids

    def _find_unfinished(self, timeout_s: float | None) -> list[ObjectRef]:
        refs = still_referenced(self._ids) if self._ids else []
        unfinished: list[ObjectRef] = []
        if refs:
            _, unfinished = ray.wait(refs, num_returns=len(refs), timeout=timeout_s, fetch_local=False)
        return unfinished

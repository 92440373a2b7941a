# SPDX-License-Identifier: Apache-2.0
"""Which nodes are alive, read again and again while something runs. A short silence of Ray's head is tolerated."""

import time
from collections.abc import Callable, Collection
from typing import TypeVar

import ray

from fairlead_placement import HeadTimeoutError, extension

_T = TypeVar("_T")
# Seconds of silence of the head after which `HeadTimeoutError` ends a run or a call.
SILENT_S = 30.0
_LOOK_S = 1.0


def ask(request: str, function: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
    """Call a function that sends requests to the head, within `SILENT_S`; `undo` reverts what it does too late."""
    return extension.ask_head(request, function, timeout_s=SILENT_S, undo=undo)


class NodeWatch:
    """Looks which nodes are dead or draining. No node counts as lost while Ray's head does not answer."""

    def __init__(self) -> None:
        self._silent_since: float | None = None

    def look(self, node_ids: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return which of these nodes are dead, and which are dead or draining. It takes a second at most.

        Raises:
            HeadTimeoutError: the head has not answered for `SILENT_S`.
        """
        began = time.monotonic()
        try:
            alive, draining = extension.ask_head("list the nodes", _read, timeout_s=min(_LOOK_S, SILENT_S))
        except HeadTimeoutError:
            self._silent_since = self._silent_since or began
            if time.monotonic() - self._silent_since >= SILENT_S:
                raise
            return frozenset(), frozenset()
        self._silent_since = None
        dead = frozenset(node_ids) - alive
        return dead, dead | (draining & frozenset(node_ids))


def _read() -> tuple[frozenset[str], frozenset[str]]:
    """Return the nodes that are alive, and those that are draining."""
    return frozenset(row["NodeID"] for row in ray.nodes() if row["Alive"]), frozenset(extension.drain_deadlines())

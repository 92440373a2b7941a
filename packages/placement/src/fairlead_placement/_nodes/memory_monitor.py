# SPDX-License-Identifier: Apache-2.0
"""Watching the memory of a cluster's nodes."""

import contextlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ..exceptions import PlacementError
from .agent import NodeAgent, ask_nodes
from .inventory import alive_nodes
from .usage import NodeUsage

__all__ = ["Monitor", "read_usage"]

# Requests under way at once. Each waits for a process to start when a node has no agent yet.
AT_ONCE = 32
STOP_S = 10.0


class Monitor:
    """Has the agents of some nodes sample memory until it is stopped; watches nothing before it is read."""

    def __init__(self, node_ids: Sequence[str], name: str) -> None:
        self._node_ids = tuple(node_ids)
        self._name = name
        self._watcher = uuid.uuid4().hex

    def watch(self, node_ids: Sequence[str]) -> None:
        """Watch these nodes from now on; those that have gone need no stopping."""
        new = [node_id for node_id in node_ids if node_id not in self._node_ids]
        self._node_ids = tuple(node_ids)
        # A new one whose agent does not answer now is watched from the next `read` on.
        with contextlib.suppress(PlacementError):
            read_usage(new, watcher=self._watcher, name=self._name)

    def read(self) -> tuple[NodeUsage, ...]:
        """Samples and peaks since the first call; since the start of its agent where that has died meanwhile."""
        return read_usage(self._node_ids, watcher=self._watcher, name=self._name)

    def stop(self) -> None:
        """Have no more samples taken. Can be repeated.

        An agent that does not answer is let be: it ends with the job, and no reservation waits for it.
        """
        # Without threads: at the end of the interpreter none can be started.
        ask_nodes("unwatch", dict.fromkeys(_alive(self._node_ids), (self._watcher,)), STOP_S)


def read_usage(node_ids: Sequence[str], *, watcher: str | None = None, name: str = "") -> tuple[NodeUsage, ...]:
    """The memory of each node that is alive, in the order given: one request a node, all at once."""

    def ask(node_id: str) -> NodeUsage | None:
        try:
            return NodeAgent(node_id).memory(watcher, name)
        except PlacementError:
            if _alive([node_id]):
                raise
            return None

    nodes = _alive(node_ids)
    if not nodes:
        return ()
    with ThreadPoolExecutor(max_workers=min(len(nodes), AT_ONCE)) as pool:
        return tuple(usage for usage in pool.map(ask, nodes) if usage is not None)


def _alive(node_ids: Sequence[str]) -> list[str]:
    alive = alive_nodes()
    return [node_id for node_id in node_ids if node_id in alive]

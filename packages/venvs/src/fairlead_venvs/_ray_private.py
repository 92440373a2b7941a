# SPDX-License-Identifier: Apache-2.0
"""Every call on Ray that is not public, each with its reason and what happens without it."""

from typing import Any

__all__ = ["draining_nodes"]


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are about to leave the cluster.

    `ray.nodes()` shows them as alive, and a task with affinity to one of them fails. Without this call they count as
    alive, and that failure is reported for the node.
    """
    import ray

    ask: Any = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(ask()) if ask is not None else frozenset()

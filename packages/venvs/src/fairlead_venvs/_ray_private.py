# SPDX-License-Identifier: Apache-2.0
"""Every use of a Ray API that is not public, each with its reason and its fallback."""

from typing import Any


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are about to leave the cluster, which `ray.nodes()` shows as alive.

    A task with affinity to one of them fails. Fallback: none, and that failure is an error of the node.
    """
    import ray

    ask: Any = getattr(ray._private.state.state, "get_draining_nodes", frozenset)
    return frozenset(ask())


def is_client() -> bool:
    """Return whether this process is connected through Ray Client. Fallback: False, and Ray's own errors."""
    try:
        from ray.util.client import ray as client

        return bool(client.is_connected())
    except (ImportError, AttributeError):
        return False

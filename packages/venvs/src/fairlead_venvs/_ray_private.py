# SPDX-License-Identifier: Apache-2.0
"""Every use of a Ray API that is not public, each with its reason and its fallback."""

from typing import Any


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are about to leave the cluster; empty if Ray lacks this call.

    `ray.nodes()` shows draining nodes as alive, and a task with affinity to one of them fails. Without this call,
    Fairlead reports that failure as an error of the node.
    """
    import ray

    ask: Any = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(ask()) if ask is not None else frozenset()


def is_client() -> bool:
    """Return whether this process is connected through Ray Client, for which most of Ray's functions fail.

    `ray.is_initialized()` is true of such a process too. Fallback: False. Ray's own errors then say that something is
    wrong.
    """
    try:
        from ray.util.client import ray as client

        return bool(client.is_connected())
    except (ImportError, AttributeError):
        return False

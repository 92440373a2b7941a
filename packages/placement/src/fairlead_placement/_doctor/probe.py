# SPDX-License-Identifier: Apache-2.0
"""The code that looks at one node, in the process of the node's agent.

Shipped by value, so nodes need nothing but Ray: this module imports the standard library and ray only.
"""

import os
import platform
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray


def look_at_node() -> dict[str, Any]:
    """Return the facts of this node that the doctor compares, as plain data."""
    shared = os.statvfs("/dev/shm")
    return {
        "ray": ray.__version__,
        "python": platform.python_version(),
        "shm_bytes": shared.f_frsize * shared.f_blocks,
    }


def listen(port: int, seconds: float) -> None:
    """Let other processes connect to a port of this node for some seconds, without blocking.

    The port may be one that the agent has leased. If another process listens there, an OSError says so.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    # The system completes connections that nobody accepts.
    server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    timer = threading.Timer(seconds, server.close)
    timer.daemon = True
    timer.start()


def try_to_connect(targets: Sequence[tuple[str, int]], timeout_s: float) -> list[str]:
    """Connect to addresses from this node, all at once; return the error of each, or "" if it could connect."""

    def connect(target: tuple[str, int]) -> str:
        try:
            socket.create_connection(target, timeout=timeout_s).close()
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except OSError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return list(pool.map(connect, targets))

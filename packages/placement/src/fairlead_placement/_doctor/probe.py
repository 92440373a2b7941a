# SPDX-License-Identifier: Apache-2.0
"""The code that looks at one node, in the process of the node's agent.

Shipped by value, so nodes need nothing but Ray: this module imports the standard library and ray only.
"""

import os
import platform
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

PAUSE_S = 0.1


def look_at_node() -> dict[str, Any]:
    """Return the facts of this node that the doctor compares, as plain data."""
    shared = os.statvfs("/dev/shm")
    # As fairlead-venvs and uv choose them, neither of which has to be installed here.
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    given = os.environ.get("FAIRLEAD_VENV_DIR")
    venvs = os.path.abspath(os.path.expanduser(given)) if given else os.path.join(caches, "fairlead", "venvs")
    cache = os.path.abspath(os.environ.get("UV_CACHE_DIR") or os.path.join(caches, "uv"))
    return {
        "ray": ray.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "shm_bytes": shared.f_frsize * shared.f_blocks,
        "venvs": venvs,
        "uv_cache": cache,
        "same_device": _device(venvs) == _device(cache),
    }


def _device(folder: str) -> int:
    """Return the device of a folder, or of the nearest one above it that exists."""
    return next(one for one in (Path(folder), *Path(folder).parents) if one.is_dir()).stat().st_dev


def read_clock() -> float:
    """Return this node's time of day, in seconds since the epoch."""
    return time.time()


def listen(port: int, seconds: float) -> None:
    """Accept and close connections at a port of this node for some seconds, without blocking.

    The port may be one that the agent has leased. If another process listens there, an OSError says so.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    server.settimeout(PAUSE_S)

    def accept() -> None:
        until = time.monotonic() + seconds
        with server:
            while time.monotonic() < until:
                try:
                    connection, _ = server.accept()
                except OSError:
                    continue
                connection.close()

    threading.Thread(target=accept, name="fairlead-doctor", daemon=True).start()


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

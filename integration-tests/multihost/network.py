# SPDX-License-Identifier: Apache-2.0
"""A network on one machine: one namespace per host, connected by a bridge in its own namespace.

The network is separate from the machine's own network, so its addresses, routes and devices cannot clash, and other
programs cannot reach it. Only the names of the namespaces are shared. They contain the process id, so that a later run
can remove the namespaces of a crashed run.

The addresses are from a range that is reserved for tests. A Ray process that searches the process table for clusters
may find these addresses, and may try to connect to them from outside.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["Network", "explain_unavailable", "processes"]

_NAME = re.compile(r"fairlead-(\d+)-[0-9a-f]{4}")
_SUBNET = "198.18.0"


def explain_unavailable() -> str | None:
    """Return the reason why such a network cannot be created here, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    try:
        with Network() as network:
            network.add()
    except RuntimeError as error:
        return f"network namespaces cannot be created: {error}"
    return None


class Network:
    """A bridge, a namespace with one address for each added host, and a temporary folder.

    The path of the folder is short, because Ray creates sockets in it, and a socket's path is limited to 107 bytes.
    """

    def __init__(self) -> None:
        _remove_leftovers()
        self.name = _new_name()
        self.folder = Path(tempfile.gettempdir(), self.name)
        self.folder.mkdir(mode=0o700)
        self._bridge = f"{self.name}-bridge"
        self._added = 0
        try:
            _ip("netns", "add", self._bridge)
            _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "bridge", "up")
        except BaseException:
            self.close()
            raise

    def add(self) -> tuple[str, str]:
        """Add a host, and return its namespace and address."""
        self._added += 1
        space, port, address = f"{self.name}-{self._added}", f"port{self._added}", f"{_SUBNET}.{self._added}"
        _ip("netns", "add", space)
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        return space, address

    def link(self, space: str, state: str) -> None:
        """Set the state of a host's link to "down" or "up"."""
        _ip("-n", self._bridge, "link", "set", f"port{space.rpartition('-')[2]}", state)

    def close(self) -> None:
        """End every process in the network, and remove the network and its folder."""
        _remove(self.name)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def processes(space: str) -> list[int]:
    """Return the ids of the processes in a namespace."""
    return [int(pid) for pid in _ip("netns", "pids", space).split()]


def _new_name() -> str:
    return f"fairlead-{os.getpid()}-{secrets.token_hex(2)}"


def _remove_leftovers() -> None:
    """Remove the namespaces, processes and folders of runs that have ended."""
    listed = [*_namespaces(), *(path.name for path in Path(tempfile.gettempdir()).glob("fairlead-*"))]
    for name, pid in {match[0]: int(match[1]) for match in map(_NAME.match, listed) if match}.items():
        if not Path("/proc", str(pid)).exists():
            with contextlib.suppress(RuntimeError):  # Another run may be removing it at the same time.
                _remove(name)


def _remove(name: str) -> None:
    spaces = [space for space in _namespaces() if space.startswith(f"{name}-")]
    deadline = time.monotonic() + 20
    # A killed process may have started another one in the meantime.
    while (left := [pid for space in spaces for pid in processes(space)]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for space in spaces:  # Deleting a namespace deletes both ends of its link.
        _ip("netns", "del", space)
    shutil.rmtree(Path(tempfile.gettempdir(), name), ignore_errors=True)
    if left:
        raise RuntimeError(f"processes {left} in {name} did not end after SIGKILL")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout

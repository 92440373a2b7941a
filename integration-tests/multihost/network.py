# SPDX-License-Identifier: Apache-2.0
"""A network on one machine: a namespace per host, joined by a bridge that has a namespace of its own.

Nothing of it is in the machine's own network: no address, route or device of it can clash, and nothing else reaches
in. Only the names of the namespaces are shared. They carry the process id, so that a later run knows what a crashed
one left behind.

The addresses are of a range for tests that is nobody's on the internet: a Ray that looks for clusters finds them in the
machine's table of processes, and may try them from outside.
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

__all__ = ["Network", "processes", "why_not"]

_NAME = re.compile(r"fairlead-(\d+)-[0-9a-f]{4}")
_SUBNET = "198.18.0"


def why_not() -> str | None:
    """Why there can be no such network here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    try:
        with Network() as network:
            network.add()
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


class Network:
    """A bridge and, for each host added, a namespace with one address. Also a folder that goes with it.

    The folder's path is short, because Ray puts sockets below it, and a socket's path is limited to 107 bytes.
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
        """A new host: its namespace and address."""
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
        """Take a host's link "down" or "up"."""
        _ip("-n", self._bridge, "link", "set", f"port{space.rpartition('-')[2]}", state)

    def close(self) -> None:
        """End every process in it and remove it, the folder included."""
        _remove(self.name)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def processes(space: str) -> list[int]:
    """Ids of the processes in a namespace."""
    return [int(pid) for pid in _ip("netns", "pids", space).split()]


def _new_name() -> str:
    return f"fairlead-{os.getpid()}-{secrets.token_hex(2)}"


def _remove_leftovers() -> None:
    """What runs that are no more left behind."""
    listed = [*_namespaces(), *(path.name for path in Path(tempfile.gettempdir()).glob("fairlead-*"))]
    for name, pid in {match[0]: int(match[1]) for match in map(_NAME.match, listed) if match}.items():
        if not Path("/proc", str(pid)).exists():
            with contextlib.suppress(RuntimeError):  # another run may be removing it, too
                _remove(name)


def _remove(name: str) -> None:
    spaces = [space for space in _namespaces() if space.startswith(f"{name}-")]
    deadline = time.monotonic() + 20
    # What is ended may have started something meanwhile.
    while (left := [pid for space in spaces for pid in processes(space)]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for space in spaces:  # its end of the link goes with it, and so does the other end
        _ip("netns", "del", space)
    shutil.rmtree(Path(tempfile.gettempdir(), name), ignore_errors=True)
    if left:
        raise RuntimeError(f"processes {left} in {name} could not be ended")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout

# SPDX-License-Identifier: Apache-2.0
"""The code that runs inside a node agent's process.

Shipped by value, so nodes need nothing but Ray: this module imports the standard library, ray, and its sibling
`meters`, which is shipped by value too.
"""

import contextlib
import errno
import random
import socket
import threading
import time
from typing import Any

import ray

from .meters import Gpus, Peaks, read_memory


class NodeAgent:
    """Holds leased ports of one node for one process, what that process has published, and samples of memory.

    Everything that it holds has a name, which the owner has chosen and releases. Its requests arrive in the order in
    which they were sent, and run one at a time.
    """

    def __init__(self) -> None:
        self._gpus = Gpus()
        # By name: a leased port; the version and the value of a publication. The names of watchers.
        self._held: dict[str, tuple[int, socket.socket]] = {}
        self._watchers: set[str] = set()
        self._peaks = Peaks()
        self._published: dict[str, tuple[int, Any]] = {}
        self._sampler: threading.Thread | None = None
        # Where the next search starts. It moves on, so that a released port is not used again at once: late connections
        # of its former users must not reach another server.
        self._next = random.randrange(1 << 16)

    @ray.method(concurrency_group="end")  # type: ignore[untyped-decorator]
    def wait_for_end(self) -> None:
        """Never return, so that the owner gets an error when this process has ended."""
        threading.Event().wait()

    def release(self, names: list[str]) -> None:
        """Release leases, watchers and publications. A name that is not held is not an error, so it can be repeated."""
        for name in names:
            self._watchers.discard(name)
            self._published.pop(name, None)
            if name in self._held:
                self._held.pop(name)[1].close()

    def lease(self, lease_ids: list[str], low: int, high: int) -> tuple[list[int], int, int]:
        """Hold a port in low..high for each id, or none; then return how many this agent and others hold there.

        The owner chooses the ids, so that it can release a lease whose answer was lost, or request it again.
        """
        if all(one in self._held for one in lease_ids):
            return [self._held[one][0] for one in lease_ids], 0, 0
        size = high - low + 1
        start = (self._next - low) % size
        mine = {port for port, _ in self._held.values()}
        found: dict[int, socket.socket] = {}
        in_use = 0
        others = (port for step in range(size) if (port := low + (start + step) % size) not in mine)
        while len(found) < len(lease_ids) and (port := next(others, 0)):
            if (held := _hold(port)) is None:
                in_use += 1
            else:
                found[port] = held
        if len(found) < len(lease_ids):
            for held in found.values():
                held.close()
            return [], sum(low <= port <= high for port in mine), in_use
        self._held.update(zip(lease_ids, found.items(), strict=True))
        ports = list(found)
        self._next = ports[-1] + 1
        return ports, 0, 0

    def leased(self) -> list[int]:
        """Return the leased ports, in ascending order."""
        return sorted(port for port, _ in self._held.values())

    def publish(self, key: str, version: int, value: Any) -> None:
        """Publish a value, in place of an older one with this key."""
        if version > self.read(key, 0)[0]:
            self._published[key] = version, value

    def read(self, key: str, version: int) -> tuple[int, Any]:
        """Return the version of a value, and the value if the version is above `version`; (0, None) without a value."""
        current, value = self._published.get(key, (0, None))
        return current, value if current > version else None

    def read_all(self, prefix: str) -> dict[str, Any]:
        """Return the values whose keys begin with a prefix, in the order of the keys."""
        return {key: value for key, (_, value) in sorted(self._published.items()) if key.startswith(prefix)}

    def memory(self, watcher: str) -> tuple[Any, ...]:
        """Return a sample of the node's memory, as a row of `Peaks`, and the time.

        Further samples are taken once a second, until all watchers are released.
        """
        if not self._watchers:
            self._peaks = Peaks()
        self._watchers.add(watcher)
        if self._sampler is None or not self._sampler.is_alive():
            self._sampler = threading.Thread(target=self._keep_sampling, name="fairlead-memory", daemon=True)
            self._sampler.start()
        return (*self._peaks.add(*read_memory(self._gpus)), time.time())

    def _keep_sampling(self) -> None:
        time.sleep(1.0)
        while self._watchers:
            with contextlib.suppress(OSError):  # too many open files
                self._peaks.add(*read_memory(self._gpus))
            time.sleep(1.0)

    def call(self, code: bytes, *args: Any) -> Any:
        """Call a function that its owner has pickled. Threads that it starts live as long as this process."""
        return ray.cloudpickle.loads(code)(*args)


def _hold(port: int) -> socket.socket | None:
    """Return a socket that is bound on IPv6 and IPv4, if the machine has both, and never listens; None if it is taken.

    It is bound without SO_REUSEADDR, so neither another lease nor a plain bind can use the port. The option is set
    afterwards, so that a server that sets it too (torch's TCPStore, gRPC) can listen while the lease is held.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        with contextlib.ExitStack() as undo:
            try:
                held = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                held.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                continue
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            undo.pop_all()
            return held
    return None

# SPDX-License-Identifier: Apache-2.0
"""The code that runs inside a node agent's process.

Shipped by value, so nodes need nothing but Ray: this module imports the standard library and ray.
"""

import contextlib
import errno
import random
import socket
import threading
import time
from typing import Any

import ray

# The total, used and available bytes of the node's memory, and the largest use; how many samples there were, and when
# this one was taken.
Sample = tuple[int, int, int, int, int, float]


def take_sample(before: Sample | None = None) -> Sample:
    """Return a sample of the node's memory, with the peak since the first of the samples before it."""
    import psutil  # Ray brings it

    memory = psutil.virtual_memory()
    # psutil's `used` includes the kernel's caches in some versions and not in others.
    used = memory.total - memory.available
    peak, samples = (0, 0) if before is None else before[3:5]
    return memory.total, used, memory.available, max(used, peak), samples + 1, time.time()


class NodeAgent:
    """Holds leased ports of one node for one process, what that process has published, and samples of memory.

    Everything that it holds has a name, which the owner has chosen and releases. Its requests arrive in the order in
    which they were sent, and run one at a time.
    """

    def __init__(self) -> None:
        # By name: a leased port; the version and the value of a publication. The names of watchers.
        self._held: dict[str, tuple[int, socket.socket]] = {}
        self._watchers: set[str] = set()
        self._published: dict[str, tuple[int, Any]] = {}
        self._sampler: threading.Thread | None = None
        self._sample: Sample | None = None

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
        if all(lease_id in self._held for lease_id in lease_ids):
            return [self._held[lease_id][0] for lease_id in lease_ids], 0, 0
        leased, bound, in_use = {port for port, _ in self._held.values()}, dict[int, socket.socket](), 0
        # In any order, because late connections of the former users of a port must not reach another server.
        for port in random.sample(range(low, high + 1), high - low + 1):
            if port in leased or len(bound) == len(lease_ids):
                continue
            if (held := _hold(port)) is None:
                in_use += 1
            else:
                bound[port] = held
        if len(bound) < len(lease_ids):
            for held in bound.values():
                held.close()
            return [], sum(low <= port <= high for port in leased), in_use
        self._held.update(zip(lease_ids, bound.items(), strict=True))
        return list(bound), 0, 0

    def publish(self, keys: list[str], version: int, value: Any) -> None:
        """Publish a value under its only key, in place of an older one."""
        (key,) = keys
        if version > self.read(key, 0)[0]:
            self._published[key] = version, value

    def read(self, key: str, version: int) -> tuple[int, Any]:
        """Return the version of a value, and the value if the version is above `version`; (0, None) without a value."""
        current, value = self._published.get(key, (0, None))
        return current, value if current > version else None

    def read_all(self, prefix: str) -> dict[str, Any]:
        """Return the values whose keys begin with a prefix, in the order of the keys."""
        return {key: value for key, (_, value) in sorted(self._published.items()) if key.startswith(prefix)}

    def memory(self, watchers: list[str]) -> Sample | None:
        """Return the latest sample of the node's memory; one is taken each second until all watchers are released."""
        self._watchers.update(watchers)
        if self._sampler is None or not self._sampler.is_alive():
            self._sample = take_sample()
            self._sampler = threading.Thread(target=self._keep_sampling, name="fairlead-memory", daemon=True)
            self._sampler.start()
        return self._sample

    def _keep_sampling(self) -> None:
        while self._watchers:
            time.sleep(1.0)
            with contextlib.suppress(OSError):  # too many open files
                self._sample = take_sample(self._sample)


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

# SPDX-License-Identifier: Apache-2.0
"""The code that runs inside a node agent's process, on several threads.

Shipped by value, so nodes need nothing but Ray: this module imports the standard library, ray, and its siblings
`meters` and `_ray_private`, which are shipped by value too.
"""

import contextlib
import errno
import functools
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from .._ray_private import autoscaler_is_there, driver_of, worker_is_alive
from .meters import Gpus, Peaks, Row, measure

# How long it stays for further requests when nothing keeps it. A process of its own starts in about half a second.
IDLE_S = 5.0
# How often it looks for an autoscaler, while there is none for which it would leave. The answer lists all nodes.
SCALED_S = 600.0
# How often it looks whether something keeps it, which requests nothing.
LOOK_S = 0.5
# How often it looks which owners have ended, with one small request to Ray's head for each. With 1,000 nodes these are
# 400 requests per second.
OWNERS_S = 5.0
# How many released names are kept: no job has so many requests under way.
RELEASED_KEPT = 10_000


class AgentProcess:
    """Holds the leased ports of one node for one job and what was published there, and measures the node.

    Everything that it holds has a name, which is released by one request, and an owner, Ray's id of a process: what
    ended processes own is released too. With `ends`, the agent ends its process when it holds nothing and its job has
    ended, or an autoscaler may remove the node: Ray reports a node with an actor as busy.
    """

    def __init__(self, ends: bool = False) -> None:
        # Only the thread that has it changes what is held, so that its tables agree and no request follows the end.
        self._lock = threading.Lock()
        self._gpus = Gpus()
        self._cpu_times: dict[Any, tuple[float, float]] = {}
        self._requests: Counter[str] = Counter()
        # By name: the owner; the port of a lease; the samples of a watcher; the version and value of a publication.
        self._owner: dict[str, str] = {}
        self._held: dict[str, tuple[int, socket.socket]] = {}
        self._watches: dict[str, Peaks] = {}
        self._published: dict[str, tuple[int, Any]] = {}
        # A request to lease or publish may arrive after the one that releases its name. Then it is refused.
        self._released: dict[str, None] = {}
        self._running = 0
        self._threads: list[threading.Thread] = []
        self._leaves_at = time.monotonic() + IDLE_S
        # Where the next search starts. It moves on, so that a released port is not used again at once: late connections
        # of its former users must not reach another server.
        self._next = random.randrange(1 << 16)

        if ends:
            end = functools.partial(_end, ray.get_runtime_context().current_actor)
            threading.Thread(target=self._watch, args=(end,), name="fairlead-owners", daemon=True).start()

    def answer(self, method: str, *args: Any) -> Any:
        """Call a method, and stay until it has returned, and for some time for further requests."""
        with self._lock:
            self._running += 1
            self._requests[method] += 1
        try:
            return getattr(self, method)(*args)
        finally:
            with self._lock:
                self._running -= 1
                self._leaves_at = time.monotonic() + IDLE_S

    def requests(self) -> dict[str, int]:
        return {method: self._requests[method] for method in ("run", "usage")}

    def leave(self) -> None:
        """Do not stay for further requests: whoever used this node has given back what it held."""
        self._leaves_at = 0.0

    def _is_idle(self) -> bool:
        """Return whether nothing keeps the agent: a request, what it holds, or what a function has left running."""
        kept = self._running or self._owner or time.monotonic() < self._leaves_at
        return not (kept or any(thread.is_alive() for thread in self._threads) or has_children())

    def end_if_idle(self, end: Callable[[], object]) -> None:
        """End the process if nothing keeps it. Requests that come later wait for that, and go to another agent then."""
        with self._lock:
            if self._is_idle():
                end()

    def _watch(self, end: Callable[[], object]) -> None:
        """Release what ended processes hold, and end this process when nothing keeps it and somebody gains by that."""
        next_look = next_search = 0.0
        driver, is_wanted = driver_of(ray.get_runtime_context().get_job_id()), True
        while True:
            time.sleep(LOOK_S)
            try:
                if self._is_idle():
                    if is_wanted and time.monotonic() >= next_search:
                        is_wanted = not autoscaler_is_there()
                        next_search = time.monotonic() + SCALED_S * random.uniform(0.8, 1.2)
                    if not is_wanted:
                        self.end_if_idle(end)
                if time.monotonic() >= next_look:
                    # At random moments, so that the agents of a large cluster do not ask all at once.
                    next_look = time.monotonic() + OWNERS_S * random.uniform(0.8, 1.2)
                    self.release_of_ended(worker_is_alive)
                    is_wanted = is_wanted and worker_is_alive(driver) is True
            except Exception:
                # Ray's head does not answer, or a child has just ended. The next check may succeed.
                logging.getLogger(__name__).debug("cannot check what keeps the agent", exc_info=True)

    def release_of_ended(self, is_alive: Callable[[str], bool | None]) -> None:
        """Release what processes hold, by Ray's worker ids, that have ended. None is a process that may be alive."""
        with self._lock:
            owners = dict(self._owner)
        ended = {owner for owner in set(owners.values()) if is_alive(owner) is False}
        if ended:
            self.release([name for name, owner in owners.items() if owner in ended])
            self.leave()

    def release(self, names: list[str]) -> None:
        """Release leases, watchers and publications. A name that is not held is not an error, so it can be repeated."""
        with self._lock:
            for name in names:
                for held in (self._owner, self._watches, self._published):
                    held.pop(name, None)
                if name in self._held:
                    self._held.pop(name)[1].close()
                self._released[name] = None
            while len(self._released) > RELEASED_KEPT:
                del self._released[next(iter(self._released))]

    def lease(self, lease_ids: list[str], low: int, high: int, owner: str) -> tuple[list[int], int, int]:
        """Hold a port in low..high for each id, or none; then return how many this agent and others hold there.

        The driver chooses the ids and releases a lease by its id: a port number may belong to another lease by then,
        and the answer may arrive too late.
        """
        with self._lock:
            if any(one in self._released for one in lease_ids):
                return [], 0, 0
            if all(one in self._held for one in lease_ids):
                return [self._held[one][0] for one in lease_ids], 0, 0  # requested again, because the answer was lost
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
            self._owner.update(dict.fromkeys(lease_ids, owner))
            ports = list(found)
            self._next = ports[-1] + 1
            return ports, 0, 0

    def leased(self) -> list[int]:
        with self._lock:
            return sorted(port for port, _ in self._held.values())

    def publish(self, key: str, version: int, value: Any, owner: str) -> None:
        """Publish a value, in place of an older one with this key. Requests may arrive in any order."""
        with self._lock:
            if key not in self._released and version > self.newer(key, 0)[0]:
                self._published[key] = version, value
                self._owner[key] = owner

    def published(self) -> dict[str, Any]:
        """Return the values by key, in the order of the keys."""
        with self._lock:
            return {key: value for key, (_, value) in sorted(self._published.items())}

    def newer(self, key: str, version: int) -> tuple[int, Any]:
        """Return the version of a value, and the value if the version is above `version`; (0, None) without a value."""
        current, value = self._published.get(key, (0, None))
        return current, value if current > version else None

    def versions(self, owner: str) -> dict[str, int]:
        """Return the versions of what a process has published, by key."""
        with self._lock:
            return {key: version for key, (version, _) in self._published.items() if self._owner[key] == owner}

    def usage(self, pids: list[int]) -> list[Any]:
        return measure(pids, self._gpus.by_process(), self._cpu_times)

    def memory(self, watcher: str | None, owner: str) -> tuple[Any, ...]:
        """Return a sample of the node's memory, as a row of `Peaks`, and the time.

        For a watcher further samples are taken once a second, until it is released or its owner has ended.
        """
        # A request may arrive after the one that releases its watcher. Then it takes a single sample.
        if watcher is None or watcher in self._released:
            return (*self._sample(Peaks()), time.time())
        with self._lock:
            self._owner[watcher] = owner
            if (peaks := self._watches.get(watcher)) is None:
                peaks = self._watches[watcher] = Peaks()
                threading.Thread(
                    target=self._keep_sampling, args=(watcher, peaks), name="fairlead-memory", daemon=True
                ).start()
        return (*self._sample(peaks), time.time())

    def _sample(self, peaks: Peaks) -> Row:
        import psutil

        memory, gpus = psutil.virtual_memory(), self._gpus.memory()
        with self._lock:
            return peaks.add(memory.total, memory.available, gpus)

    def _keep_sampling(self, watcher: str, peaks: Peaks) -> None:
        time.sleep(1.0)
        while self._watches.get(watcher) is peaks:
            with contextlib.suppress(OSError):  # too many open files
                self._sample(peaks)
            time.sleep(1.0)

    def run(self, function: Callable[..., Any] | bytes, *args: Any) -> Any:
        """Call a function, or one that the driver has pickled once for all nodes, on this node.

        The agent stays while threads or processes live that it has started.
        """
        before = set(threading.enumerate())
        try:
            return (ray.cloudpickle.loads(function) if isinstance(function, bytes) else function)(*args)
        finally:
            new = set(threading.enumerate()) - before
            with self._lock:
                # Ray's own threads, which do not end, appear here when they first run Python, as dummies.
                self._threads += [one for one in new if not one.name.startswith("Dummy-")]
                self._threads = [one for one in self._threads if one.is_alive()]


def _end(me: Any) -> None:
    try:
        ray.kill(me)
        time.sleep(5.0)  # Ray ends an actor at its own request within milliseconds
    finally:
        os._exit(0)


def has_children() -> bool:
    """Return whether a child of this process runs."""
    import psutil  # Ray brings it along

    return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())


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

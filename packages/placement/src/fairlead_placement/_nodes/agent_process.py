# SPDX-License-Identifier: Apache-2.0
"""The code that runs inside a node agent's process, on several threads.

Shipped by value, so nodes need nothing but Ray: this module imports the standard library, ray, and its siblings
`board`, `meters` and `_ray_private`, which are shipped by value too.
"""

import contextlib
import errno
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
from .board import Board
from .meters import Gpus, MemoryMeter, ProcessMeter

# How long it stays for further requests when nothing keeps it. A process of its own starts in about half a second.
IDLE_S = 5.0
# How often it looks for an autoscaler, while there is none for which it would leave. The answer lists all nodes.
SCALED_S = 600.0
# How often it looks whether something keeps it, which requests nothing.
LOOK_S = 0.5
# How often it looks which owners have ended, with one small request to Ray's head for each. With 1,000 nodes these are
# 400 requests per second.
OWNERS_S = 5.0


class AgentProcess(Board):
    """Holds the leased ports of one node for one job and what was published there, and measures the node.

    With `ends`, it ends its process when nothing keeps it and its job has ended, or an autoscaler may remove the node:
    Ray reports a node with an actor as busy.
    """

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        gpus = Gpus()
        self._processes = ProcessMeter(gpus)
        self._memory = MemoryMeter(gpus)
        self._requests: Counter[str] = Counter()
        self._held: dict[str, tuple[int, socket.socket]] = {}
        self._unwanted: dict[str, None] = {}
        # The processes that hold a lease or watch the memory: worker ids by lease id and by watcher.
        self._owner: dict[str, str] = {}
        self._running = 0
        self._threads: list[threading.Thread] = []
        self._leaves_at = time.monotonic() + IDLE_S
        # Where the next search starts. It moves on, so that a released port is not used again at once: late connections
        # of its former users must not reach another server.
        self._next = random.randrange(1 << 16)

        if ends:
            me = ray.get_runtime_context().current_actor
            threading.Thread(target=self._watch, args=(me,), name="fairlead-owners", daemon=True).start()

    def answer(self, method: str, *args: Any) -> Any:
        """Call a method, and stay until it has returned, and for some time for further requests."""
        with self._lock:
            self._running += 1
        try:
            return getattr(self, method)(*args)
        finally:
            with self._lock:
                self._running -= 1
                self._leaves_at = time.monotonic() + IDLE_S

    def leave(self) -> None:
        """Do not stay for further requests: whoever used this node has given back what it held."""
        self._leaves_at = 0.0

    def _is_idle(self) -> bool:
        """Return whether nothing keeps the agent: a request, what it holds, or what a function has left running."""
        kept = self._running or self._held or self._owner or self._entries or time.monotonic() < self._leaves_at
        return not (kept or any(thread.is_alive() for thread in self._threads) or has_children())

    def _decide_to_leave(self) -> bool:
        """Return whether the agent is idle. Requests that come later wait for its end, and go to another one then."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._lock)
            if self._is_idle():
                undo.pop_all()
                return True
            return False

    def _watch(self, me: object) -> None:
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
                    if not is_wanted and self._decide_to_leave():
                        break
                if time.monotonic() >= next_look:
                    # At random moments, so that the agents of a large cluster do not ask all at once.
                    next_look = time.monotonic() + OWNERS_S * random.uniform(0.8, 1.2)
                    self.release_of_ended(worker_is_alive)
                    is_wanted = is_wanted and worker_is_alive(driver) is not False
            except Exception:
                # Ray's head does not answer, or a child has just ended. The next check may succeed.
                logging.getLogger(__name__).debug("cannot check what keeps the agent", exc_info=True)
        try:
            ray.kill(me)
            time.sleep(5.0)  # Ray ends an actor at its own request within milliseconds
        finally:
            os._exit(0)

    def release_of_ended(self, is_alive: Callable[[str], bool | None]) -> None:
        """Release what processes hold, by Ray's worker ids, that have ended. None is a process that may be alive."""
        with self._lock:
            owners = {*self._owner.values(), *(entry.owner for entry in self._entries.values())}
        ended = {owner for owner in owners if is_alive(owner) is False}
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.owner not in ended}
            names = [name for name, owner in self._owner.items() if owner in ended]
        self.release([name for name in names if name in self._held])
        for name in names:
            self.unwatch(name)
        if ended:
            self.leave()

    def lease(self, lease_ids: list[str], low: int, high: int, owner: str) -> tuple[list[int], int, int]:
        """Hold a port in low..high (both included) for each id, or none, until it is released or its owner has ended.

        The driver chooses the ids and releases a lease by its id: a port number may belong to another lease by then,
        and the answer may arrive too late.

        Returns:
            The ports; if there are too few, how many ports of the range this agent and other processes hold.
        """
        with self._lock:
            if any(one in self._unwanted for one in lease_ids):
                return [], 0, 0  # released already
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

    def release(self, lease_ids: list[str]) -> None:
        """Release ports. A lease that is not held is not an error, so that a release can be repeated."""
        with self._lock:
            for lease_id in lease_ids:
                self._owner.pop(lease_id, None)
                _, held = self._held.pop(lease_id, (0, None))
                if held is not None:
                    held.close()
                else:
                    # In an agent that was stopped, one thread may overtake another: the lease may still come.
                    self._unwanted[lease_id] = None
            while len(self._unwanted) > 10_000:  # no driver has so many requests under way
                del self._unwanted[next(iter(self._unwanted))]

    def leased(self) -> list[int]:
        with self._lock:
            return sorted(port for port, _ in self._held.values())

    def requests(self) -> dict[str, int]:
        with self._lock:
            return dict(self._requests)

    def usage(self, pids: list[int]) -> list[Any]:
        self._count("usage")
        return self._processes.read(pids)

    def memory(self, watcher: str | None, owner: str) -> tuple[Any, ...]:
        """Return a sample of `MemoryMeter.read`, and the time. Sampling for a watcher ends when its owner has ended."""
        if watcher is not None:
            with self._lock:
                self._owner[watcher] = owner
        return (*self._memory.read(watcher), time.time())

    def unwatch(self, watcher: str) -> None:
        with self._lock:
            self._owner.pop(watcher, None)
        self._memory.unwatch(watcher)

    def watchers(self) -> tuple[list[str], bool]:
        return self._memory.watchers()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on this node. The agent stays while threads or processes live that it has started."""
        self._count("run")
        before = set(threading.enumerate())
        try:
            return function(*args)
        finally:
            new = set(threading.enumerate()) - before
            with self._lock:
                # Ray's own threads, which do not end, appear here when they first run Python, as dummies.
                self._threads += [one for one in new if not one.name.startswith("Dummy-")]
                self._threads = [one for one in self._threads if one.is_alive()]

    def run_pickled(self, code: bytes, *args: Any) -> Any:
        """Call a function that the driver has pickled, once for all nodes."""
        return self.run(ray.cloudpickle.loads(code), *args)

    def _count(self, method: str) -> None:
        with self._lock:
            self._requests[method] += 1


def has_children() -> bool:
    """Return whether a child of this process runs."""
    import psutil  # Ray brings it along

    return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())


def _hold(port: int) -> socket.socket | None:
    """Return a bound socket that never listens, or None if the port is taken.

    It is bound without SO_REUSEADDR, so neither another lease nor a plain bind can use the port. The option is set
    afterwards, so that a server that sets it too (torch's TCPStore, gRPC) can listen while the lease is held.

    The socket is bound on IPv6 and IPv4 together, so that no other process can use the port on either. On a machine
    without IPv6 it is bound on IPv4.
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

# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists only in this process, for figures of sizes that no machine here has.

It replaces what requests of a worker group leave through: the class of the actors, and the request to node agents. The
code of the group before and after these seams is the real one. Actors answer after a scripted time, Ray's head
registers a limited number of actors per second, and agents read the record of one real process.
"""

import heapq
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray import cloudpickle

from fairlead_placement import Slot
from fairlead_workergroup._observe import query
from fairlead_workergroup._remote.process import start_tick
from fairlead_workergroup._remote.record import Record


class Head:
    """Registers actors, so many a second, and answers each request after a round trip.

    Args:
        rate: registrations per second.
        latency_s: the round trip of a request.

    Attributes:
        registered: the number of registrations.
        most_waiting: the largest number of requests that waited at a time.
    """

    def __init__(self, rate: float, latency_s: float) -> None:
        self.registered = 0
        self.most_waiting = 0
        self._interval_s = 1 / rate
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._waiting = 0
        self._free_at = 0.0

    def register(self) -> None:
        """Return when an actor has been registered."""
        with self._lock:
            self._waiting += 1
            self.most_waiting = max(self.most_waiting, self._waiting)
            self._free_at = max(time.monotonic(), self._free_at) + self._interval_s
            until = self._free_at + self._latency_s
        time.sleep(max(0.0, until - time.monotonic()))
        with self._lock:
            self._waiting -= 1
            self.registered += 1


class Answers:
    """Completes futures at their times, on one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Future[Any], Any]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def add(self, after_s: float, future: Future[Any], value: Any) -> None:
        """Complete a future after some seconds."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._numbers), future, value))
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, future, value = heapq.heappop(self._due)
            future.set_result(value)


class Reference(Future[Any]):
    """The reference to an answer, which is its own future."""

    def future(self) -> Future[Any]:
        """Return the future of the answer, as of an ObjectRef."""
        return self


class Actor:
    """An actor that pickles its arguments as they would travel, and answers after a scripted time.

    Args:
        answers: completes the answers.
        after_s: the seconds until an answer.
    """

    def __init__(self, answers: Answers, after_s: float) -> None:
        self._actor_id = id(self).to_bytes(16, "big")
        self._answers = answers
        self._after_s = after_s

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._send(method, args, kwargs))

    def _send(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reference:
        cloudpickle.dumps((method, args, kwargs))
        answer = Reference()
        value = {"pid": 0, "started": 0} if method == "_fairlead_start" else None
        self._answers.add(self._after_s, answer, value)
        return answer


class ActorClass:
    """The class of the actors; the head registers each of them before its handle is there."""

    def __init__(self, head: Head, answers: Answers, after_s: float) -> None:
        self._make: Callable[[], Actor] = lambda: Actor(answers, after_s)
        self._head = head

    def options(self, **_: Any) -> "ActorClass":
        """Return the class with options, which change nothing here."""
        return self

    def remote(self) -> Actor:
        """Return an actor once it is registered."""
        self._head.register()
        return self._make()


def make_slots(nodes: int, per_node: int) -> list[Slot]:
    """Return the slots of a cluster with a placement group per node."""
    slots = []
    for node in range(nodes):
        group = SimpleNamespace(id=f"{node:036x}", bundle_specs=[{"CPU": 1.0}] * per_node)
        slots += [
            Slot(
                placement_group=group,
                bundle_index=at,
                node_idx=node,
                node_id=f"{node:056x}",
                node_ip=f"10.{node >> 8}.{node & 255}.1",
                node_rank=node,
                local_rank=at,
                worker_resources={"CPU": 1.0},
            )
            for at in range(per_node)
        ]
    return slots


class Agents:
    """The agents of all nodes: each runs the function of a request here, on the record of this process.

    Attributes:
        requests: the number of requests.
        bytes_moved: the size of all requests and answers, pickled.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.bytes_moved = 0
        self._record = Record(["__init__", "step"])
        self.process = (os.getpid(), start_tick(os.getpid()))

    def run(self, function: Any, asks: Mapping[str, Sequence[Any]], *, timeout_s: float) -> dict[str, Any]:
        """Answer a request to several nodes, as `run_on_nodes` does once the agents know the function."""
        answers = {}
        for node_id, args in asks.items():
            request = pickle.dumps(("0" * 32, None, *args), 5)
            answer = pickle.dumps((function(*pickle.loads(request)[2:]),), 5)
            self.requests += 1
            self.bytes_moved += len(request) + len(answer)
            (answers[node_id],) = pickle.loads(answer)
        return answers

    @contextmanager
    def installed(self, node_ids: Sequence[str]) -> Iterator[None]:
        """Make requests to nodes reach these agents in a block."""
        alive = frozenset(node_ids)
        with (
            mock.patch.object(query, "run_on_nodes", self.run),
            mock.patch.object(query, "choose_alive", return_value=alive),
        ):
            yield

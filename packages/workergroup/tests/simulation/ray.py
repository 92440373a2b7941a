# SPDX-License-Identifier: Apache-2.0
"""A pretended Ray: actors, nodes that die or drain, node agents, and a head that is silent for a while.

The functions of `_remote/setup.py` run in its workers as they are.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.exceptions import TaskCancelledError

from fairlead_placement import HeadTimeoutError

from .actors import Actor, Handle, Request, SimRef, Worker
from .scheduler import SimulatedWorld, SimulationError
from .seam import run_with_environ

# How long a request to the head waits for it.
HEAD_S = 10.0


@dataclass(eq=False)
class Node:
    """A pretended node, and the agent on it.

    Attributes:
        drains_until: when it ends, if it drains.
        is_silent: whether its agent does not answer.
        died_in: the step of the run in which it died.
    """

    id: str
    ip: str
    is_alive: bool = True
    drains_until: float | None = None
    is_silent: bool = False
    died_in: int = -1


@dataclass(eq=False)
class Head:
    """The pretended head. While it is silent, it does nothing; what it was asked for is done when it answers again."""

    is_silent: bool = False
    backlog: list[Callable[[], None]] = field(default_factory=list)


class PretendedRay:
    """The Ray of one run.

    Attributes:
        methods: the methods of the user's class, each called with the worker and the arguments; without one, a method
            returns the worker's rank, epoch and world size.
        construct: called with a worker whose constructor runs; it may raise, and return `HANG` or `Takes`.
        on_construct: called with each actor whose constructor begins.
        is_connected: whether Ray has not been shut down.
    """

    def __init__(self, world: SimulatedWorld, *, nodes: int = 2) -> None:
        self.world = world
        self.head = Head()
        self.nodes = {one.id: one for one in (Node(f"node-{at}", f"10.0.0.{at}") for at in range(nodes))}
        self.actors: list[Actor] = []
        self.methods: dict[str, Callable[..., Any]] = {}
        self.construct: Callable[[Worker], Any] = lambda worker: None
        self.on_construct: list[Callable[[Actor], object]] = []
        self.is_connected: bool = True
        # The step in which each task has asked the head last which nodes or actors there are.
        self._asked: dict[int, int] = {}
        self._numbers = itertools.count(1)

    # What Ray offers to a driver.

    def create(self, node_id: str) -> Handle:
        """Request an actor on a node; the head creates it later."""
        self.world.point(f"requests an actor on {node_id}")
        actor = Actor(self, len(self.actors) + 1, self.nodes[node_id])
        self.actors.append(actor)
        self.world.add(actor)
        self.world.note(f"has requested {actor.name}")
        self.world.after("has requested it")
        return Handle(self, actor)

    def submit(self, actor: Actor, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SimRef:
        """Send a request to an actor."""
        self.world.point(f"sends {method} to {actor.name}")
        ref = self._make_ref(actor)
        actor.send(Request(method, args, kwargs, ref))
        self.world.after(f"has sent {method} to {actor.name}")
        return ref

    def kill(self, handle: Handle, *, no_restart: bool = True) -> None:
        """Let the head end an actor; a silent one does that when it answers again."""
        actor = handle.actor
        self.world.point(f"kills {actor.name}")

        def kill() -> None:
            actor.is_killed = True
            if not actor.is_created:
                actor.end("it was killed before it was created")

        if self.head.is_silent:
            self.head.backlog.append(kill)
        else:
            kill()

    def put(self, value: Any) -> SimRef:
        """Store a value."""
        self.world.point("stores a value")
        ref = SimRef(next(self._numbers), bytes(16))
        ref.resolve(value)
        return ref

    def wait(
        self, refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Do what `ray.wait` does."""
        return self.world.wait(refs, num_returns=num_returns, timeout=timeout)

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """Do what `ray.get` does."""
        if isinstance(refs, SimRef):
            return self.world.get([refs], timeout=timeout)[0]
        return self.world.get(list(refs), timeout=timeout)

    def cancel(self, ref: SimRef, *, force: bool = False) -> None:
        """Drop a request that has not begun."""
        self.world.point(f"cancels request {ref.number}")
        for actor in self.actors:
            for request in list(actor.queue):
                if ref is request.ref:
                    actor.queue.remove(request)
                    request.resolve(error=lambda: TaskCancelledError())

    def is_initialized(self) -> bool:
        return self.is_connected

    def connection(self) -> str:
        """Return what `fairlead_placement.extension.connection` returns."""
        return "pretended" if self.is_connected else ""

    def _make_ref(self, actor: Actor) -> SimRef:
        return SimRef(next(self._numbers), actor.id)

    # The head and the agents of the nodes.

    def ask_head(self, request: str, function: Callable[..., Any], *args: Any, within_s: float = HEAD_S) -> Any:
        """Answer a request to the head, as `query._ask` does, by the name of the function that sends it."""
        self.world.wait_for(f"asks the head to {request}", lambda: not self.head.is_silent, within_s)
        if self.head.is_silent:
            raise HeadTimeoutError(f"Ray's head (GCS) did not answer a request to {request}")
        if "drain" not in function.__name__:
            self._asked[self.world.thread()] = self.world.steps
        return getattr(self, f"_head_{function.__name__}")(*args)

    def check_node(self, node_id: str, what: str) -> None:
        """Fail the run if the present task uses a node of which the head could have told it that it is dead."""
        node, asked = self.nodes[node_id], self._asked.get(self.world.thread(), -1)
        if not node.is_alive and node.died_in < asked:
            raise self.world.fail(SimulationError(f"dead slot: {self.world.who} {what} on {node_id}, which is dead"))

    def _head_alive_nodes(self) -> frozenset[str]:
        return frozenset(node.id for node in self.nodes.values() if node.is_alive)

    def _head_drain_deadlines(self) -> dict[str, float]:
        return {one.id: one.drains_until for one in self.nodes.values() if one.drains_until is not None}

    def _head_find_actors(self, *states: str) -> frozenset[str]:
        chosen = (one for one in self.actors if (one.is_known_dead if "DEAD" in states else not one.is_created))
        return frozenset(one.id.hex() for one in chosen)

    def choose_alive(self, node_ids: Any, *, timeout_s: float | None = None) -> list[str]:
        """Return the nodes that are alive; all of them if the head is silent."""
        self.world.wait_for("asks which nodes are alive", lambda: not self.head.is_silent, timeout_s or 5.0)
        return [one for one in node_ids if self.head.is_silent or self.nodes[one].is_alive]

    def run_on_nodes(
        self, function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Answer a request to the agents of nodes, by the name of the function that they run."""
        asked = [self.nodes[one] for one in arguments]

        def is_answered() -> bool:
            return all(one.is_alive and not one.is_silent for one in asked)

        self.world.wait_for(f"asks {len(asked)} agents to {function.__name__}", is_answered, timeout_s)
        run = getattr(self, f"_agent_{function.__name__}")
        return {
            one.id: run(*arguments[one.id])
            if one.is_alive and not one.is_silent
            else TimeoutError(f"no answer within {timeout_s:g} s")
            for one in asked
        }

    def find(self, key: tuple[int, int]) -> Actor | None:
        """Return the actor of a process that is there."""
        return next((one for one in self.actors if one.key == tuple(key) and one.is_running), None)

    def _agent_find_ended(self, keys: Sequence[tuple[int, int]]) -> list[bool]:
        return [self.find(key) is None for key in keys]

    def _agent_read_records(self, keys: Sequence[tuple[int, int]]) -> list[dict[str, Any] | None]:
        found = [self.find(key) for key in keys]
        return [
            None if one is None else {"method": one.running[0].method if one.running else None, "running_s": 0.0}
            for one in found
        ]

    def _agent_cancel_tasks(self, tasks: Sequence[tuple[tuple[int, int], bytes]]) -> list[bool]:
        running = []
        for key, task in tasks:
            actor = self.find(key)
            if actor is None:
                running.append(False)
                continue
            for request in list(actor.queue):
                if request.ref.binary()[:24] == task:
                    actor.queue.remove(request)
                    request.resolve(error=lambda: TaskCancelledError())
            running.append(any(one.ref.binary()[:24] == task for one in actor.running))
        return running

    def _agent_end_trees(self, keys: Sequence[tuple[int, int]], marks: Sequence[str], *_: Any) -> list[tuple[int, int]]:
        for actor in self.actors:
            tree = actor.worker.facts.get("tree", "")
            if actor.is_running and (actor.key in keys or tree in marks):
                actor.end("its node agent has ended it")
        return []

    # Faults, each at any moment of the run.

    def lose_actor(self) -> None:
        """End the process of an actor that runs."""

        def running() -> list[Actor]:
            return [one for one in self.actors if one.is_running]

        def lose() -> None:
            found = running()
            found[self.world.choose(len(found))].end("it crashed")

        self.world.add_fault("a crash", lose, lambda: bool(running()))

    def lose_node(self, node_id: str) -> None:
        """End a node, with its actors and its agent."""
        self.world.add_fault(f"the end of {node_id}", lambda: self.end_node(node_id))

    def end_node(self, node_id: str) -> None:
        """End a node now."""
        self.nodes[node_id].is_alive = False
        self.nodes[node_id].died_in = self.world.steps
        for actor in self.actors:
            if actor.node.id == node_id:
                actor.end("The actor died because its node has died.")

    def drain(self, node_id: str, seconds: float) -> None:
        """Announce the end of a node, which comes some seconds later."""

        def announce() -> None:
            self.nodes[node_id].drains_until = self.world.now() + seconds
            self.world.add_timer(f"the end of {node_id}", seconds, lambda: self.end_node(node_id))

        self.world.add_fault(f"a drain of {node_id}", announce)

    def silence(self, what: Head | Node, seconds: float) -> None:
        """Let the head, or the agent of a node, be silent for some seconds."""
        name = "the head" if isinstance(what, Head) else f"the agent of {what.id}"

        def begin() -> None:
            what.is_silent = True
            self.world.add_timer(f"an answer of {name}", seconds, end)

        def end() -> None:
            what.is_silent = False
            for act in self.head.backlog if isinstance(what, Head) else ():
                act()
            self.head.backlog.clear()

        self.world.add_fault(f"silence of {name}", begin)

    # Inside pretended workers.

    def constructing(self, actor: Actor) -> None:
        """Report a constructor that begins, to observers whose errors are not those of the constructor."""
        try:
            for observe in self.on_construct:
                observe(actor)
        except AssertionError as error:
            self.world.fail(error)

    def run_method(self, worker: Worker, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the user's class in a worker."""
        method = self.methods.get(name)
        if method is None:
            return worker.facts.get("rank"), worker.epoch, worker.facts.get("world_size")
        return method(worker, *args, **kwargs)

    def run_in(self, worker: Worker, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of `_remote/setup.py`, or of the user, with the facts and the environment of a worker."""
        published = SimpleNamespace(facts=worker.facts)
        before, sys.modules["_fairlead_worker"] = sys.modules.get("_fairlead_worker"), published  # type: ignore[assignment]
        try:
            return run_with_environ(worker.environ, function, worker, *args, **kwargs)
        finally:
            worker.facts = published.facts
            del sys.modules["_fairlead_worker"]
            if before is not None:
                sys.modules["_fairlead_worker"] = before

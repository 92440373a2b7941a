# SPDX-License-Identifier: Apache-2.0
"""A pretended Ray: actors, nodes that die, node agents, and a head that is silent for a while."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import TaskCancelledError

from .actors import Actor, Handle, Request, SimRef, Worker
from .scheduler import SimulatedWorld, SimulationError


@dataclass(eq=False)
class Node:
    """A pretended node, and the agent on it.

    Attributes:
        is_silent: whether its agent does not answer.
        died_in: the step of the run in which it died.
    """

    id: str
    ip: str
    is_alive: bool = True
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
        methods: the methods of the user's class, each called with the worker and the arguments; others return None.
        construct: called with a worker whose constructor runs; it may raise, and return `HANG` or `Takes`.
        on_construct: called with each actor whose constructor begins.
    """

    def __init__(self, world: SimulatedWorld, *, nodes: int = 2) -> None:
        self.world = world
        self.head = Head()
        self.nodes = {node.id: node for node in (Node(f"node-{at}", f"10.0.0.{at}") for at in range(nodes))}
        self.actors: list[Actor] = []
        self.methods: dict[str, Callable[..., Any]] = {}
        self.construct: Callable[[Worker], Any] = lambda worker: None
        self.on_construct: Callable[[Actor], object] = lambda actor: None
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

    def submit(self, actor: Actor, method: str, args: tuple[Any, ...]) -> SimRef:
        """Send a request to an actor."""
        self.world.point(f"sends {method} to {actor.name}")
        ref = SimRef(next(self._numbers), actor.id)
        actor.send(Request(method, args, ref))
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

    def cancel(self, ref: SimRef, *, force: bool = False) -> None:
        """Drop a request that has not begun."""
        self.world.point(f"cancels request {ref.number}")
        for actor in self.actors:
            self._drop(actor, ref.binary())

    def _drop(self, actor: Actor, task: bytes) -> None:
        for request in list(actor.queue):
            if request.ref.binary().startswith(task):
                actor.queue.remove(request)
                request.ref.resolve(error=lambda: TaskCancelledError())

    # The head and the agents of the nodes.

    def ask_head(self, request: str, function: Callable[..., Any], *args: Any) -> Any:
        """Answer a request to the head, as `query._ask` does, by the name of the function that sends it."""
        self.world.wait_for(f"asks the head to {request}", lambda: not self.head.is_silent)
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
        return {}

    def _head_find_actors(self, *states: str) -> frozenset[str]:
        chosen = (actor for actor in self.actors if (actor.is_known_dead if "DEAD" in states else not actor.is_created))
        return frozenset(actor.id.hex() for actor in chosen)

    def choose_alive(self, node_ids: Any, *, timeout_s: float | None = None) -> list[str]:
        """Return the nodes that are alive; all of them if the head is silent."""
        self.world.wait_for("asks which nodes are alive", lambda: not self.head.is_silent, timeout_s or 5.0)
        return [node_id for node_id in node_ids if self.head.is_silent or self.nodes[node_id].is_alive]

    def run_on_nodes(
        self, function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Answer a request to the agents of nodes, by the name of the function that they run."""
        asked = [self.nodes[node_id] for node_id in arguments]

        def is_answered() -> bool:
            return all(node.is_alive and not node.is_silent for node in asked)

        self.world.wait_for(f"asks {len(asked)} agents to {function.__name__}", is_answered, timeout_s)
        run = getattr(self, f"_agent_{function.__name__}")
        return {
            node.id: run(*arguments[node.id])
            if node.is_alive and not node.is_silent
            else TimeoutError(f"no answer within {timeout_s:g} s")
            for node in asked
        }

    def _find(self, key: tuple[int, int]) -> Actor | None:
        """Return the actor of a process that is there."""
        return next((actor for actor in self.actors if actor.key == tuple(key) and actor.is_running), None)

    def _agent_find_ended(self, keys: Sequence[tuple[int, int]]) -> list[bool]:
        return [self._find(key) is None for key in keys]

    def _agent_read_records(self, keys: Sequence[tuple[int, int]]) -> list[None]:
        return [None] * len(keys)

    def _agent_cancel_tasks(self, tasks: Sequence[tuple[tuple[int, int], bytes]]) -> list[bool]:
        running = []
        for key, task in tasks:
            actor = self._find(key)
            if actor is not None:
                self._drop(actor, task)
            request = None if actor is None else actor.running
            running.append(request is not None and request.ref.binary().startswith(task))
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
            return [actor for actor in self.actors if actor.is_running]

        def lose() -> None:
            actors = running()
            actors[self.world.choose(len(actors))].end("it crashed")

        self.world.add_fault("a crash", lose, lambda: bool(running()))

    def lose_node(self, node_id: str) -> None:
        """End a node, with its actors and its agent."""

        def end() -> None:
            self.nodes[node_id].is_alive = False
            self.nodes[node_id].died_in = self.world.steps
            for actor in self.actors:
                if actor.node.id == node_id:
                    actor.end("The actor died because its node has died.")

        self.world.add_fault(f"the end of {node_id}", end)

    def silence(self, what: Head | Node, seconds: float) -> None:
        """Let the head, or the agent of a node, be silent for some seconds."""
        name = "the head" if isinstance(what, Head) else f"the agent of {what.id}"

        def begin() -> None:
            what.is_silent = True
            self.world.add_timer(f"an answer of {name}", seconds, end)

        def end() -> None:
            what.is_silent = False
            for act in what.backlog if isinstance(what, Head) else ():
                act()

        self.world.add_fault(f"silence of {name}", begin)

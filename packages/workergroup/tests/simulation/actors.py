# SPDX-License-Identifier: Apache-2.0
"""Pretended actors: the queue of their requests, the references to the answers, and the errors of Ray's own classes."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from .seam import run_setup

FIRST_PID = 1000


class Takes(NamedTuple):
    """What a method returns that takes some seconds.

    With `is_over` it ends when that holds, or after the seconds at the latest; `give_up` is called then.
    """

    seconds: float
    value: Any = None
    is_over: Callable[[], bool] = lambda: False
    give_up: Callable[[], object] = lambda: None


AT_ONCE = Takes(0.0)
# What a method returns that never ends.
HANG = Takes(math.inf)


class SimRef:
    """A reference to an object that a pretended actor makes."""

    def __init__(self, number: int, actor_id: bytes) -> None:
        self.number = number
        self.is_done: bool = False
        self.has_failed: bool = False
        self._actor_id = actor_id
        self._value: Any = None
        self._error: Callable[[], BaseException] | None = None

    def __hash__(self) -> int:
        return self.number

    def binary(self) -> bytes:
        """Return an id that has the id of the actor where Ray has it."""
        return self.number.to_bytes(8, "big") + self._actor_id + bytes(4)

    def resolve(self, value: Any = None, error: Callable[[], BaseException] | None = None) -> None:
        """Set the value or the error, unless there is one. Each fetch gets an error of its own."""
        if not self.is_done:
            self.is_done, self.has_failed, self._value, self._error = True, error is not None, value, error

    def value(self) -> Any:
        """Return the value, or raise the error as `ray.get` does."""
        if self._error is None:
            return self._value
        error = self._error()
        raise error.as_instanceof_cause() if isinstance(error, RayTaskError) else error


@dataclass(eq=False)
class Request:
    """A request to an actor; while its method runs, with what the method has returned, and when it ends."""

    method: str
    args: tuple[Any, ...]
    ref: SimRef
    takes: Takes = AT_ONCE
    ends_at: float = 0.0
    error: Callable[[], BaseException] | None = None


class Ran(NamedTuple):
    """A method that a worker has begun, with the number of its reference and the epoch of the worker's facts."""

    method: str
    number: int
    epoch: int


@dataclass(eq=False)
class Worker:
    """The process of a pretended actor: what a real one has in `_fairlead_worker`, and what it has begun."""

    actor: "Actor"
    facts: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    ran: list[Ran] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return int(self.facts.get("epoch", -1))


class Actor:
    """A pretended actor, which is a source of events.

    Its requests run in order, one after the other.

    Attributes:
        is_created: whether the head has created it.
        is_running: whether its process is there.
        is_known_dead: whether Ray knows that it is dead.
        rank: the rank that its constructor was started for; None without a constructor.
    """

    due: float | None = None

    def __init__(self, owner: Any, number: int, node: Any) -> None:
        self.name = f"actor {number}"
        self.id: bytes = number.to_bytes(16, "big")
        self.key: tuple[int, int] = (FIRST_PID + number, number)
        self.node = node
        self.worker = Worker(self)
        self.is_created = self.is_running = self.is_known_dead = self.is_killed = False
        self.rank: int | None = None
        self.queue: deque[Request] = deque()
        self.running: Request | None = None
        self.cause = "the process has ended"
        self._ray = owner

    def __repr__(self) -> str:
        return f"<{self.name} rank={self.rank}>"

    @property
    def is_busy(self) -> bool:
        """Whether it has requests that it has not answered."""
        return self.running is not None or bool(self.queue)

    def send(self, request: Request) -> None:
        """Take a request, or refuse it if Ray knows that the actor is dead."""
        if self.is_known_dead:
            request.ref.resolve(error=self._died)
        else:
            self.queue.append(request)

    def end(self, cause: str) -> None:
        """End the process; Ray notices that later."""
        if self.is_running:
            self.is_running, self.cause = False, cause
            self._ray.world.note(f"{self.name} of rank {self.rank} ends: {cause}")
        elif not self.is_created:
            self.is_created, self.cause = True, cause

    def is_ready(self) -> bool:
        """Return whether something can happen to it; set `due` if it will be."""
        self.due = None
        # Most actors are idle at most points.
        if self.is_running and not (self.is_busy or self.is_killed):
            return False
        return bool(self._events())

    def step(self) -> None:
        """Let one of the things happen that can."""
        events = self._events()
        events[self._ray.world.choose(len(events))]()

    def _events(self) -> list[Callable[[], None]]:
        is_silent = self._ray.head.is_silent
        if not self.is_created:
            return [] if is_silent else [self._create]
        if not self.is_running:
            # A silent head does not tell of a death; then requests fail without a reason.
            if is_silent:
                return [self._become_unavailable] if self.is_busy else []
            return [self._become_known_dead]
        events: list[Callable[[], None]] = [self._end_killed] if self.is_killed else []
        if (request := self.running) is None:
            return events + [self._begin] * bool(self.queue)
        if request.ends_at <= self._ray.world.now() or request.takes.is_over():
            events.append(self._finish)
        elif request.ends_at < math.inf:
            self.due = request.ends_at
        return events

    def _create(self) -> None:
        self.is_created = True
        self.is_running = self.node.is_alive
        self._ray.world.note("is created" if self.is_running else "is not created, because its node is dead")

    def _end_killed(self) -> None:
        self.end("it was killed")

    def _become_known_dead(self) -> None:
        self.is_known_dead = True
        self._ray.world.remove(self)
        self._ray.world.note("is reported dead")
        self._fail_all(self._died)

    def _become_unavailable(self) -> None:
        self._ray.world.note("is unavailable")
        self._fail_all(lambda: ActorUnavailableError("the connection has broken", self.id))

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        for request in (self.running, *self.queue):
            if request is not None:
                request.ref.resolve(error=error)
        self.running = None
        self.queue.clear()

    def _died(self) -> BaseException:
        pid, _ = self.key
        return ActorDiedError(ActorDiedErrorContext(actor_id=self.id, pid=pid, error_message=self.cause))

    def _begin(self) -> None:
        self.running = request = self.queue.popleft()
        world, number, args = self._ray.world, request.ref.number, request.args
        name = args[0]["method"] if request.method == "_fairlead_call" else request.method
        self.worker.ran.append(Ran(name, number, self.worker.epoch))
        world.note(f"begins {name} of request {number} in epoch {self.worker.epoch}")
        if name == "_fairlead_start":
            self._set_up(args[0])
        try:
            value = self._call(request)
        except Exception as error:  # noqa: BLE001  it is the outcome
            value, request.error = None, _task_error(name, error)
        request.takes = value if isinstance(value, Takes) else AT_ONCE._replace(value=value)
        request.ends_at = world.now() + request.takes.seconds

    def _finish(self) -> None:
        request, self.running = self.running, None
        assert request is not None
        request.takes.give_up()
        self._ray.world.note(f"ends request {request.ref.number}")
        request.ref.resolve(request.takes.value, request.error)

    def _set_up(self, facts: Mapping[str, Any]) -> None:
        self.worker.facts = dict(facts)
        self.worker.environ = {str(key): str(value) for key, value in facts["env"].items()}
        self.rank = facts["rank"]
        self._ray.on_construct(self)

    def _call(self, request: Request) -> Any:
        """Run a method, and return its value or `Takes`."""
        if request.method == "_fairlead_start":
            took = self._ray.construct(self.worker) or AT_ONCE
            return took._replace(value=self._about())
        if request.method == "_fairlead_apply":
            name, _, *args = request.args
            return run_setup(self.worker, name, *args)
        if request.method == "__ray_ready__":
            return None
        name, args = request.method, request.args
        if name == "_fairlead_call":
            name, args = args[0]["method"], args[1:]
        method = self._ray.methods.get(name)
        return None if method is None else method(self.worker, *args)

    def _about(self) -> dict[str, Any]:
        """Return what a process reports about itself when its constructor has finished."""
        pid, started = self.key
        return {"pid": pid, "started": started, "node_id": self.node.id, "log": ""}


def _task_error(name: str, error: BaseException) -> Callable[[], BaseException]:
    # Otherwise it asks the machine for its address.
    return lambda: RayTaskError(name, f"{type(error).__name__}: {error}", error, pid=FIRST_PID, ip="10.0.0.0")


class Handle:
    """The handle of a pretended actor."""

    def __init__(self, owner: Any, actor: Actor) -> None:
        self.actor = actor
        self._owner = owner
        self._actor_id: bytes = actor.id

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._owner.submit(self.actor, name, args))

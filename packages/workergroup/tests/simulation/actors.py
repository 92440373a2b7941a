# SPDX-License-Identifier: Apache-2.0
"""Pretended actors: the queue of their requests, the references to the answers, and the errors of Ray's own classes."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from .seam import find_fact_function

# What a method returns that never ends.
HANG = object()
FIRST_PID = 1000


class Takes(NamedTuple):
    """What a method returns that takes some seconds."""

    seconds: float
    value: Any = None


class Until(NamedTuple):
    """What a method returns that ends when a condition holds, or at a moment, at which it calls a function."""

    is_over: Callable[[], bool]
    due: float
    give_up: Callable[[], object]


class SimRef:
    """A reference to an object that a pretended actor makes."""

    __slots__ = ("__weakref__", "_error", "_value", "actor_id", "has_failed", "is_done", "number")

    def __init__(self, number: int, actor_id: bytes) -> None:
        self.number = number
        self.actor_id = actor_id
        self.is_done: bool = False
        self.has_failed: bool = False
        self._value: Any = None
        self._error: Callable[[], BaseException] | None = None

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"SimRef({self.number})"

    def binary(self) -> bytes:
        """Return an id that has the id of the actor where Ray has it."""
        return self.number.to_bytes(8, "big") + self.actor_id + bytes(4)

    def hex(self) -> str:
        return self.binary().hex()

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
    """A request to an actor; `ends_at` is when its method ends, or None if it never ends."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ref: SimRef
    ends_at: float | None = None
    until: Until | None = None
    outcome: tuple[Any, Callable[[], BaseException] | None] = (None, None)
    drops_value: bool = False

    def is_deliverable(self) -> bool:
        """Return whether the arguments that are references have been made."""
        return all(one.is_done for one in (*self.args, *self.kwargs.values()) if isinstance(one, SimRef))

    def resolve(self, value: Any = None, error: Callable[[], BaseException] | None = None) -> None:
        self.ref.resolve(None if self.drops_value else value, error)


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

    Its requests begin in order, one after the other.

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
        self.running: list[Request] = []
        self.cause = "the process has ended"
        self._ray = owner

    def __repr__(self) -> str:
        return f"<{self.name} rank={self.rank}>"

    def send(self, request: Request) -> None:
        """Take a request, or refuse it if Ray knows that the actor is dead."""
        if self.is_known_dead:
            request.resolve(error=self._died)
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
        if self.is_running and not (self.queue or self.running or self.is_killed):
            return False
        return bool(self._events())

    def step(self) -> None:
        """Let one of the things happen that can."""
        events = self._events()
        events[self._ray.world.choose(len(events))]()

    def _events(self) -> list[Callable[[], None]]:
        head, now = self._ray.head, self._ray.world.now()
        if not self.is_created:
            return [] if head.is_silent else [self._create]
        if not self.is_running:
            # A silent head does not tell of a death; then requests fail without a reason.
            if head.is_silent:
                return [self._become_unavailable] if self._open() else []
            return [self._become_known_dead]
        events: list[Callable[[], None]] = [self._end_killed] if self.is_killed else []
        for request in self.running:
            if request.ends_at is None:
                continue
            if request.ends_at <= now or (request.until is not None and request.until.is_over()):
                events.append(lambda request=request: self._finish(request))
            else:
                self._look_at(request.ends_at)
        if self.queue and not self.running and self.queue[0].is_deliverable():
            events.append(lambda: self._begin(self.queue[0]))
        return events

    def _look_at(self, moment: float | None) -> None:
        if moment is not None and (self.due is None or moment < self.due):
            self.due = moment

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

    def _open(self) -> list[Request]:
        """Return the requests that it has not answered."""
        return [*self.running, *self.queue]

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        for request in self._open():
            request.resolve(error=error)
        self.running.clear()
        self.queue.clear()

    def _died(self) -> BaseException:
        pid, _ = self.key
        return ActorDiedError(ActorDiedErrorContext(actor_id=self.id, pid=pid, error_message=self.cause))

    def _begin(self, request: Request) -> None:
        self.queue.remove(request)
        world = self._ray.world
        arguments = (*request.args, *request.kwargs.values())
        if failed := [one for one in arguments if isinstance(one, SimRef) and one.has_failed]:
            request.resolve(error=_error_of(failed[0]))
            return
        number = request.ref.number
        name = request.args[0]["method"] if request.method == "_fairlead_call" else request.method
        self.worker.ran.append(Ran(name, number, self.worker.epoch))
        world.note(f"begins {request.method} of request {number} in epoch {self.worker.epoch}")
        value = self._call(request)
        if request.outcome[1] is None and value is not HANG:
            request.outcome = value.value if isinstance(value, Takes) else value, None
        if value is HANG:
            self.running.append(request)
        elif isinstance(value, Until):
            request.until, request.ends_at, request.outcome = value, value.due, (None, request.outcome[1])
            self.running.append(request)
        elif request.method in _AT_ONCE:
            request.resolve(*request.outcome)
        else:
            request.ends_at = world.now() + (value.seconds if isinstance(value, Takes) else 0.0)
            self.running.append(request)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        if request.until is not None:
            request.until.give_up()
        self._ray.world.note(f"ends {request.method} of request {request.ref.number}")
        request.resolve(*request.outcome)

    def _call(self, request: Request) -> Any:
        """Run a method; return its value, `HANG` or `Takes`, or set the error as the outcome of the request."""
        name, args, kwargs = request.method, [_value_of(one) for one in request.args], dict(request.kwargs)
        kwargs = {key: _value_of(one) for key, one in kwargs.items()}
        if name == "_fairlead_call":
            how, *args = args
            name, request.drops_value = how["method"], "silent" in how
        try:
            own = getattr(self, f"_run{name}", None) if name.startswith(("_fairlead", "__")) else None
            if own is not None:
                return own(*args, **kwargs)
            return self._ray.run_method(self.worker, name, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  it is the outcome
            request.outcome = None, _task_error(name, error)
            return None

    def _run_fairlead_start(self, facts: Any, target: Any, args: Any, kwargs: Any) -> Any:
        self.worker.facts = {key: _value_of(value) for key, value in facts.items()}
        self.worker.environ = {str(key): str(value) for key, value in self.worker.facts.get("env", {}).items()}
        self.rank = self.worker.facts["rank"]
        self._ray.constructing(self)
        result = self._ray.construct(self.worker)
        return result if result is HANG else Takes(result.seconds if isinstance(result, Takes) else 0.0, self.about())

    def _run_fairlead_apply(self, name: str, pickled: bytes, *args: Any, **kwargs: Any) -> Any:
        function = find_fact_function(name) or ray.cloudpickle.loads(pickled)
        return self._ray.run_in(self.worker, function, *args, **kwargs)

    def _run__ray_ready__(self) -> bool:
        return True

    def about(self) -> dict[str, Any]:
        """Return what a process reports about itself when its constructor has finished."""
        pid, started = self.key
        return {"pid": pid, "started": started, "node_id": self.node.id, "log": ""}


# These take no time that a death could cut short.
_AT_ONCE = frozenset({"_fairlead_apply", "__ray_ready__"})


def _value_of(value: Any) -> Any:
    return value.value() if isinstance(value, SimRef) else value


def _error_of(ref: SimRef) -> Callable[[], BaseException]:
    def make() -> BaseException:
        try:
            ref.value()
        except BaseException as error:  # noqa: BLE001  the same error again
            return error
        raise AssertionError("the reference has not failed")

    return make


def _task_error(name: str, error: BaseException) -> Callable[[], BaseException]:
    # Otherwise it asks the machine for its address.
    return lambda: RayTaskError(name, f"{type(error).__name__}: {error}", error, pid=FIRST_PID, ip="10.0.0.0")


class Method:
    """A method of a handle."""

    def __init__(self, handle: "Handle", name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._handle.owner.submit(self._handle.actor, self._name, args, kwargs)


class Handle:
    """The handle of a pretended actor."""

    def __init__(self, owner: Any, actor: Actor) -> None:
        self.owner = owner
        self.actor = actor
        self._actor_id: bytes = actor.id

    def __repr__(self) -> str:
        return f"Handle({self.actor.name})"

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

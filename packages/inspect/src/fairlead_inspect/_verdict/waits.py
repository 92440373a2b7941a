# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, and the processes at the end of the waits."""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any, Literal

from ..model import Actor, Call, Job, Member, Process, Snapshot, Thread, WorkerSet
from .libraries import is_infrastructure
from .positions import Position, PositionKind, locate

# "args": a call for those that make its arguments; "calls": a process whose waits cannot be read, for its own calls.
WaitKind = Literal["collective", "get", "wait", "args", "calls"]
# The waits of these are not read, so that they may wait for anything that they have called.
_UNREADABLE: tuple[PositionKind, ...] = ("opaque", "library", "channel", "ray-get")
_BUSY: tuple[PositionKind, ...] = ("user", "collective", "device", "library", "channel")
# An object's id begins with the id of the task that creates it: 48 digits, of which the last 32 are its actor's id.
_TASK, _ACTOR = slice(0, 48), slice(16, 48)
_MOST_RESULTS = 100_000_000
# Members of a worker set whose size is not known do not wait for one that died so long before they began to.
GOES_ON_S = 60.0
# The state of a call that waits for its arguments.
LACKS_ARGUMENTS = "PENDING_ARGS_AVAIL"


def is_promise(object_id: str) -> bool:
    """Return whether no task makes an object: one of `ray.put`, or of `PlacementGroup.ready`, for which one waits."""
    # The last four bytes of an object's id count the objects of a task, results first (Ray's `kMaxTaskReturns`).
    return int.from_bytes(bytes.fromhex(object_id[48:56]), "little") > _MOST_RESULTS


@dataclass(frozen=True)
class Wait:
    """Some processes that wait, and those that they wait for, by their keys.

    `certain` is False if it may be over, or may not be for these: Ray's task events do not have the task and there are
    other references, other threads of the process do something else, or its `workers` may be no set. Who `polls` goes
    on after a while, and may wait again.
    """

    kind: WaitKind
    waiters: tuple[str, ...]
    targets: tuple[str, ...]
    certain: bool = True
    workers: WorkerSet | None = None
    polls: bool = False


@dataclass(frozen=True)
class Graph:
    """The waits of one job. Keys are ids of actors, and of tasks and of the job behind "task:" and "driver:"."""

    job: Job
    worker_sets: tuple[WorkerSet, ...]
    actors: Mapping[str, Actor]
    tasks: Mapping[str, Call]
    processes: Mapping[str, Process]
    positions: Mapping[str, Position]
    waits: tuple[Wait, ...] = ()

    @property
    def driver(self) -> str:
        """The key of the driver."""
        return f"driver:{self.job.job_id}"

    @cached_property
    def next(self) -> Mapping[str, Collection[str]]:
        """The keys that each key waits for."""
        following: dict[str, set[str]] = {}
        for wait in self.waits:
            for waiter in wait.waiters:
                following.setdefault(waiter, set()).update(wait.targets)
        return following

    @cached_property
    def waiters(self) -> set[str]:
        """The keys of all that wait."""
        return {waiter for wait in self.waits for waiter in wait.waiters}

    @cached_property
    def absent(self) -> set[str]:
        """The actors that do not live, and the tasks that have not started."""
        actors = {key for key, actor in self.actors.items() if actor.state != "ALIVE"}
        return actors | {f"task:{key}" for key, task in self.tasks.items() if task.state.startswith("PENDING")}

    @cached_property
    def infrastructure(self) -> set[str]:
        """The actors that belong to a library and run no code of the job."""
        return {key for key, actor in self.actors.items() if is_infrastructure(actor)}

    @cached_property
    def members(self) -> Mapping[str, tuple[WorkerSet, Member]]:
        """The worker set of each actor that is in one, and its member there."""
        return {member.key: (workers, member) for workers in reversed(self.worker_sets) for member in workers.members}

    @cached_property
    def began(self) -> Mapping[str, float]:
        """When the oldest call began that runs in each process with one."""
        began: dict[str, float] = {}
        for call in self.tasks.values():
            # A worker tells a second later that a call has begun.
            if call.state in ("RUNNING", "SUBMITTED_TO_WORKER") and call.began:
                key = self.key_of(call)
                began[key] = min(call.began, began.get(key, call.began))
        return began

    def key_of(self, call: Call) -> str:
        """Return the key of the process that runs a call."""
        return call.actor_id if call.actor_id in self.actors else f"task:{call.task_id}"

    def reach(self, keys: Iterable[str]) -> set[str]:
        """Return all that some keys lead to, with themselves."""
        seen, left = set[str](), [*keys]
        while left:
            if (key := left.pop()) not in seen:
                seen.add(key)
                left += self.next.get(key, ())
        return seen

    def sinks(self, keys: Iterable[str]) -> set[str]:
        """Return those at the end of the waits from some keys: they wait for nothing that is known."""
        return {key for key in self.reach(keys) if not self.next.get(key)}

    def find_path(self, start: str, end: str, *, calls: bool = True) -> list[str]:
        """Return the shortest way of waits from one key to another, with those for `calls` or not; or the end alone."""
        graph = self if calls else replace(self, waits=tuple(wait for wait in self.waits if wait.kind != "calls"))
        paths, left = {start: [start]}, [start]
        while left and end not in paths:
            key = left.pop(0)
            for target in sorted(graph.next.get(key, ())):
                if target not in paths:
                    paths[target] = [*paths[key], target]
                    left.append(target)
        return paths.get(end, [end])

    def find_cycle(self, *, certain: bool, calls: bool = False) -> tuple[str, ...]:
        """Return a cycle of `ray.get` and collectives: of `certain` waits only, or with `calls` that may be awaited."""
        following: dict[str, list[str]] = {}
        for wait in self.waits:
            alike = wait.workers is None or wait.workers.confidence == "certain"
            kinds = ("wait",) if calls else ("wait", "calls")
            if wait.kind not in kinds and not wait.polls and alike and (wait.certain or not certain):
                for waiter in wait.waiters:
                    following.setdefault(waiter, []).extend(wait.targets)
        try:
            TopologicalSorter(following).prepare()
        except CycleError as error:  # the cycle ends where it begins, and each waits for the one before
            return tuple(error.args[1][:0:-1])
        return ()


def add_label(place: Position, label: Mapping[str, Any]) -> Position:
    """Return the position of a process; one that has recorded that it waits for others is in a collective."""
    return replace(place, kind="collective") if label.get("waiting") and place.kind != "idle" else place


def make_graph(snapshot: Snapshot, job: Job, worker_sets: Iterable[WorkerSet]) -> Graph:
    """Return the waits of one job."""
    by_pid = {(process.node_id, process.pid): process for process in snapshot.processes}
    actors = {actor.actor_id: actor for actor in snapshot.actors if actor.job_id == job.job_id}
    # A task's id ends with that of its job.
    tasks = {call.task_id: call for call in snapshot.calls if call.task_id.endswith(job.job_id)}
    places = {key: (actor.node_id, actor.pid) for key, actor in actors.items()}
    places[f"driver:{job.job_id}"] = job.node_id, job.pid
    places |= {f"task:{key}": (task.node_id, task.pid) for key, task in tasks.items() if not task.actor_id}
    processes = {key: by_pid[place] for key, place in places.items() if place in by_pid}
    positions = {
        key: add_label(locate(process, driver=key.startswith("driver:")), snapshot.labels.get(key, {}))
        for key, process in processes.items()
    }
    for key, actor in actors.items():
        if actor.state == "ALIVE" and key not in positions:
            positions[key] = Position("unread")
    own = tuple(workers for workers in worker_sets if workers.job_id == job.job_id)
    graph = Graph(job, own, actors, tasks, processes, positions)
    waits = [wait for workers in own if (wait := _find_collective(graph, workers, snapshot.looked_at)) is not None]
    for key in processes:
        waits += _find_gets(graph, key, snapshot.finished)
    waits += _find_arguments(graph)
    waits += _find_calls(graph, {waiter for wait in waits for waiter in wait.waiters})
    return replace(graph, waits=tuple(waits))


def _find_collective(graph: Graph, workers: WorkerSet, now: float) -> Wait | None:
    """Return the wait of the members that are in a collective for those that are not.

    Who waits for a device may do so in a collective, or in the backward pass of a distributed model: that is assumed
    only if a member stands elsewhere.
    """
    members = {member.key: graph.positions[member.key] for member in workers.members if member.key in graph.positions}
    places = {place.where for place in members.values()}
    inside = [
        key
        for key, place in members.items()
        if place.kind == "collective" or (place.backward and place.stands and len(places) > 1)
    ]
    if len(members) < len(workers.members) or any(
        place.kind not in ("collective", "device") for place in members.values()
    ):
        inside = [
            key
            for key, place in members.items()
            if place.kind == "collective" or (place.kind == "device" and place.stands)
        ]
    # Of the others, those that wait for something else lead on to it.
    absent = [member.key for member in workers.members if member.key not in inside and member.key in graph.actors]
    if workers.world_size is None:
        # Those that are left go on without one whose end was intended, or was long before they began to wait.
        began = now - max((members[key].since_s or 0.0 for key in inside), default=0.0)
        deaths = {key: death for key in absent if (death := graph.actors[key].death) is not None}
        gone = {key for key, death in deaths.items() if death.intended or began - death.at > GOES_ON_S}
        absent = [key for key in absent if key not in gone]
    # Most members may be right, and those inside alone in a collective of their own.
    certain = not workers.disputed and len(absent) <= len(inside)
    if workers.confidence != "certain":
        # What looks like a worker set may have spares, which run another method or none. Actors of one class need not
        # work together. Several that wait for the last one do.
        titles = {graph.processes[key].title for key in (*inside, *absent) if key in graph.processes}
        certain &= len(titles) < 2 and (workers.confidence != "guess" or (len(absent) < 2 <= len(inside)))
    # On a device each may wait for itself.
    joined = any(members[key].kind == "collective" for key in inside)
    certain &= joined or (workers.confidence == "certain" and len(absent) < len(inside) > 1)
    if not inside or not (joined or (absent and certain)):
        return None
    return Wait("collective", tuple(inside), tuple(absent), certain, workers)


def _find_gets(graph: Graph, key: str, finished: Container[str]) -> list[Wait]:
    """Return what a process waits for in `ray.get`, where it needs all, and in `ray.wait`, where any may do."""
    place, waits = graph.positions[key], []
    # Any thread of a driver may be the one that matters, unless it works meanwhile.
    alone = not place.mixed or (key.startswith("driver:") and not place.moves)
    kinds: tuple[tuple[WaitKind, bool], ...] = (("get", False), ("wait", True))
    for thread, (kind, any_) in product(graph.processes[key].threads, kinds):
        chosen = [reference for reference in thread.references if reference.any is any_]
        targets, certain = dict[str, None](), alone and not thread.unread
        for reference in chosen:
            task_id, actor_id = reference.object_id[_TASK], reference.object_id[_ACTOR]
            if task_id in finished:
                continue
            call = graph.tasks.get(task_id)
            if actor_id in graph.actors and (call is None or call.state != LACKS_ARGUMENTS):
                target = actor_id
            else:
                target = f"task:{task_id}" if call is not None else ""
            certain &= bool(target) and (call is not None or len(chosen) == 1)
            # A call of itself that an actor waits for never begins.
            if target and (target != key or (call is not None and call.state != "RUNNING")):
                targets[target] = None
        if targets:
            polls = any(reference.polls for reference in chosen)
            waits.append(Wait(kind, (key,), tuple(targets), certain, polls=polls))
    return waits


def _find_arguments(graph: Graph) -> list[Wait]:
    """Return the waits of calls whose arguments are not there: for the open calls of the task that submitted them."""
    waits = []
    for call in graph.tasks.values():
        if call.state == LACKS_ARGUMENTS:
            others = (task for task in graph.tasks.values() if task.state != LACKS_ARGUMENTS)
            targets = tuple(dict.fromkeys(graph.key_of(other) for other in others if other.parent == call.parent))
            if targets:  # Ray does not tell which of several makes the arguments
                waits.append(Wait("args", (f"task:{call.task_id}",), targets, len(targets) == 1))
    return waits


def _find_calls(graph: Graph, read: Container[str]) -> list[Wait]:
    """Return what processes may wait for whose waits cannot be read: the calls that they have made."""
    owners = {actor.worker_id: key for key, actor in graph.actors.items() if actor.worker_id}
    owners[graph.job.worker_id] = graph.driver
    called: dict[str, dict[str, None]] = {}
    for call in graph.tasks.values():
        if call.state == "RUNNING":
            parent, actor_id = graph.tasks.get(call.parent), call.parent[_ACTOR]
            # The driver, if the thread that has submitted it is not known to Ray.
            submitter = graph.key_of(parent) if parent else actor_id if actor_id in graph.actors else graph.driver
            called.setdefault(submitter, {})[graph.key_of(call)] = None
    # Fairlead waits for the actors that it starts.
    starts = {key for key, process in graph.processes.items() if any(map(_is_start, process.threads))}
    # A controller of Ray Train makes no call that lasts, so that it may wait for the actors that it has created.
    for key, actor in graph.actors.items():
        busy = key in graph.positions and graph.positions[key].kind in _BUSY
        pending = key in graph.absent and actor.death is None and owners.get(actor.owner) in starts
        if (busy or pending) and key not in graph.infrastructure and actor.owner in owners:
            called.setdefault(owners[actor.owner], {})[key] = None
    waits = []
    for key, place in graph.positions.items():
        unreadable = key in graph.infrastructure or place.kind in _UNREADABLE or key.startswith("driver:")
        targets = tuple(target for target in called.get(key, ()) if target != key)
        if key not in read and (key in starts or (unreadable and place.motion != "moving")) and targets:
            waits.append(Wait("calls", (key,), targets, certain=False))
    return waits


def _is_start(thread: Thread) -> bool:
    return thread.request is not None and thread.request.function == "wait_started"

# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, and the processes at the end of the waits."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..model import Actor, Call, Fleet, Job, Member, Process, Snapshot
from .libraries import is_infrastructure
from .positions import Position, PositionKind, locate

# "args": a call for those that make its arguments; "calls": a process whose waits cannot be read, for its own calls.
WaitKind = Literal["collective", "get", "wait", "args", "calls"]
# The waits of these are not read, so that they may wait for anything that they have called.
_UNREADABLE: tuple[PositionKind, ...] = ("opaque", "library", "channel", "ray-get")
# An object's id begins with the id of the task that creates it: 48 digits, of which the last 32 are its actor's id.
_TASK, _ACTOR = slice(0, 48), slice(16, 48)
_MOST_RESULTS = 100_000_000
# Members of a fleet whose size is not known do not wait for one that died so long before they began to.
GOES_ON_S = 60.0
# The state of a call that waits for its arguments.
LACKS_ARGUMENTS = "PENDING_ARGS_AVAIL"


def is_promise(object_id: str) -> bool:
    """Return whether no task makes an object: one of `ray.put`, or of `PlacementGroup.ready`, for which one may wait.

    The last four bytes of an object's id count the objects of a task, results first (Ray's `kMaxTaskReturns`).
    """
    return int.from_bytes(bytes.fromhex(object_id[48:56]), "little") > _MOST_RESULTS


def driver_key(job_id: str) -> str:
    """Return the key of a job's driver among those of actors and tasks."""
    return f"driver:{job_id}"


@dataclass(frozen=True)
class Wait:
    """Some processes that wait, and the keys that they wait for: of actors, of "task:..." or of "driver:...".

    `certain` is False if it may be over, or may not be for these: Ray's task events do not have the task and there are
    other references, other threads of the process do something else, or the fleet may not be one. Who `polls` goes on
    after a while, and may wait again.
    """

    kind: WaitKind
    waiters: tuple[str, ...]
    targets: tuple[str, ...]
    certain: bool = True
    fleet: Fleet | None = None
    polls: bool = False


@dataclass(frozen=True)
class Graph:
    """The waits of one job."""

    job: Job
    fleets: tuple[Fleet, ...]
    actors: Mapping[str, Actor]
    tasks: Mapping[str, Call]
    processes: Mapping[str, Process]
    positions: Mapping[str, Position]
    waits: tuple[Wait, ...]
    _next: dict[str, set[str]] = field(default_factory=dict)
    _members: dict[str, tuple[Fleet, Member]] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.tasks.values():
            # A worker tells a second later that a call has begun.
            if call.state in ("RUNNING", "SUBMITTED_TO_WORKER") and call.began:
                key = _key_of(call, self.actors)
                self._began[key] = min(call.began, self._began.get(key, call.began))
        self._members.update((one.key, (fleet, one)) for fleet in reversed(self.fleets) for one in fleet.members)
        for wait in self.waits:
            for waiter in wait.waiters:
                self._next.setdefault(waiter, set()).update(wait.targets)

    def waits_of(self, key: str) -> set[str]:
        """Return the keys that one waits for."""
        return self._next.get(key, set())

    def reach(self, keys: Iterable[str]) -> set[str]:
        """Return all that some keys lead to, with themselves."""
        seen, left = set[str](), [*keys]
        while left:
            if (key := left.pop()) not in seen:
                seen.add(key)
                left += self.waits_of(key)
        return seen

    def is_certain(self, keys: Iterable[str]) -> bool:
        """Return whether all waits that lead on from some keys are certain."""
        reached = self.reach(keys)
        return all(one.certain for one in self.waits if not reached.isdisjoint(one.waiters))

    def sinks(self, keys: Iterable[str]) -> set[str]:
        """Return those at the end of the waits from some keys: they wait for nothing that is known."""
        return {key for key in self.reach(keys) if not self.waits_of(key)}

    def waiters(self) -> set[str]:
        """Return the keys of all that wait."""
        return {waiter for wait in self.waits for waiter in wait.waiters}

    def frees(self, since: float) -> bool:
        """Return whether those that do not wait work, or run tasks, or calls begun since then.

        They may free later what others request.
        """
        waiters = self.waiters()
        return any(
            one.motion in ("moving", "spinning") or one.busy_elsewhere
            for key, one in self.positions.items()
            if key not in waiters
        ) or any(
            one.state == "RUNNING" and (not one.actor_id or one.began > since)
            for key, one in self.tasks.items()
            if not {f"task:{key}", one.actor_id} & waiters
        )

    def find_path(self, start: str, end: str, *, calls: bool = True) -> list[str]:
        """Return the shortest way of waits from one key to another, with those for `calls` or not; or the end alone."""
        following: dict[str, set[str]] = {}
        for wait in self.waits:
            for waiter in wait.waiters if calls or wait.kind != "calls" else ():
                following.setdefault(waiter, set()).update(wait.targets)
        before: dict[str, str] = {}
        left = [start]
        while left and end not in before:
            here = left.pop(0)
            for target in sorted(following.get(here, ())):
                if target not in before:
                    before[target] = here
                    left.append(target)
        path = [end]
        while path[0] in before and path[0] != start:
            path.insert(0, before[path[0]])
        return path

    def find_cycle(self, *, certain: bool, calls: bool = False) -> tuple[str, ...]:
        """Return the keys of a cycle of `ray.get`, or of one with collectives, or none.

        Args:
            certain: of certain waits only.
            calls: or of calls that may be awaited.
        """
        gets: dict[str, list[str]] = {}
        for wait in self.waits:
            alike = wait.fleet is None or wait.fleet.confidence == "certain"
            kinds = ("wait",) if calls else ("wait", "calls")
            if wait.kind not in kinds and not wait.polls and alike and (wait.certain or not certain):
                for waiter in wait.waiters:
                    gets.setdefault(waiter, []).extend(wait.targets)
        done: set[str] = set()
        for start in gets:
            path: list[str] = []
            stack = [(start, iter(gets.get(start, ())))] if start not in done else []
            path += [start] if stack else []
            while stack:
                key, targets = stack[-1]
                target = next(targets, None)
                if target is None:
                    done.add(key)
                    path.pop()
                    stack.pop()
                elif target in path:
                    return tuple(path[path.index(target) :])
                elif target not in done:
                    path.append(target)
                    stack.append((target, iter(gets.get(target, ()))))
        return ()

    def call_began(self, key: str) -> float | None:
        """Return when the oldest call began that runs in a process; None without one."""
        return self._began.get(key)

    def fleet_of(self, key: str) -> tuple[Fleet, Member] | None:
        """Return the fleet of an actor, and its member there."""
        return self._members.get(key)


def add_label(at: Position, label: Mapping[str, Any]) -> Position:
    """Return the position of a process; one that has recorded that it waits for others is in a collective."""
    return replace(at, kind="collective") if label.get("waiting") and at.kind != "idle" else at


def make_graph(snapshot: Snapshot, job: Job, fleets: Iterable[Fleet]) -> Graph:
    """Return the waits of one job."""
    by_pid = {(one.node_id, one.pid): one for one in snapshot.processes}
    actors = {one.actor_id: one for one in snapshot.actors if one.job_id == job.job_id}
    # A task's id ends with that of its job.
    tasks = {one.task_id: one for one in snapshot.calls if one.task_id.endswith(job.job_id)}
    owned = {key: by_pid[at] for key, one in actors.items() if (at := (one.node_id, one.pid)) in by_pid}
    if (driver := by_pid.get((job.node_id, job.pid))) is not None:
        owned[driver_key(job.job_id)] = driver
    for task in tasks.values():
        if not task.actor_id and (task.node_id, task.pid) in by_pid:
            owned[f"task:{task.task_id}"] = by_pid[task.node_id, task.pid]
    positions = {
        key: add_label(locate(one, driver=key.startswith("driver:")), snapshot.labels.get(key, {}))
        for key, one in owned.items()
    }
    for key, actor in actors.items():
        if actor.state == "ALIVE" and key not in positions:
            positions[key] = Position("unread")
    here = tuple(fleet for fleet in fleets if fleet.job_id == job.job_id)
    now, titles = snapshot.looked_at, {key: one.title for key, one in owned.items()}
    waits = [wait for fleet in here if (wait := _find_collective(fleet, actors, positions, titles, now)) is not None]
    for key, process in owned.items():
        # Any thread of a driver may be the one that matters, unless it works meanwhile.
        alone = not positions[key].mixed or (key.startswith("driver:") and not positions[key].moves)
        waits += _find_gets(key, process, actors, tasks, snapshot.finished, alone=alone)
    waits += _find_arguments(actors, tasks)
    read = {waiter for one in waits for waiter in one.waiters}
    waits += _find_calls(job, actors, tasks, positions, read)
    return Graph(job, here, actors, tasks, owned, positions, tuple(waits))


def _find_collective(
    fleet: Fleet, actors: Mapping[str, Actor], positions: Mapping[str, Position], titles: Mapping[str, str], now: float
) -> Wait | None:
    """Return the wait of the members that are in a collective for those that are not.

    Who waits for a device may do so in a collective, or in the backward pass of a distributed model: that is assumed
    only if a member stands elsewhere.
    """
    at = {one.key: positions[one.key] for one in fleet.members if one.key in positions}
    places = {one.where for one in at.values()}
    inside = [
        key for key, one in at.items() if one.kind == "collective" or (one.backward and one.stands and len(places) > 1)
    ]
    if any(one.key not in at or at[one.key].kind not in ("collective", "device") for one in fleet.members):
        inside = [key for key, one in at.items() if one.kind == "collective" or (one.kind == "device" and one.stands)]
    # Of the others, those that wait for something else lead on to it.
    absent = [one.key for one in fleet.members if one.key not in inside and one.key in actors]
    if fleet.world_size is None:
        # Those that are left go on without one whose end was intended, or was long before they began to wait.
        began = now - max((positions[key].since_s or 0.0 for key in inside), default=0.0)
        deaths = {key: death for key in absent if (death := actors[key].death) is not None}
        gone = {key for key, death in deaths.items() if death.intended or began - death.at > GOES_ON_S}
        absent = [key for key in absent if key not in gone]
    # Most members may be right, and those inside alone in a collective of their own.
    certain = not fleet.disputed and len(absent) <= len(inside)
    if fleet.confidence != "certain":
        # What looks like a fleet may have spares, which run another method or none. Actors of one class need not work
        # together. Several that wait for the last one do.
        certain &= len({titles[key] for key in (*inside, *absent) if key in titles}) < 2
        certain &= fleet.confidence != "guess" or (len(absent) < 2 <= len(inside))
    # On a device each may wait for itself.
    joined = any(at[key].kind == "collective" for key in inside)
    certain &= joined or (fleet.confidence == "certain" and len(absent) < len(inside) > 1)
    if not inside or not (joined or (absent and certain)):
        return None
    return Wait("collective", tuple(inside), tuple(absent), certain, fleet)


def _find_gets(
    key: str,
    process: Process,
    actors: Mapping[str, Actor],
    tasks: Mapping[str, Call],
    finished: frozenset[str],
    *,
    alone: bool,
) -> list[Wait]:
    """Return what a process waits for in `ray.get`, where it needs all, and in `ray.wait`, where any may do."""
    waits = []
    kinds: tuple[tuple[WaitKind, bool], ...] = (("get", False), ("wait", True))
    for thread in process.threads:
        for kind, any_ in kinds:
            chosen = [one for one in thread.references if one.any is any_]
            targets, certain = dict[str, None](), alone and not thread.unread
            for one in chosen:
                task_id, actor_id = one.object_id[_TASK], one.object_id[_ACTOR]
                if task_id in finished:
                    continue
                target = actor_id if actor_id in actors else f"task:{task_id}" if task_id in tasks else ""
                if target and (call := tasks.get(task_id)) is not None and call.state == LACKS_ARGUMENTS:
                    target = f"task:{task_id}"
                certain &= bool(target) and (task_id in tasks or len(chosen) == 1)
                # A call of itself that an actor waits for never begins.
                queued = task_id in tasks and tasks[task_id].state != "RUNNING"
                if target and (target != key or queued):
                    targets[target] = None
            if targets:
                polls = any(one.polls for one in chosen)
                waits.append(Wait(kind, (key,), tuple(targets), certain, polls=polls))
    return waits


def _find_arguments(actors: Mapping[str, Actor], tasks: Mapping[str, Call]) -> list[Wait]:
    """Return the waits of calls whose arguments are not there: for the open calls of the task that submitted them.

    Ray does not tell which of these make the arguments, so that it is certain only if there is one.
    """
    waits = []
    for call in tasks.values():
        if call.state == LACKS_ARGUMENTS:
            before = [one for one in tasks.values() if one.parent == call.parent and one.state != LACKS_ARGUMENTS]
            targets = tuple(dict.fromkeys(_key_of(one, actors) for one in before))
            if targets:
                waits.append(Wait("args", (f"task:{call.task_id}",), targets, len(targets) == 1))
    return waits


def _find_calls(
    job: Job,
    actors: Mapping[str, Actor],
    tasks: Mapping[str, Call],
    positions: Mapping[str, Position],
    read: Container[str],
) -> list[Wait]:
    """Return what processes may wait for whose waits cannot be read: the calls that they have made.

    A controller of Ray Train makes no call that lasts, so that it may wait for the actors that it has created.
    """
    by_worker = {one.worker_id: key for key, one in actors.items() if one.worker_id} | {
        job.worker_id: driver_key(job.job_id)
    }
    called: dict[str, dict[str, None]] = {}
    for call in tasks.values():
        if call.state == "RUNNING":
            called.setdefault(_submitter(call, job, actors, tasks), {})[_key_of(call, actors)] = None
    for key, actor in actors.items():
        busy = key in positions and positions[key].kind in ("user", "collective", "device", "library", "channel")
        if busy and not is_infrastructure(actor) and actor.owner in by_worker:
            called.setdefault(by_worker[actor.owner], {})[key] = None
    waits = []
    for key, at in positions.items():
        serves = key in actors and is_infrastructure(actors[key])
        unreadable = serves or at.kind in _UNREADABLE or key.startswith("driver:")
        targets = tuple(one for one in called.get(key, ()) if one != key)
        if key not in read and unreadable and targets and at.motion != "moving":
            waits.append(Wait("calls", (key,), targets, certain=False))
    return waits


def _key_of(call: Call, actors: Mapping[str, Actor]) -> str:
    return call.actor_id if call.actor_id in actors else f"task:{call.task_id}"


def _submitter(call: Call, job: Job, actors: Mapping[str, Actor], tasks: Mapping[str, Call]) -> str:
    """Return the key of the process that has submitted a call; the driver if its threads are not known to Ray."""
    if f"task:{call.parent}" != "task:" and call.parent in tasks:
        return _key_of(tasks[call.parent], actors)
    actor_id = call.parent[16:48]
    return actor_id if actor_id in actors else driver_key(job.job_id)

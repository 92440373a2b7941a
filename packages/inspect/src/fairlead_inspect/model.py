# SPDX-License-Identifier: Apache-2.0
"""The values of a snapshot of a cluster: jobs, processes, actors, calls, worker sets and findings. All are frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Confidence = Literal["certain", "likely", "guess"]


@dataclass(frozen=True)
class Evidence:
    """A fact behind a statement, where it is from, and how many seconds old it is; None if it has no age."""

    source: str
    text: str
    age_s: float | None = None


@dataclass(frozen=True)
class Frame:
    """A Python frame: the path of its file, its function with the class, and the line, 0 where it does not matter."""

    file: str
    function: str
    line: int


Stack = tuple[Frame, ...]


@dataclass(frozen=True)
class Reference:
    """An object that a thread waits for, in `ray.get`, or with others in `ray.wait` until `any` of them is there.

    Who `polls` has a short timeout, and soon goes on without it.
    """

    object_id: str
    any: bool = False
    polls: bool = False


@dataclass(frozen=True)
class Request:
    """A wait inside of a function of Fairlead: what it wants and lacks, for how long it has waited, and the limit."""

    function: str
    wants: str = ""
    lacks: str = ""
    since_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True)
class Thread:
    """A thread of a process at two moments: counts are between them, and None if unknown, as is when it ran last.

    `stack` is of the later one, innermost frame first, and `before` of the earlier one, None if it was not read then.
    `waits_inside` says whether the innermost line waits for a device or another rank in native code, and `waits_on`
    what it waits for in the kernel, such as "time.sleep" or "10.0.0.9:443". It waits for the `references`, and for
    further objects, as many as `unread`, whose ids could not be read; `request` is what it waits for in Fairlead.
    """

    tid: int
    name: str = ""
    stack: Stack = ()
    before: Stack | None = None
    states: tuple[str, str] = ("S", "S")
    ticks: int | None = None
    switches: int | None = None
    last_ran_s: float | None = None
    waits_inside: bool = False
    references: tuple[Reference, ...] = ()
    unread: int = 0
    waits_on: str = ""
    request: Request | None = None


@dataclass(frozen=True)
class Child:
    """A process that a worker has started: states at both moments, CPU ticks between them, where it stands, since when.

    Stacks of children are read only where the worker stands in code that waits for a child.
    """

    pid: int
    title: str
    states: tuple[str, str] = ("S", "S")
    ticks: int = 0
    stack: Stack = ()
    waits_on: str = ""
    since_s: float | None = None


@dataclass(frozen=True)
class Record:
    """The collectives of a process on one communicator, which all its members number in the same order.

    `begun` is the number of the last one that it has begun, and `operation` its name; `done` is that of the last one
    that is over. `size` counts the members, or is 0. `sends` says whether a send or receive is open. The record is
    `age_s` old, and for `stood_s` before it nothing was begun on any communicator.
    """

    source: str
    group: str
    size: int
    begun: int
    done: int
    operation: str = ""
    sends: bool = False
    age_s: float = 0.0
    stood_s: float = 0.0


@dataclass(frozen=True)
class Process:
    """A process as the kernel and py-spy see it at two moments, `window_s` apart.

    `ticks` are the CPU ticks of all its threads between them, `environ` has allowed variables only, `note` says why
    there are no stacks, and `file` names the function of the kernel that a wait for a disk is in. `records` says which
    collectives it has begun, where that is recorded.
    """

    node_id: str
    pid: int
    title: str = ""
    states: tuple[str, str] = ("S", "S")
    ticks: int = 0
    window_s: float = 1.0
    threads: tuple[Thread, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict, hash=False)
    children: tuple[Child, ...] = ()
    memory_bytes: int = 0
    note: str = ""
    file: str = ""
    records: tuple[Record, ...] = ()


@dataclass(frozen=True)
class Death:
    """Why an actor is dead; `intended` if by `ray.kill`, a dropped handle or the end of a job."""

    cause: str
    intended: bool
    at: float


@dataclass(frozen=True)
class Call:
    """A call or task, from Ray's task events: when it began, or else was submitted, and when it `ended` if it has.

    `parent` is the task that has submitted it. A task requests `resources`, and `environment` lists what its runtime
    environment installs.
    """

    task_id: str
    name: str
    actor_id: str = ""
    state: str = ""
    began: float = 0.0
    pid: int = 0
    node_id: str = ""
    parent: str = ""
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    environment: tuple[str, ...] = ()
    ended: float | None = None


@dataclass(frozen=True)
class Actor:
    """An actor in the tables of Ray's head: `owner` is the worker id of its creator, `module` that of its class.

    `environment` lists what its runtime environment installs.
    """

    actor_id: str
    class_name: str
    job_id: str
    state: str = "ALIVE"
    name: str = ""
    namespace: str = ""
    node_id: str = ""
    pid: int = 0
    worker_id: str = ""
    owner: str = ""
    created: float = 0.0
    death: Death | None = None
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    environment: tuple[str, ...] = ()
    module: str = ""


@dataclass(frozen=True)
class Reservation:
    """A placement group that Ray has not placed: who made it ("" for the driver), when, and Ray's reason.

    `bundles` says what it holds, for people.
    """

    group_id: str
    job_id: str
    name: str = ""
    creator: str = ""
    reason: str = ""
    bundles: str = ""
    requested: float = 0.0

    @property
    def label(self) -> str:
        """How people call it."""
        return f"placement group {self.name or self.group_id[:8]} ({self.bundles})"


@dataclass(frozen=True)
class Node:
    """A node, how it answered, and all resources that it has, free or not.

    The answer is "unasked" if it holds no process of the job.
    """

    node_id: str
    address: str = ""
    alive: bool = True
    answer: Literal["answered", "silent", "lost", "unasked"] = "answered"
    note: str = ""
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Job:
    """A job that has not ended, and its driver."""

    job_id: str
    entrypoint: str = ""
    pid: int = 0
    node_id: str = ""
    worker_id: str = ""


@dataclass(frozen=True)
class Member:
    """An actor of a worker set: its id, its rank if known, where that is from, its number by creation, coordinates."""

    key: str
    rank: int | None = None
    ordinal: int = 0
    source: str = ""
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """How people call it in its worker set."""
        return f"#{self.ordinal}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class WorkerSet:
    """Actors that do the same work, the rule that found them, and how sure that is.

    `disputed` says why its ranks cannot be: two members have one, or one is beyond the world size.
    """

    name: str
    job_id: str
    rule: str
    confidence: Confidence
    members: tuple[Member, ...]
    world_size: int | None = None
    disputed: str = ""

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks below the world size that no member has, if the ranks of all members are known."""
        ranks = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.world_size or 0) if rank not in ranks) if None not in ranks else ()


@dataclass(frozen=True)
class Snapshot:
    """All that `look` has seen, as plain values that can be pickled.

    Attributes:
        looked_at: when, in seconds since the epoch.
        jobs: the jobs that had not ended.
        actors: their actors.
        processes: their processes, as the kernel and py-spy know them.
        nodes: the nodes, and how they answered.
        calls: the calls and tasks that had not finished.
        reservations: the placement groups that Ray had not placed.
        launches: how many nodes an autoscaler was starting.
        partial: whether only one machine was looked at, so that others may have more processes.
        finished: when tasks ended, in seconds since the epoch, by their ids.
        labels: what Fairlead's groups say of actors, by their ids: `rank`, `group`, `world_size`, `coords`, `waiting`
            (whether it waits for other members) and `step`.
        took_s: how many seconds that took.
        notes: what could not be read, and why.
    """

    looked_at: float
    jobs: tuple[Job, ...] = ()
    actors: tuple[Actor, ...] = ()
    processes: tuple[Process, ...] = ()
    nodes: tuple[Node, ...] = ()
    calls: tuple[Call, ...] = ()
    finished: Mapping[str, float] = field(default_factory=dict, hash=False)
    labels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    took_s: float = 0.0
    notes: tuple[str, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    launches: int = 0
    partial: bool = False


@dataclass(frozen=True)
class Named:
    """An actor in a finding: Ray's id of it, hexadecimal, its class, and its name, or ""."""

    id: str
    class_name: str
    name: str


@dataclass(frozen=True)
class Waiting:
    """The processes that wait for the same one: how many, the ranks that are known, and the `ordinals` of the others.

    They wait at the frames `where`, innermost first, for `since_s` seconds; None if that is not known.
    """

    count: int = 0
    ranks: tuple[int, ...] = ()
    ordinals: tuple[int, ...] = ()
    where: Stack = ()
    since_s: float | None = None


@dataclass(frozen=True)
class StackClass:
    """Processes of one worker set, or else one class, that stand at the same place, the frames `where`.

    `does` says what they do there, such as "collective" or "ray-get". A rank is a number, "#2" if only its place in the
    creation is known, or "".
    """

    worker_set: str
    does: str
    ranks: tuple[str, ...]
    pids: tuple[int, ...]
    where: Stack


@dataclass(frozen=True)
class Suspect:
    """A process that may be what a job waits for, if none is known to be; `text` says why it is not called the cause.

    It stands at the frames `where` for `since_s` seconds, None if that is not known, and `since_source` says what tells
    so. A `pid` of 0 is not known.
    """

    name: str
    pid: int = 0
    node: str = ""
    where: Stack = ()
    since_s: float | None = None
    text: str = ""
    since_source: str = ""


Kind = Literal[
    "dead", "stopped", "node-lost", "node-silent", "pending", "missing", "deadlock",
    "late", "disk", "working", "mismatch", "together", "undecided", "driver",
]  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A statement about a job.

    Attributes:
        kind: what was found, such as "late" or "dead"; the reference of the command line lists all.
        job_id: the job.
        confidence: how sure the blame, or the statement, is: "certain", "likely" or "guess".
        rank_confidence: how sure the ranks are; None if it names none.
        blames: whether it names the cause of a wait.
        text: the statement in words.
        subject: what it is about, if that is not a process, such as a placement group.
        worker_set: the worker set that it is about.
        ranks: the ranks that it is about.
        ordinals: whom it is about without a rank, by their creation.
        actors: the actors that it is about.
        task: the task that it is about, if it is one.
        pid: the process, if it is one.
        node: the address of its node.
        where: the frames at which that stands, innermost first.
        since_s: for how long, in seconds; None if that is not known.
        since_source: what says so.
        limit_s: the seconds after which it is late, or gives up; None if there is no limit, or it does not matter.
        waiting: who waits for it.
        chain: the waits that lead to it.
        evidence: the facts behind it.
        remedy: what to do; empty if that depends on the job.
        moves: whether it may still make progress.
        suspects: if none is blamed, processes that may be the cause, in the order that the reference gives.
    """

    kind: Kind
    job_id: str
    confidence: Confidence = "likely"
    blames: bool = False
    text: str = ""
    worker_set: str = ""
    ranks: tuple[int, ...] = ()
    ordinals: tuple[int, ...] = ()
    actors: tuple[Named, ...] = ()
    pid: int = 0
    node: str = ""
    where: Stack = ()
    since_s: float | None = None
    since_source: str = ""
    waiting: Waiting = Waiting()
    chain: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    moves: bool = False
    subject: str = ""
    rank_confidence: Confidence | None = None
    task: str = ""
    suspects: tuple[Suspect, ...] = ()
    limit_s: float | None = None

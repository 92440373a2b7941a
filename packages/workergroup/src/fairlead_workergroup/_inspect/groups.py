# SPDX-License-Identifier: Apache-2.0
"""The groups that are registered at the node agents, and what their workers are doing."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fairlead_placement.spi import (
    Agent,
    group_pairs,
    read_boards,
    run_on_agents,
)
from fairlead_sharding import NamedSharding

from .._head import alive_nodes, find_agents, process_is_alive
from .._membership.judge import Evidence, decide
from .._membership.model import WorkerProcess
from .._observe.evidence import read_deaths
from .._observe.registration import KEY, SCHEMA, Registration
from .._observe.status import State, state_of
from .._remote.outside import look_at_process, look_from_outside
from ..exceptions import WorkerGroupError

# Agents answer in milliseconds; those of a node that hangs do not.
ANSWER_S = 5.0
# How many digits of an id are shown. Fewer of them may belong to any group.
SHOWN_DIGITS = 6


@dataclass(frozen=True)
class RegisteredWorker:
    """One worker of a group, as its group has published it."""

    rank: int
    name: str
    coords: Mapping[str, int]
    node_id: str
    address: str
    pid: int  # 0 until it has started
    started: int
    incarnation: int  # how often its rank has been started before
    restarts: int  # how often of these because it was lost
    actor_id: str  # empty before there is one
    mark: str  # what finds its process while it starts
    actor_name: str = ""
    tied_rank: int = 0  # its number in its tied group


@dataclass(frozen=True)
class RegisteredGroup:
    """A group, as it has published itself."""

    group_id: str
    name: str
    class_name: str
    shape: Mapping[str, int]
    layout: Mapping[str, Any]  # as in `NamedSharding.to_dict`
    created: float  # in seconds since the epoch by its driver's clock
    namespace: str
    epoch: int
    driver: Mapping[str, Any]  # the `job_id`, `worker_id`, `node_id`, `host`, `pid` and `started` of its process
    members: tuple[RegisteredWorker, ...]  # by ascending rank, without the workers of lost nodes
    agents: Mapping[str, Agent] = field(default_factory=dict)
    publication: int = 0
    settled: bool = True  # whether all nodes have the latest publication, and every rank is among its members
    lane: bool = False  # whether the workers serve nobody but their driver at present
    methods: Mapping[str, Any] = field(default_factory=dict)  # empty if the driver's node did not answer

    @cached_property
    def sharding(self) -> NamedSharding:
        """The axes over its ranks."""
        return NamedSharding.from_dict(self.layout)

    @property
    def label(self) -> str:
        """The name, with enough of the id to tell it from other groups of that name."""
        return f"{self.name} ({self.group_id[:SHOWN_DIGITS]})"


@dataclass(frozen=True)
class SeenWorker:
    """What one worker was doing when it was looked at; what is not known is empty or 0."""

    rank: int
    coords: Mapping[str, int]
    node_id: str = ""
    address: str = ""
    pid: int = 0
    incarnation: int = 0
    restarts: int = 0
    state: State = "unknown"
    stopped: bool = False  # by SIGSTOP
    method: str | None = None
    running_s: float = 0.0
    since_progress_s: float = 0.0
    calls: int = 0
    waiting: bool = False  # whether it is in `current_worker().waiting()`
    step: int | None = None
    message: str = ""
    memory_bytes: int = 0
    stacks: str = ""  # if they were requested; empty for an idle worker
    note: str = ""  # why something is not known, or what it died of


@dataclass(frozen=True)
class SeenGroup:
    """A group and what its workers were doing when they were looked at."""

    group: RegisteredGroup
    workers: tuple[SeenWorker, ...]
    driver: str  # "runs", "stopped" (SIGSTOP), or "gone"
    age_s: float

    def count(self, *states: str) -> int:
        """Return how many workers are in one of these states."""
        return sum(worker.state in states for worker in self.workers)


def find_groups() -> list[RegisteredGroup]:
    """Return every group of every job, in the order in which they were made."""
    return merge_boards(read_boards(find_agents(), timeout_s=ANSWER_S))


def find_group(name: str | None) -> RegisteredGroup:
    """Return the group with a name, else the group whose id begins with at least `SHOWN_DIGITS` digits."""
    groups = find_groups()
    chosen = [one for one in groups if name in (None, one.name)]
    if not chosen and len(name or "") >= SHOWN_DIGITS:
        chosen = [one for one in groups if one.group_id.startswith(name or "")]
    if len(chosen) == 1:
        return chosen[0]
    labels = ", ".join(one.label for one in groups)
    if not groups:
        raise WorkerGroupError("No worker group is registered on this cluster.")
    if not chosen:
        raise WorkerGroupError(f"There is no group {name!r}. These are there: {labels}.")
    raise WorkerGroupError(f"Choose one of several groups (--group), by its name or the id in brackets: {labels}.")


def read_group(group_id: str, job_id: str, *, within_s: float) -> RegisteredGroup | None:
    """Return a group as it is published now; None if no agent of its job has it.

    It waits up to `within_s` for the latest publication on all of its nodes, and then takes what each node has.
    """
    deadline = time.monotonic() + within_s
    while True:
        agents = [agent for agent in find_agents() if agent.job_id == job_id]
        groups = merge_boards(read_boards(agents, timeout_s=ANSWER_S))
        found = next((one for one in groups if one.group_id == group_id), None)
        if (found is not None and found.settled) or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


def find_own_group(registration: Registration | None) -> RegisteredGroup:
    """Return a group of this process, as it has published itself last."""
    published = {} if registration is None else registration.published
    job = next((value["driver"]["job_id"] for value in published.values()), "")
    agents = {agent.node_id: agent for agent in find_agents() if agent.job_id == job}
    values = {agents[node_id]: value for node_id, value in published.items() if node_id in agents}
    if registration is None or not values:
        raise WorkerGroupError("The group is not registered, because none of the agents of its nodes is there.")
    return merge_boards({agent: {registration.key: value} for agent, value in values.items()})[0]


def merge_boards(boards: Mapping[Agent, Mapping[str, Any] | Exception]) -> list[RegisteredGroup]:
    """Return the groups from what is published at each agent. Pure.

    The nodes of a group may have received different versions: of each worker the latest is taken.
    """
    found: dict[str, list[tuple[Agent, dict[str, Any]]]] = {}
    for agent, board in boards.items():
        for key, value in board.items() if not isinstance(board, Exception) else ():
            if key.startswith(KEY) and value.get("schema") == SCHEMA:
                found.setdefault(key, []).append((agent, value))
    groups = []
    for published in found.values():
        published.sort(key=lambda one: one[1]["publication"])
        members = {row["rank"]: RegisteredWorker(**row) for _, value in published for row in value["members"]}
        latest = published[-1][1]
        size = math.prod(latest["shape"].values())  # a node may not have heard yet that its ranks have left
        groups.append(
            RegisteredGroup(
                group_id=latest["id"],
                class_name=latest["class"],
                members=tuple(members[rank] for rank in sorted(members) if rank < size),
                agents={agent.node_id: agent for agent, _ in published},
                settled=len({value["publication"] for _, value in published}) == 1 and len(members) == size,
                methods=next((value["methods"] for _, value in published if "methods" in value), {}),
                **{name: latest[name] for name in _PUBLISHED},
            )
        )
    return sorted(groups, key=lambda one: (one.created, one.group_id))


# The fields of a group that are published by their own names.
_PUBLISHED = ("name", "shape", "layout", "created", "namespace", "epoch", "driver", "publication", "lane")


def look_at_groups(
    groups: Sequence[RegisteredGroup], *, stuck_after_s: float, dump: bool = False, ranks: Iterable[int] | None = None
) -> list[SeenGroup]:
    """Look at the workers of groups, or some of one group, with one request to each agent; `dump` adds stacks."""
    chosen = None if ranks is None else frozenset(ranks)
    asked = group_pairs(
        (group.agents[member.node_id], (group.group_id, member))
        for group in groups
        for member in group.members
        if (chosen is None or member.rank in chosen) and member.node_id in group.agents
    )
    arguments = {
        agent: ([(one.pid, one.started, one.mark) for _, one in there], stuck_after_s, dump)
        for agent, there in asked.items()
    }
    answers = run_on_agents(look_from_outside, arguments, timeout_s=ANSWER_S)
    rows: dict[tuple[str, int], dict[str, Any] | str] = {}
    for agent, there in asked.items():
        answer = answers[agent]
        for at, (group_id, one) in enumerate(there):
            rows[group_id, one.rank] = _first_line(answer) if isinstance(answer, Exception) else answer[at]
    living, jobs = alive_nodes(), {group.driver["job_id"] for group in groups}
    causes = read_deaths(jobs)
    seen = []
    for group in groups:
        workers = tuple(
            _see(group, rank, rows.get((group.group_id, rank)), living, causes[group.driver["job_id"]])
            for rank in range(group.sharding.size)
            if chosen is None or rank in chosen
        )
        seen.append(SeenGroup(group, workers, _see_driver(group), max(0.0, time.time() - group.created)))
    return seen


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _see(
    group: RegisteredGroup,
    rank: int,
    row: dict[str, Any] | str | None,
    living: frozenset[str],
    causes: Mapping[str, str],
) -> SeenWorker:
    member = next((one for one in group.members if one.rank == rank), None)
    if member is None:
        coords = group.sharding.get_worker_coords(rank)
        return SeenWorker(
            rank, coords, state="dead", note="No agent knows it: its node is lost, or its agent has ended."
        )
    worker = SeenWorker(rank, **{name: getattr(member, name) for name in _REGISTERED})
    process = WorkerProcess(rank, member.coords, member.node_id, member.address, member.pid, member.started)
    evidence = []
    if member.node_id not in living:
        evidence.append(Evidence("node", "gone", "node-lost", "Its node is lost."))
    if member.actor_id in causes:
        evidence.append(Evidence("actor-state", "gone", text=causes[member.actor_id]))
    if isinstance(row, dict) and row["gone"] and not row["missing"]:
        evidence.append(Evidence("process", "gone", text="Its process has ended."))
    if (verdict := decide(process, evidence)).is_lost:
        return replace(worker, state="dead", note=verdict.cause)
    if row is None or isinstance(row, str):
        return replace(worker, note=row or "The agent of its node has ended.")
    if row["missing"]:
        return replace(worker, state="starting", note="Its process has not started.")
    state = state_of(False, row)
    return replace(
        worker,
        # A worker whose process starts has no record yet.
        state="starting" if state == "unknown" and member.pid == 0 else state,
        stopped=row["process"] == "T",
        pid=row["pid"],
        memory_bytes=row["rss_bytes"],
        stacks=row["stacks"],
        note=row["note"],
        **{name: row[name] for name in _RECORDED if name in row},
    )


# What a worker is shown with from its registration, and from its record.
_REGISTERED = ("coords", "node_id", "address", "pid", "incarnation", "restarts")
_RECORDED = ("method", "running_s", "since_progress_s", "calls", "waiting", "step", "message")


def _see_driver(group: RegisteredGroup) -> str:
    driver = group.driver
    if process_is_alive(driver["worker_id"]) is False:
        return "gone"
    agent = group.agents.get(driver["node_id"])
    if agent is None:
        return "runs"
    asked = {agent: (driver["pid"], driver["started"], driver["host"])}
    state = run_on_agents(look_at_process, asked, timeout_s=ANSWER_S)[agent]
    return "stopped" if state == "T" else "runs"

# SPDX-License-Identifier: Apache-2.0
"""The activity of the workers of registered groups, read from the agents of their nodes."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairlead_placement.spi import group_pairs, run_on_agents
from fairlead_workergroup import spi

# Agents answer in milliseconds; those of a node that hangs do not.
ANSWER_S = 5.0


@dataclass(frozen=True)
class SeenWorker:
    """The activity of one worker at one moment. A field that is not known is empty or 0."""

    rank: int
    coords: Mapping[str, int]
    node_id: str = ""
    address: str = ""
    pid: int = 0
    incarnation: int = 0
    restarts: int = 0
    state: spi.State = "unknown"
    stopped: bool = False  # by SIGSTOP
    method: str | None = None
    running_s: float = 0.0
    since_progress_s: float = 0.0
    calls: int = 0
    waiting: bool = False  # whether it is in `current_worker().waiting()`
    step: int | None = None
    message: str = ""
    weights: int | None = None  # the version that a link has put into place last
    weights_age_s: float = 0.0
    memory_bytes: int = 0
    stacks: str = ""  # if they were requested; empty for an idle worker
    note: str = ""  # why something is not known, or what it died of


@dataclass(frozen=True)
class SeenGroup:
    """A group and what its workers were doing when they were looked at."""

    group: spi.RegisteredGroup
    workers: tuple[SeenWorker, ...]
    driver: str  # "runs", "stopped" (SIGSTOP), or "gone"
    age_s: float

    def count(self, *states: str) -> int:
        """Return how many workers are in one of these states."""
        return sum(worker.state in states for worker in self.workers)


def look_at_groups(
    groups: Sequence[spi.RegisteredGroup],
    *,
    stuck_after_s: float,
    dump: bool = False,
    ranks: Iterable[int] | None = None,
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
    answers = run_on_agents(spi.look_from_outside, arguments, timeout_s=ANSWER_S)
    rows: dict[tuple[str, int], dict[str, Any] | str] = {}
    for agent, there in asked.items():
        answer = answers[agent]
        for at, (group_id, one) in enumerate(there):
            rows[group_id, one.rank] = _first_line(answer) if isinstance(answer, Exception) else answer[at]
    living, jobs = spi.alive_nodes(), {group.driver["job_id"] for group in groups}
    causes = spi.read_deaths(jobs)
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
    group: spi.RegisteredGroup,
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
    process = spi.WorkerProcess(rank, member.coords, member.node_id, member.address, member.pid, member.started)
    evidence = []
    if member.node_id not in living:
        evidence.append(spi.Evidence("node", "gone", "node-lost", "Its node is lost."))
    if member.actor_id in causes:
        evidence.append(spi.Evidence("actor-state", "gone", text=causes[member.actor_id]))
    if isinstance(row, dict) and row["gone"] and not row["missing"]:
        evidence.append(spi.Evidence("process", "gone", text="Its process has ended."))
    if (verdict := spi.decide(process, evidence)).is_lost:
        return replace(worker, state="dead", note=verdict.cause)
    if row is None or isinstance(row, str):
        return replace(worker, note=row or "The agent of its node has ended.")
    if row["missing"]:
        return replace(worker, state="starting", note="Its process has not started.")
    state = spi.state_of(False, row)
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
_RECORDED = (
    "method",
    "running_s",
    "since_progress_s",
    "calls",
    "waiting",
    "step",
    "message",
    "weights",
    "weights_age_s",
)


def _see_driver(group: spi.RegisteredGroup) -> str:
    driver = group.driver
    if spi.process_is_alive(driver["worker_id"]) is False:
        return "gone"
    agent = group.agents.get(driver["node_id"])
    if agent is None:
        return "runs"
    asked = {agent: (driver["pid"], driver["started"], driver["host"])}
    state = run_on_agents(spi.look_at_process, asked, timeout_s=ANSWER_S)[agent]
    return "stopped" if state == "T" else "runs"

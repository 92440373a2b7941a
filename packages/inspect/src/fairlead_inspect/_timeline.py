# SPDX-License-Identifier: Apache-2.0
"""The latest calls of a group by one clock, read from the agents of its nodes while its workers run."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fairlead_placement.spi import Agent, compare_clocks, group_pairs, run_on_agents
from fairlead_workergroup import GroupHandle, RayWorkerGroup
from fairlead_workergroup.spi import RegisteredGroup, RegisteredWorker, publication_of, read_members

from ._groups import ANSWER_S
from ._remote.outside import read_clock, read_requests, read_timelines

# How far the clock of an agent is ahead of the one of this process, and the error; None if it did not answer.
Clocks = Mapping[Agent, tuple[float, float] | None]
# A running call: the rank and incarnation of its worker, and its number there.
CallKey = tuple[int, int, int]


@dataclass(frozen=True)
class Span:
    """One call of a worker, by the clock of this process."""

    number: int  # counted by the worker
    method: str
    start: float
    end: float | None  # None while it runs
    waited_s: float = 0.0  # for other workers, as far as that is marked
    failed: bool = False
    task: bytes = b""  # identifies the request among those of the worker
    weights: int | None = None  # the version of the weights at its start; None without one


@dataclass(frozen=True)
class Request:
    """One call that the driver has made, or something else that it has done with the group."""

    method: str  # or what was done or lost; a loss is a moment and no call
    start: float  # by the clock of this process
    end: float | None  # when its caller had the results; None without a wait for it, or until then
    failed: bool
    workers: int  # how many were called; 0 if it is no call
    tasks: tuple[bytes, ...]  # of the first of them

    @property
    def is_moment(self) -> bool:
        """Whether it is the loss of a worker."""
        return not self.workers and self.start == self.end


@dataclass(frozen=True)
class WorkerTimeline:
    """The latest calls of one worker."""

    worker: RegisteredWorker
    spans: tuple[Span, ...]  # in the order in which they ended; the one that runs is the last
    steps: tuple[tuple[float, int], ...]  # the steps that it reported, each with the time
    error_s: float  # by how much its times may be wrong against those of other nodes


@dataclass(frozen=True)
class Timeline:
    """The latest calls of a group, by the clock of this process."""

    group: RegisteredGroup
    workers: tuple[WorkerTimeline, ...]  # those that could be read, by rank
    requests: tuple[Request, ...]  # of the driver; empty if its node has no agent
    read_at: float
    error_s: float  # by how much the times of the driver may be wrong

    def find_calls(self) -> dict[CallKey, tuple[float, float]]:
        """Return the earliest and latest moment of each running call; they are equal for a call of all workers."""
        of_all = {one.start for one in self.requests if one.workers == self.group.sharding.size}
        made = {task: one.start for one in self.requests for task in one.tasks}
        found = {}
        for one in self.workers:
            for span in one.spans:
                if span.end is None:
                    latest = made.get(span.task, span.start + one.error_s + self.error_s)
                    key = one.worker.rank, one.worker.incarnation, span.number
                    found[key] = (latest if latest in of_all else -math.inf, latest)
        return found


def read_own_timeline(group: RayWorkerGroup | GroupHandle) -> Timeline:
    """Read what a group that this process has made, or has a handle of, has done lately."""
    read_members(group)
    return read_timeline(publication_of(group)())


def read_timeline(group: RegisteredGroup) -> Timeline:
    """Read what a group has done lately. Nodes that do not answer are left out."""
    there = [member for member in group.members if member.node_id in group.agents and member.pid]
    by_node = group_pairs((member.node_id, member) for member in there)
    driver = group.driver
    agents = [group.agents[node_id] for node_id in {*by_node, driver["node_id"]} & set(group.agents)]
    clocks = {agent: _compare_clock(agent) for agent in agents}
    asked = {group.agents[node]: ([(one.pid, one.started) for one in there],) for node, there in by_node.items()}
    answers = run_on_agents(read_timelines, asked, timeout_s=ANSWER_S)
    workers = []
    for node_id, members in by_node.items():
        answer, clock = answers[group.agents[node_id]], clocks.get(group.agents[node_id])
        if isinstance(answer, Exception) or clock is None:
            continue
        at, error_s = -clock[0], clock[1]
        for member, row in zip(members, answer, strict=True):
            if row is None:
                continue
            spans = [
                Span(number, method, start + at, end + at, waited, failed, task, weights)
                for number, method, start, end, waited, failed, task, weights in row["calls"]
            ]
            if row["running"] is not None:
                number, method, start, task, weights = row["running"]
                spans.append(Span(number, method, start + at, None, task=task, weights=weights))
            steps = tuple((when + at, step) for when, step in row["steps"])
            workers.append(WorkerTimeline(member, tuple(spans), steps, error_s))
    workers.sort(key=lambda one: one.worker.rank)
    requests, of_driver_s = _read_requests(group, clocks)
    return Timeline(group, tuple(workers), requests, time.monotonic(), of_driver_s)


def _compare_clock(agent: Agent) -> tuple[float, float] | None:
    return compare_clocks(lambda: run_on_agents(read_clock, {agent: ()}, timeout_s=ANSWER_S)[agent], time.monotonic)


def _read_requests(group: RegisteredGroup, clocks: Clocks) -> tuple[tuple[Request, ...], float]:
    driver = group.driver
    agent = group.agents.get(driver["node_id"])
    if agent is None or (clock := clocks.get(agent)) is None:
        return (), 0.0
    ask = (driver["pid"], driver["started"], driver["host"], group.group_id)
    answer = run_on_agents(read_requests, {agent: ask}, timeout_s=ANSWER_S)[agent]
    if isinstance(answer, Exception):
        return (), 0.0
    ahead_s, error_s = clock
    requests = tuple(
        Request(method, start - ahead_s, end - ahead_s if end else None, failed, count, tuple(tasks))
        for start, end, failed, count, method, tasks in answer
    )
    return requests, error_s

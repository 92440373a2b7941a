# SPDX-License-Identifier: Apache-2.0
"""What a group has done lately, by one clock: read from the agents of its nodes while its driver and workers run."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fairlead_placement.spi import Agent, compare_clocks, group_pairs, run_on_agents

from .._remote.outside import read_clock, read_requests, read_timelines
from .groups import ANSWER_S, RegisteredGroup, RegisteredWorker

# How far the clock of an agent is ahead of the one of this process, and the error; None if it did not answer.
Clocks = Mapping[Agent, tuple[float, float] | None]
# A running call: the rank and incarnation of its worker, and its number there.
CallKey = tuple[int, int, int]


@dataclass(frozen=True)
class Span:
    """One call of a worker.

    Attributes:
        number: the number of the call, counted by the worker.
        start: when it began, by the clock of this process.
        end: when it ended; None if it still runs.
        waited_s: how long it waited for other workers, as far as that is marked.
        task: identifies the request among those of the worker.
    """

    number: int
    method: str
    start: float
    end: float | None
    waited_s: float = 0.0
    failed: bool = False
    task: bytes = b""


@dataclass(frozen=True)
class Request:
    """One call that the driver has made, or something else that it has done with the group.

    Attributes:
        method: the method, or what was done; of a loss, which is a moment and no call, what was lost.
        start: when it was made, by the clock of this process.
        end: when its caller had the results; None if that is not so, or nobody waited for it.
        workers: how many workers were called; 0 if it is no call.
        tasks: what the first of them were asked.
    """

    method: str
    start: float
    end: float | None
    failed: bool
    workers: int
    tasks: tuple[bytes, ...]

    @property
    def is_moment(self) -> bool:
        """Whether it is the loss of a worker."""
        return not self.workers and self.start == self.end


@dataclass(frozen=True)
class WorkerTimeline:
    """What one worker has done lately: its calls in the order in which they ended, with the one that runs as the last.

    Each reported step has its time. The times may be wrong by `error_s` against those of other nodes.
    """

    worker: RegisteredWorker
    spans: tuple[Span, ...]
    steps: tuple[tuple[float, int], ...]
    error_s: float


@dataclass(frozen=True)
class Timeline:
    """What a group has done lately: the workers that could be read, by rank, and the calls of the driver.

    The calls are missing without an agent on its node, and their times may be wrong by `error_s`. `read_at` is by the
    clock of this process.
    """

    group: RegisteredGroup
    workers: tuple[WorkerTimeline, ...]
    requests: tuple[Request, ...]
    read_at: float
    error_s: float

    def find_calls(self) -> dict[CallKey, tuple[float, float]]:
        """Return the earliest and the latest moment at which the driver can have made each running call.

        They are equal for a call of all workers in the driver's log, also when it was repeated. They do not tell a call
        of some workers from later ones, which were not sent to the same workers.
        """
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
                Span(number, method, start + at, end + at, waited, failed, task)
                for number, method, start, end, waited, failed, task in row["calls"]
            ]
            if row["running"] is not None:
                number, method, start, task = row["running"]
                spans.append(Span(number, method, start + at, None, task=task))
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

# SPDX-License-Identifier: Apache-2.0
"""The groups of all jobs as they are published at the node agents, read from any process of the cluster."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fairlead_placement.extension import Agent, read_boards
from fairlead_sharding import NamedSharding

from ..exceptions import WorkerGroupError
from .head import find_agents, process_is_alive
from .registration import KEY, SCHEMA

# Agents answer in milliseconds; those of a node that hangs do not.
ANSWER_S = 5.0
# A process publishes within this time what an agent that has died had.
PUBLISHED_AGAIN_S = 20.0
# How many digits of an id are shown. Fewer of them may belong to any group.
SHOWN_DIGITS = 6


@dataclass(frozen=True)
class RegisteredWorker:
    """One worker of a group, as its group has published it.

    Attributes:
        rank: its number in the group.
        name: its name.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        address: the address of its node.
        pid: its process; 0 until it has started.
        started: the start tick of the process.
        incarnation: how often its rank has been started before.
        restarts: how often of these because it was lost.
        actor_id: Ray's id of its actor; empty before there is one.
        mark: finds its process while it starts.
        actor_name: the name of its actor.
        tied_rank: its number in its tied group.
    """

    rank: int
    name: str
    coords: Mapping[str, int]
    node_id: str
    address: str
    pid: int
    started: int
    incarnation: int
    restarts: int
    actor_id: str
    mark: str
    actor_name: str = ""
    tied_rank: int = 0


@dataclass(frozen=True)
class RegisteredGroup:
    """A group, as it has published itself.

    Attributes:
        group_id: identifies it among all groups.
        name: its name.
        class_name: the name of its workers' class.
        shape: the sizes of its axes.
        layout: the axes as plain data, as in `NamedSharding.to_dict`.
        created: in seconds since the epoch by its driver's clock.
        namespace: Ray's namespace of its actors.
        epoch: the number of changes of membership so far.
        driver: the `job_id`, `worker_id` and `node_id` of its process.
        members: its workers by ascending rank, without those of lost nodes.
        agents: the agent of each of its nodes, by Ray's id of the node.
        publication: the number of the latest publication.
        settled: whether all nodes have that publication, and every rank is among its members.
        methods: the class as plain data; empty if the driver's node did not answer.
    """

    group_id: str
    name: str
    class_name: str
    shape: Mapping[str, int]
    layout: Mapping[str, Any]
    created: float
    namespace: str
    epoch: int
    driver: Mapping[str, Any]
    members: tuple[RegisteredWorker, ...]
    agents: Mapping[str, Agent] = field(default_factory=dict)
    publication: int = 0
    settled: bool = True
    methods: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sharding(self) -> NamedSharding:
        """The axes over its ranks."""
        return NamedSharding.from_dict(self.layout)

    @property
    def label(self) -> str:
        """The name, with enough of the id to tell it from other groups of that name."""
        return f"{self.name} ({self.group_id[:SHOWN_DIGITS]})"


def find_groups(*, timeout_s: float = ANSWER_S) -> list[RegisteredGroup]:
    """Return every group of every job, in the order in which they were made.

    Args:
        timeout_s: seconds for the answers of the agents. Those that do not answer in time are left out.
    """
    return merge_boards(read_boards(find_agents(), timeout_s=timeout_s))


def find_group(name: str) -> RegisteredGroup:
    """Return the group with a name, else the group whose id begins with at least `SHOWN_DIGITS` digits."""
    groups = find_groups()
    chosen = [one for one in groups if name == one.name]
    if not chosen and len(name) >= SHOWN_DIGITS:
        chosen = [one for one in groups if one.group_id.startswith(name)]
    if len(chosen) == 1:
        return chosen[0]
    labels = ", ".join(one.label for one in groups)
    if not groups:
        raise WorkerGroupError("No worker group is registered on this cluster.")
    if not chosen:
        raise WorkerGroupError(f"There is no group {name!r}. These are there: {labels}.")
    raise WorkerGroupError(f"Choose one of several groups, by its name or the id in brackets: {labels}.")


def read_group(group_id: str, job_id: str, worker_id: str, *, within_s: float) -> RegisteredGroup | None:
    """Return a group as it is published now; None if no agent of its job has it.

    It waits up to `within_s` for the latest publication on all of its nodes, and then takes what each node has. If all
    agents of the job have died, and not the process that made the group, it waits until the group is published again.
    """
    deadline, has_looked = time.monotonic() + within_s, False
    while True:
        agents = [agent for agent in find_agents() if agent.job_id == job_id]
        if not agents and not has_looked:
            has_looked = True
            if process_is_alive(worker_id):
                deadline = max(deadline, time.monotonic() + PUBLISHED_AGAIN_S)
        groups = merge_boards(read_boards(agents, timeout_s=ANSWER_S))
        found = next((one for one in groups if one.group_id == group_id), None)
        if (found is not None and found.settled) or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


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
_PUBLISHED = ("name", "shape", "layout", "created", "namespace", "epoch", "driver", "publication")

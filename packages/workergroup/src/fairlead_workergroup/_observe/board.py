# SPDX-License-Identifier: Apache-2.0
"""The groups of all jobs as their processes have published them, read from any process of the cluster."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ray.util.placement_group import PlacementGroup

from fairlead_placement import Slot
from fairlead_placement.extension import Board, read_boards
from fairlead_sharding import NamedSharding

from .._model import Member, Place
from ..exceptions import WorkerGroupError
from .head import find_boards
from .registration import KEY, SCHEMA

# Boards answer in milliseconds; those of a node that hangs do not.
ANSWER_S = 5.0
# A process publishes within this time what a board that has died had.
PUBLISHED_AGAIN_S = 3.0
# How many digits of an id are shown. Fewer of them may belong to any group.
SHOWN_DIGITS = 6


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
        members: its workers by rank, without their actors; without a pid while they start.
        methods: the class as plain data.
        publication: the number of this publication.
        board: where it is published.
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
    members: tuple[Member, ...]
    methods: Mapping[str, Any]
    publication: int
    board: Board | None = field(default=None, compare=False)

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
        timeout_s: seconds for the answers of the boards. Those that do not answer in time are left out.
    """
    return _parse(read_boards(find_boards(), KEY, timeout_s=timeout_s))


def _parse(answers: Mapping[Board, Any]) -> list[RegisteredGroup]:
    """Return the groups on the boards that have answered."""
    values = {board: values.values() for board, values in answers.items() if not isinstance(values, Exception)}
    return read_groups((board, value) for board, published in values.items() for value in published)


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


def read_group(group_id: str, job_id: str, worker_id: str) -> RegisteredGroup | None:
    """Return a group as its process has published it last; None if no board of that process has it.

    It waits up to `PUBLISHED_AGAIN_S` for the group, because a process whose board has died publishes it again.

    Raises:
        WorkerGroupError: a board of that process does not answer, so that it is unknown whether the group is there.
    """
    deadline = time.monotonic() + PUBLISHED_AGAIN_S
    while True:
        answers = read_boards(find_boards(job_id, worker_id), KEY + group_id, timeout_s=ANSWER_S)
        groups = _parse(answers)
        if groups or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    silent = [answer for answer in answers.values() if isinstance(answer, Exception)]
    if not groups and silent:
        raise WorkerGroupError(
            f"Group {group_id[:SHOWN_DIGITS]} cannot be looked up, because the agent of the process that made it does "
            f"not answer: {silent[0]} Make the call again."
        )
    return max(groups, key=lambda one: one.publication, default=None)


def read_groups(published: Iterable[tuple[Board | None, Any]]) -> list[RegisteredGroup]:
    """Return the groups among the values of boards, in the order in which they were made. Pure.

    Those of another version of the library are left out.
    """
    groups = [
        RegisteredGroup(
            group_id=value["id"],
            class_name=value["class"],
            members=tuple(map(_read_member, value["members"])),
            board=board,
            **{name: value[name] for name in _PUBLISHED},
        )
        for board, value in published
        if isinstance(value, Mapping) and value.get("schema") == SCHEMA
    ]
    return sorted(groups, key=lambda one: (one.created, one.group_id))


# The fields of a group that are published by their own names.
_PUBLISHED = ("name", "shape", "layout", "created", "namespace", "epoch", "driver", "publication", "methods")


def _read_member(row: Mapping[str, Any]) -> Member:
    """Return a worker of a group, of whose place another process knows only the node."""
    slot = Slot(
        placement_group=PlacementGroup.empty(),
        bundle_index=-1,
        node_idx=-1,
        node_id=row["node_id"],
        node_ip=row["address"],
        node_rank=-1,
        local_rank=-1,
    )
    place = Place(
        row["rank"], slot, row["name"], -1, row.get("tied_rank", 0), (-1, []), -1, -1, -1, coords=row["coords"]
    )
    names = ("incarnation", "restarts", "actor_id", "actor_name", "mark", "node_id", "pid", "started")
    return Member(place, **{name: row[name] for name in names if name in row})

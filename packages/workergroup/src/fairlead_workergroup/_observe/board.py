# SPDX-License-Identifier: Apache-2.0
"""The groups of all processes: each one is published on a board, which any process of the cluster reads."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from fairlead_placement.extension import Board, find_boards, publish, read_boards, withdraw

from .._model import GroupState, Member, Place
from ..exceptions import WorkerGroupError

# Of the published data; readers of another version leave the group out.
SCHEMA = 5
KEY = "fairlead-group-"
# Boards answer in milliseconds; those of a node that hangs do not.
ANSWER_S = 5.0
# A process publishes within this time what a board that has died had.
PUBLISHED_AGAIN_S = 3.0
# How many digits of an id are shown. Fewer of them may belong to any group.
SHOWN_DIGITS = 6


def actor_name(place: Place, token: str, incarnation: int) -> str:
    """Return a name that no other actor has: prefixes, slot numbers and ranks may repeat, so it holds the token."""
    return f"{place.name}-{token[:6]}-{place.rank}-{incarnation}"


class Publication:
    """Keeps what is published about one group up to date."""

    def __init__(self, name: str, token: str, methods: Mapping[str, Any]) -> None:
        self.key: str = KEY + token
        self.version = 0
        namespace = ray.get_runtime_context().namespace
        about = {"group_id": token, "name": name, "namespace": namespace, "methods": methods}
        self._about: dict[str, Any] = {"schema": SCHEMA, **about}

    def publish(self, now: GroupState, starting: Mapping[int, Member]) -> None:
        """Publish the present workers, and those starting in place of some; do not wait for the board."""
        members = tuple(starting.get(member.rank, member) for member in now.members)
        self.version += 1
        state = replace(now, members=members).to_wire()
        publish(self.key, self.version, {**self._about, "publication": self.version, "state": state})

    def withdraw(self) -> None:
        """Withdraw everything, without waiting for the board."""
        withdraw(self.key)


@dataclass(frozen=True)
class PublishedGroup:
    """A group, as its process has published it."""

    group_id: str  # identifies it among all groups
    name: str
    namespace: str  # Ray's, of its actors
    methods: Mapping[str, Any]  # the class as plain data
    publication: int  # the number of this publication
    state: GroupState  # members without their actors, and without a pid while they start
    board: Board  # where it is published, and by which process of which job

    @property
    def label(self) -> str:
        """The name, with enough of the id to tell it from other groups of that name."""
        return f"{self.name} ({self.group_id[:SHOWN_DIGITS]})"


def read_groups(published: Iterable[tuple[Board, Any]]) -> list[PublishedGroup]:
    """Return the groups among the values of boards, by name, without those of another version of the library."""
    groups = []
    for board, value in published:
        if isinstance(value, Mapping) and value.get("schema") == SCHEMA:
            fields = {name: part for name, part in value.items() if name not in ("schema", "state")}
            groups.append(PublishedGroup(**fields, state=GroupState.from_wire(value["state"]), board=board))
    return sorted(groups, key=lambda group: (group.name, group.group_id))


def find_groups() -> list[PublishedGroup]:
    """Return every group of every job, by name, except on boards that do not answer."""
    return _parse(read_boards(find_boards(), KEY, timeout_s=ANSWER_S))


def _parse(answers: Mapping[Board, Any]) -> list[PublishedGroup]:
    values = {board: answer for board, answer in answers.items() if not isinstance(answer, Exception)}
    return read_groups((board, value) for board, published in values.items() for value in published.values())


def find_group(name: str) -> PublishedGroup:
    """Return the group with a name, else the group whose id begins with at least `SHOWN_DIGITS` digits."""
    groups = find_groups()
    chosen = [group for group in groups if name == group.name]
    if not chosen and len(name) >= SHOWN_DIGITS:
        chosen = [group for group in groups if group.group_id.startswith(name)]
    if len(chosen) == 1:
        return chosen[0]
    labels = ", ".join(group.label for group in groups)
    if not groups:
        raise WorkerGroupError("No worker group is registered on this cluster.")
    if not chosen:
        raise WorkerGroupError(f"There is no group {name!r}. These are there: {labels}.")
    raise WorkerGroupError(f"Choose one of several groups, by its name or the id in brackets: {labels}.")


def read_group(group_id: str, job_id: str, worker_id: str) -> PublishedGroup | None:
    """Return a group as its process has published it last; None if no board of that process has it in time.

    It raises a `WorkerGroupError` if a board does not answer, so that it is unknown whether the group is there.
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
    return max(groups, key=lambda group: group.publication, default=None)

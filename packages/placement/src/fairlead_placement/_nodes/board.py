# SPDX-License-Identifier: Apache-2.0
"""What processes publish at the agents of their own nodes, for any process of the cluster to read."""

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from .._ray_private import collect, connection
from ..exceptions import PlacementError
from .agent import AGENT_NAME_PREFIX, NAMESPACE, ask_agents, listeners, nodes_with, release
from .head import ask_head, refuse_client

logger = logging.getLogger(__name__)
# For the request to Ray's head that creates an agent.
PUBLISH_S = 10.0
# What this process has published, by key: the connection to Ray, the version and the value.
_published: dict[str, tuple[object | None, int, Any]] = {}


@dataclass(frozen=True)
class Board:
    """The agent of a process on its own node, which has what the process has published.

    Attributes:
        job_id: Ray's id of the job of the process, hexadecimal.
        owner: Ray's worker id of the process.
        name: of the agent's actor. A process whose agent has just died may have two for a moment.
        handle: the agent's actor.
    """

    job_id: str
    owner: str
    name: str
    handle: Any = field(compare=False, repr=False)


def publish(key: str, version: int, value: Any) -> None:
    """Publish plain data under a key at the agent of this process's node, without waiting for the agent.

    It is there until it is withdrawn or this process ends, and is published again if the agent dies. If Ray's head is
    silent when an agent has to be created, nothing is published, with a line in the log. `key` is unique among all
    processes. A value of a higher `version`, which is 1 or more, takes the place of an older one.
    """
    refuse_client()
    here = connection()
    for other in [other for other, (on, *_) in [*_published.items()] if on is not here]:
        _published.pop(other, None)
    _published[key] = here, version, value
    _send(key, version, value)


def _send(key: str, version: int, value: Any, timeout_s: float = PUBLISH_S, *, wait: bool = False) -> list[Any]:
    """Send a publication to the agent of this node; return its answer if that is awaited, or the error."""
    try:
        node_id = ray.get_runtime_context().get_node_id()
    except RuntimeError as error:  # another thread has shut Ray down, so that nobody can read it
        return [error]
    answers = [*ask_agents("publish", {node_id: [key]}, version, value, timeout_s=timeout_s, wait=wait).values()]
    if answers and not wait:
        logger.warning("Cannot publish %s, so other processes do not see its latest state: %s", key, *answers)
    if key not in _published:  # another thread has withdrawn it in the meantime
        withdraw(key)
    return answers


def _publish_again(names: Collection[str]) -> None:
    for key in names:
        if (published := _published.get(key)) is not None:
            _send(key, *published[1:])


listeners.append(_publish_again)


def await_published(key: str, *, timeout_s: float) -> bool:
    """Wait until the agent has what was published under a key last; return whether it has within the time."""
    if (published := _published.get(key)) is None:
        return False  # it has been withdrawn since
    (answer,) = _send(key, *published[1:], timeout_s, wait=True)
    return not isinstance(answer, Exception)


def withdraw(key: str) -> None:
    """Withdraw for good what this process has published under a key, without waiting for it."""
    _published.pop(key, None)
    release(dict.fromkeys(nodes_with(key), (key,)), timeout_s=0.0)


def find_boards(job_id: str = "", owner: str = "") -> list[Board]:
    """Return the boards of all processes of the cluster, or those of one, by its job and its worker id.

    Raises:
        HeadTimeoutError: Ray's head did not answer within `head_deadline`.
    """
    prefix = f"{AGENT_NAME_PREFIX}{job_id}-{owner}-" if owner else AGENT_NAME_PREFIX

    def find() -> list[Board]:
        boards = []
        for row in ray.util.list_named_actors(all_namespaces=True):
            if row["namespace"] == NAMESPACE and (name := row["name"]).startswith(prefix):
                # It has ended since, or its name is that of another version.
                with contextlib.suppress(ValueError):
                    its_job, its_owner, _ = name.removeprefix(AGENT_NAME_PREFIX).split("-")
                    boards.append(Board(its_job, its_owner, name, ray.get_actor(name, namespace=NAMESPACE)))
        return boards

    return ask_head("list the boards", find)


def read_boards(boards: Sequence[Board], prefix: str, *, timeout_s: float) -> dict[Board, dict[str, Any] | Exception]:
    """Return by board the values whose keys begin with a prefix, or why its agent did not answer."""
    return _collect("read_all", boards, (prefix,), timeout_s)


def read_board(board: Board, key: str, version: int, *, timeout_s: float) -> tuple[int, Any] | Exception:
    """Return the version of what is published under a key, and the value if it is newer than `version`.

    Returns:
        (0, None) if nothing is published there; an exception if the agent did not answer.
    """
    answer: tuple[int, Any] | Exception = _collect("read", [board], (key, version), timeout_s)[board]
    return answer


def _collect(method: str, boards: Sequence[Board], args: Sequence[Any], timeout_s: float) -> dict[Board, Any]:
    sends = {board: partial(getattr(board.handle, method).remote, *args) for board in boards}
    answers: dict[Board, Any] = {}
    for board, (answer, error) in collect(sends, timeout_s).items():
        if isinstance(error, ray.exceptions.GetTimeoutError):
            error = PlacementError(f"The agent of process {board.owner[:8]} did not answer within {timeout_s:g} s.")
        answers[board] = answer if error is None else error
    return answers

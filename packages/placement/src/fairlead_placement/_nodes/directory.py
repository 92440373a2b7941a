# SPDX-License-Identifier: Apache-2.0
"""The agents of all jobs of a cluster, and what is published at them."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import ray

from .._ray_private import collect
from ..exceptions import PlacementError
from .agent import AGENT_NAME_PREFIX, NAMESPACE, agents_of, ask_nodes, this_process
from .head import ask_head, choose_alive, head_deadline
from .rounds import Rounds

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
# An agent that is not there yet is requested from Ray's head.
PUBLISH_S = 10.0
# How often a process checks that agents still have what it has published, and how many nodes it asks each time at most.
CHECK_EVERY_S = 5.0
CHECKED_AT_ONCE = 100
# How long the agents have to answer. Agents that are late are asked again later.
CHECK_S = 1.0


@dataclass(frozen=True)
class Agent:
    """The agent of some job on some node.

    Attributes:
        job_id: Ray's id of the job, hexadecimal.
        node_id: Ray's id of the node.
        handle: the agent's actor.
    """

    job_id: str
    node_id: str
    handle: Any = field(compare=False, repr=False)


class _Publication(NamedTuple):
    """What this process has published under a key."""

    owner: str  # the worker id of this process
    version: int
    values: Mapping[str, Any]  # by node id
    on_loss: Callable[[Sequence[str]], object] | None

    def request(self, key: str, node_id: str) -> tuple[Any, ...]:
        """Return the arguments of the request that publishes it at a node."""
        return key, self.version, self.values[node_id], self.owner


def publish(
    key: str,
    version: int,
    values: Mapping[str, Any],
    *,
    on_loss: Callable[[Sequence[str]], object] | None = None,
) -> None:
    """Publish values under one key at the agents of this job on some nodes, without waiting for them.

    A value is there until it is withdrawn or this process ends. An agent that dies loses it; within seconds this
    process creates another agent and publishes the value there. If Ray's head does not answer, nothing is published,
    with a line in the log, until it does.

    Args:
        key: unique among all processes.
        version: 1 or more; a value of a higher version takes the place of an older one.
        values: plain data, by node id.
        on_loss: starts again what else was lost, given the ids of nodes whose agents do not have the value. It runs on
            a background thread before the value is published there again, and again if it raises a PlacementError. It
            may be called although nothing was lost.
    """
    made = _published[key] = _Publication(this_process(), version, values, on_loss)
    _rounds.start()
    _notify({node_id: ("publish", *made.request(key, node_id)) for node_id in values})


def await_published(key: str, node_id: str, *, timeout_s: float) -> bool:
    """Return whether the agent of a node has what was published under a key last; wait for that until the timeout.

    After this has returned True, a process that asks that agent reads this value or a newer one.
    """
    if (found := _published.get(key)) is None:
        return False  # it has been withdrawn since
    try:
        answer: Any = ask_nodes("publish", {node_id: found.request(key, node_id)}, timeout_s)[node_id]
    except (PlacementError, ray.exceptions.RayError) as error:
        answer = error
    if isinstance(answer, Exception):
        logger.debug("Cannot tell whether the agent of node %s has what was published: %s", node_id[:8], answer)
    return not isinstance(answer, Exception)


def withdraw(key: str, node_ids: Iterable[str]) -> None:
    """Withdraw for good what this process has published under a key on some nodes, without waiting for it."""
    _published.pop(key, None)
    _notify(dict.fromkeys(node_ids, ("release", [key])))


def _check() -> None:
    """Publish again what agents have lost; forget what was published from a Ray that has been shut down."""
    me = this_process() if ray.is_initialized() else ""
    for key, one in list(_published.items()):
        if one.owner != me:
            _published.pop(key, None)
    published = dict(_published)
    nodes = sorted({node_id for one in published.values() for node_id in one.values})
    turns = math.ceil(len(nodes) / CHECKED_AT_ONCE) or 1
    try:
        with head_deadline(PUBLISH_S):
            alive = choose_alive(nodes[next(_turn) % turns :: turns])
            answers = ask_nodes("versions", dict.fromkeys(alive, (me,)), CHECK_S)
    except (PlacementError, ray.exceptions.RayError) as error:
        logger.debug("Cannot check what the agents have: %s", error)
        return
    for key, one in published.items():
        if _published.get(key) is not one:
            continue  # it has been withdrawn, or replaced, while the agents were asked
        lost = {
            node_id: ("publish", *one.request(key, node_id))
            for node_id, answer in answers.items()
            if node_id in one.values and not isinstance(answer, Exception) and answer.get(key, 0) < one.version
        }
        if lost and one.on_loss is not None:
            try:
                one.on_loss(list(lost))
            except (PlacementError, ray.exceptions.RayError) as error:
                logger.debug("Cannot start again what agents have lost: %s", error)
                continue  # as long as the value is not there, the next check tries both
        _notify(lost)


# By key. Changes are atomic.
_published: dict[str, _Publication] = {}
_turn = itertools.count()
_rounds = Rounds(CHECK_EVERY_S, _check, lambda: bool(_published), exit_s=PUBLISH_S)


def _notify(requests: Mapping[str, tuple[Any, ...]]) -> None:
    """Send a request without an answer to the agent of each node."""
    try:
        with head_deadline(PUBLISH_S):
            agents = agents_of(dict.fromkeys(requests))
        for node_id, (method, *args) in requests.items():
            agents[node_id].answer.options(num_returns=0).remote(method, *args)
    except (PlacementError, ray.exceptions.RayError) as error:
        logger.warning("Cannot send a request to the agents of %d nodes: %s", len(requests), error)


def find_agents() -> list[Agent]:
    """Return the agents of all jobs.

    Raises:
        HeadTimeoutError: Ray's head did not answer within `head_deadline`.
    """
    return ask_head("list the node agents", _find_agents)


def _find_agents() -> list[Agent]:
    agents = []
    for row in ray.util.list_named_actors(all_namespaces=True):
        if row["namespace"] != NAMESPACE or not row["name"].startswith(AGENT_NAME_PREFIX):
            continue
        job_id, node_id = row["name"].removeprefix(AGENT_NAME_PREFIX).split("-")
        try:
            agents.append(Agent(job_id, node_id, ray.get_actor(row["name"], namespace=NAMESPACE)))
        except ValueError:
            continue  # it has ended since
    return agents


def read_boards(agents: Sequence[Agent], *, timeout_s: float) -> dict[Agent, dict[str, Any] | Exception]:
    """Return what is published at each agent, or why it did not answer."""
    return _collect("published", dict.fromkeys(agents, ()), timeout_s)


def read_newer(agent: Agent, key: str, version: int, *, timeout_s: float) -> tuple[int, Any] | Exception:
    """Return the version of what is published under a key at an agent, and the value if it is newer than `version`.

    Returns:
        (0, None) if nothing is published there; an exception if the agent did not answer.
    """
    answer: tuple[int, Any] | Exception = _collect("newer", {agent: (key, version)}, timeout_s)[agent]
    return answer


def run_on_agents(
    function: Callable[..., _T], arguments: Mapping[Agent, Sequence[Any]], *, timeout_s: float
) -> dict[Agent, _T | Exception]:
    """Call a function in the processes of several agents, of any jobs, with one request to each.

    Args:
        function: as for `NodeAgent.run`.
        arguments: the function's positional arguments.
        timeout_s: seconds that all requests together may take.

    Returns:
        The function's result there, or the exception with which it failed.
    """
    return _collect("run", {agent: (function, *args) for agent, args in arguments.items()}, timeout_s)


def _collect(method: str, arguments: Mapping[Agent, Sequence[Any]], timeout_s: float) -> dict[Agent, Any]:
    sends = {agent: partial(agent.handle.answer.remote, method, *args) for agent, args in arguments.items()}
    answers: dict[Agent, Any] = {}
    for agent, (answer, error) in collect(sends, timeout_s).items():
        if isinstance(error, ray.exceptions.GetTimeoutError):
            error = PlacementError(
                f"The agent of job {agent.job_id} on node {agent.node_id[:8]} did not answer within {timeout_s:g} s."
            )
        answers[agent] = answer if error is None else error
    return answers

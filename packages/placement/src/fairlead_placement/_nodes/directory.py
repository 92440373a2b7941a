# SPDX-License-Identifier: Apache-2.0
"""The agents of all jobs of a cluster, and what is published at them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from ..exceptions import HeadTimeoutError, PlacementError
from .agent import AGENT_NAME_PREFIX, NAMESPACE, notify_node, this_process
from .head import ask_head, head_deadline

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
# An agent that is not there yet is requested from Ray's head.
PUBLISH_S = 10.0


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


def publish(key: str, version: int, values: Mapping[str, Any]) -> None:
    """Publish values under one key at the agents of this job on some nodes, without waiting for them.

    A value is there until it is withdrawn, or this process or the agent ends. An agent that cannot be reached is left
    out, with a line in the log: only people who look at the job need the published values.

    Args:
        key: unique among all processes.
        version: a value of a higher version takes the place of an older one.
        values: plain data, by node id.
    """
    me = this_process()
    _notify({node_id: ("publish", key, version, value, me) for node_id, value in values.items()})


def withdraw(key: str, node_ids: Iterable[str]) -> None:
    """Withdraw for good what this process has published under a key on some nodes, without waiting for it."""
    _notify(dict.fromkeys(node_ids, ("withdraw", key)))


def _notify(requests: Mapping[str, tuple[Any, ...]]) -> None:
    with head_deadline(PUBLISH_S):
        for node_id, (method, *args) in requests.items():
            try:
                notify_node(node_id, method, *args)
            except HeadTimeoutError as error:
                logger.warning("Cannot %s at the agents of %d nodes: %s", method, len(requests), error)
                return  # each further node would wait as long
            except (PlacementError, ray.exceptions.RayError) as error:
                logger.warning("Cannot %s at the agent of node %s: %s", method, node_id[:8], error)


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
        # The name of an agent that took the place of a dead one ends with a number.
        job_id, node_id = row["name"].removeprefix(AGENT_NAME_PREFIX).split("-")[:2]
        try:
            agents.append(Agent(job_id, node_id, ray.get_actor(row["name"], namespace=NAMESPACE)))
        except ValueError:
            continue  # it has ended meanwhile
    return agents


def read_boards(agents: Sequence[Agent], *, timeout_s: float) -> dict[Agent, dict[str, Any] | Exception]:
    """Return what is published at each agent, or why it did not answer."""
    return _collect({agent: agent.handle.published.remote() for agent in agents}, timeout_s)


def run_on_agents(
    function: Callable[..., _T], arguments: Mapping[Agent, Sequence[Any]], *, timeout_s: float
) -> dict[Agent, _T | Exception]:
    """Call a function in the processes of several agents, of any jobs, with one request to each.

    Args:
        function: as for `NodeAgent.run`.
        arguments: the function's positional arguments.
        timeout_s: seconds that all requests together may take.

    Returns:
        What the function returned there, or the exception with which it failed.
    """
    sent = {agent: agent.handle.run.remote(function, *args) for agent, args in arguments.items()}
    return _collect(sent, timeout_s)


def _collect(sent: Mapping[Agent, Any], timeout_s: float) -> dict[Agent, Any]:
    if sent:
        ray.wait(list(sent.values()), num_returns=len(sent), timeout=timeout_s)
    answers: dict[Agent, Any] = {}
    for agent, ref in sent.items():
        try:
            answers[agent] = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            answers[agent] = PlacementError(
                f"The agent of job {agent.job_id} on node {agent.node_id[:8]} did not answer within {timeout_s:g} s."
            )
        except ray.exceptions.RayError as error:
            answers[agent] = error
    return answers

# SPDX-License-Identifier: Apache-2.0
"""Sends requests to node agents: one detached actor per job and node, created when it is needed."""

import functools
import time
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import _ray_private
from .._ray_private import (
    block_shutdown,
    collect,
    create_actor,
)
from ..exceptions import PlacementError, PlacementTimeoutError
from . import agent_process, meters
from .background import run_each
from .head import alive_nodes, ask_head, choose_alive, head_deadline, refuse_client
from .usage import GpuMemory, NodeUsage, ProcessUsage

_T = TypeVar("_T")

AGENT_NAME_PREFIX = "fairlead-agent-"
# All processes of a job find its agents there, whatever namespace they are in.
NAMESPACE = "fairlead"
# Just after an agent's death its name may still lead to the dead one, on a busy head for seconds.
PAUSES_S = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)
# OutOfMemoryError: Ray's memory monitor has killed the agent; it prefers what has started last. ActorUnavailableError:
# Ray does not know yet whether the agent has died or will answer again.
_GONE = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError, ray.exceptions.ActorUnavailableError)
# For an agent, whose process may have to start.
ANSWER_S = 60.0
# How many agents are created at a time: Ray's head registers each by a request of its own.
CREATED_AT_ONCE = 16
# fairlead-placement need not be installed on the nodes.
for _module in (agent_process, meters, _ray_private):
    ray.cloudpickle.register_pickle_by_value(_module)


# By session, job and node. Each change is atomic, and Ray has one actor of a name, so threads may create it together.
_handles: dict[tuple[str, str, str], Any] = {}


@functools.cache
def _actor_class() -> Any:
    return ray.remote(agent_process.AgentProcess)


def agents_of(instead_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the agents of nodes, by node id, and create those that are missing. `instead_of` has those that died."""
    keys = {node_id: _key(node_id) for node_id in instead_of}
    found = {key: _handles.get(key) for key in keys.values()}
    missing = [node_id for node_id, key in keys.items() if found[key] == instead_of[node_id]]
    if missing:
        others = f" and of {len(missing) - 1} more" if missing[1:] else ""
        created = ask_head(f"start the agent of node {missing[0][:8]}{others}", _create, [keys[one] for one in missing])
        # Agents end with their session and job, so handles of others are of no use any more.
        present = {key[:2] for key in keys.values()}
        for key in [key for key in [*_handles] if key[:2] not in present]:
            _handles.pop(key, None)
        _handles.update(created)
        found |= created
    return {node_id: found[key] for node_id, key in keys.items()}


def _create(keys: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], Any]:
    """Create agents, on this thread and others, none of which keeps the process alive if the head is silent."""
    first, *others = keys
    made = run_each(_create_actor, others, CREATED_AT_ONCE - 1)
    return {first: _create_actor(first)} | {key: one.result() for key, one in zip(others, made, strict=True)}


def _create_actor(key: tuple[str, str, str]) -> Any:
    _, job_id, node_id = key
    return create_actor(
        _actor_class(),
        (True,),
        name=f"{AGENT_NAME_PREFIX}{job_id}-{node_id}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        # It answers while something slow is under way.
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )


def _key(node_id: str) -> tuple[str, str, str]:
    refuse_client()
    context = ray.get_runtime_context()
    return context.get_session_name(), context.get_job_id(), node_id


def this_process() -> str:
    """Return the worker id of this process, which owns what the agents hold for it."""
    refuse_client()
    return str(ray.get_runtime_context().get_worker_id())


class NodeAgent:
    """Acts on one node: it holds ports, measures processes and memory, and runs functions.

    The actor needs no resources and is created when it is needed, one for all processes of the job. It stays while it
    holds something, or a thread or process lives that a function has started. Otherwise it ends with its job, or where
    there is an autoscaler, which takes its node for busy, 5 s after the last request. Within 10 s of the end of a
    process it releases everything that it holds for that process. When it dies, its leases are lost, workers are not
    affected, and the next request creates a new agent.

    Args:
        node_id: Ray's id of a node that is alive.
        timeout_s: seconds that one request may take, including the start of the agent's process.

    Raises:
        PlacementTimeoutError: every request raises it if it was not answered in time. The constructor does not.
        PlacementError: every request raises it if the agent failed, in most cases because its node is gone.

    >>> NodeAgent("0" * 56)
    NodeAgent(00000000)
    """

    def __init__(self, node_id: str, *, timeout_s: float = 60.0) -> None:
        self.node_id = node_id
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"NodeAgent({self.node_id[:8]})"

    def lease(self, count: int, low: int, high: int) -> tuple[list[tuple[int, str]], int, int]:
        """Hold `count` ports of the range low to high (both included), or none.

        Returns:
            The ports with their lease ids; how many of the range this agent has leased; how many others have bound.
        """
        lease_ids = [uuid.uuid4().hex for _ in range(count)]
        ports, leased, in_use = self._ask("lease", lease_ids, low, high, this_process())
        return list(zip(ports, lease_ids, strict=False)), leased, in_use

    def release(self, lease_ids: list[str]) -> None:
        """Release ports, by lease id."""
        self._ask("release", lease_ids)

    def leased(self) -> list[int]:
        """Return the ports held now, in ascending order."""
        return list(self._ask("leased"))

    def usage(self, pids: Sequence[int]) -> list[ProcessUsage]:
        """Return what processes of the node use, in the order of `pids`. A process that has ended is left out."""
        return [ProcessUsage(*row) for row in self._ask("usage", list(pids))]

    def requests(self) -> dict[str, int]:
        """Return how many requests have reached the agent: `usage` to measure processes, `run` to call functions."""
        return dict(self._ask("requests"))

    def memory(self, watcher: str | None = None) -> NodeUsage:
        """Take a sample of the node's memory.

        Args:
            watcher: for whom the agent takes a sample each second until `unwatch`; None for this single sample.

        Returns:
            The sample, with the peaks since the watcher's first.
        """
        return _read_row(self.node_id, self._ask("memory", watcher, this_process()))

    def unwatch(self, watcher: str) -> None:
        """Take no more samples for a watcher. Can be repeated, and does not affect other watchers."""
        self._ask("release", [watcher])

    def run(self, function: Callable[..., _T], *args: Any, timeout_s: float | None = None) -> _T:
        """Call a function on the node and return what it returns. The agent still answers other requests.

        Args:
            function: shipped by value if its module is registered for that, else by name.
            args: its arguments.
            timeout_s: seconds that this request may take; None for the agent's `timeout_s`. The function itself is not
                interrupted.

        Raises:
            PlacementTimeoutError: the function has not returned by then.
            Exception: any exception of the function.
        """
        returned: _T = self._ask("run", function, *args, timeout_s=timeout_s)
        return returned

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        limit = self.timeout_s if timeout_s is None else timeout_s
        answer, error = _ask_nodes(method, {self.node_id: args}, limit)[self.node_id]
        if error is not None:
            raise error
        return answer


def dismiss_agents(node_ids: Iterable[str]) -> None:
    """Have the agents of nodes leave that this process has used, unless they hold something for another purpose."""
    with block_shutdown():
        # The name leads to an agent that stays for another purpose, so its handle need not be kept.
        agents = [_handles.pop(_key(node_id), None) for node_id in node_ids] if ray.is_initialized() else []
        for agent in filter(None, agents):
            agent.leave.options(num_returns=0).remote()


def run_on_nodes(
    function: Callable[..., _T], arguments: Mapping[str, Sequence[Any]], *, timeout_s: float = 60.0
) -> dict[str, _T | Exception]:
    """Call a function on several nodes at once, with one request to each.

    Args:
        function: as for `NodeAgent.run`.
        arguments: the function's positional arguments, by node id.
        timeout_s: seconds that all requests together may take.

    Returns:
        By node id, what the function returned there, or the exception with which it failed. Exceptions are not raised,
        so that a node that is gone does not hide what the other nodes return.
    """
    code: Any = function
    # Anything else may hold references to objects, which only Ray itself can send.
    if isinstance(function, types.FunctionType) and not function.__closure__:
        code = ray.cloudpickle.dumps(function)  # once for all nodes
    return ask_nodes("run", {node_id: (code, *args) for node_id, args in arguments.items()}, timeout_s)


def usage_on_nodes(
    pids: Mapping[str, Sequence[int]], *, timeout_s: float = 60.0
) -> dict[str, list[ProcessUsage] | Exception]:
    """Measure processes on several nodes at once, with one request to each node.

    Args:
        pids: the processes, by node id.
        timeout_s: seconds that all requests together may take.

    Returns:
        By node id, a list as `NodeAgent.usage` returns it, or the exception with which the request failed.
    """
    answers = ask_nodes("usage", {node_id: (list(there),) for node_id, there in pids.items()}, timeout_s)
    return {
        node_id: rows if isinstance(rows, Exception) else [ProcessUsage(*row) for row in rows]
        for node_id, rows in answers.items()
    }


def ask_nodes(method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, Any]:
    """Send the same request to several agents at once; return by node id the answer, or the exception."""
    answers = _ask_nodes(method, arguments, timeout_s)
    return {node_id: answer if error is None else error for node_id, (answer, error) in answers.items()}


def ask_living(method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, Any]:
    """Do the same, but leave out nodes that have gone, and raise the error of an agent whose node is alive."""
    answers = ask_nodes(method, arguments, timeout_s)
    failed = {node_id: answer for node_id, answer in answers.items() if isinstance(answer, Exception)}
    for node_id in choose_alive(failed) if failed else ():
        raise failed[node_id]
    return {node_id: answer for node_id, answer in answers.items() if node_id not in failed}


def _ask_nodes(
    method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float
) -> dict[str, tuple[Any, Exception | None]]:
    """Return by node id the answer and the exception. Where an agent is gone, a new agent gets the request."""
    deadline = time.monotonic() + timeout_s
    answers: dict[str, tuple[Any, Exception | None]] = {}
    # By node id, the agent to replace.
    left: dict[str, Any] = dict.fromkeys(arguments)
    for pause in (*PAUSES_S, 0.0):
        try:
            with head_deadline(max(0.0, deadline - time.monotonic())):
                agents = agents_of(left)
        except Exception as error:
            if not answers:
                raise
            # It must not hide what the other agents have answered.
            return answers | dict.fromkeys(left, (None, error))
        sends = {at: functools.partial(agent.answer.remote, method, *arguments[at]) for at, agent in agents.items()}
        answers |= collect(sends, deadline - time.monotonic())
        left = {}
        for node_id, agent in agents.items():
            failure = answers[node_id][1]
            # A function's own error is a RayTaskError, whatever its class.
            if isinstance(failure, ray.exceptions.RayError) and not isinstance(failure, ray.exceptions.RayTaskError):
                answers[node_id] = None, _explain(node_id, method, timeout_s, failure)
                if isinstance(failure, _GONE):
                    left[node_id] = None if isinstance(failure, ray.exceptions.ActorUnavailableError) else agent
        if not left:
            break
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
    return answers


def _explain(node_id: str, method: str, limit: float, cause: BaseException) -> PlacementError:
    if isinstance(cause, ray.exceptions.GetTimeoutError):
        error: PlacementError = PlacementTimeoutError(
            f"The agent of node {node_id} did not answer {method!r} within {limit:g} s. "
            "Its process may be starting on a very busy node: try again, or look at the node."
        )
    else:
        error = PlacementError(
            f"The agent of node {node_id} could not do {method!r}: {cause}. If the node is gone, "
            "`replace_lost_nodes()` of its cluster reserves others."
        )
    error.__cause__ = cause
    return error


def read_usage(node_ids: Sequence[str], watcher: str | None) -> tuple[NodeUsage, ...]:
    """Return the memory of each node that is alive, in the order given. A watcher is as for `NodeAgent.memory`."""
    with head_deadline():
        alive = alive_nodes()
    asked = {node_id: (watcher, this_process()) for node_id in node_ids if node_id in alive}
    return tuple(_read_row(node_id, row) for node_id, row in ask_living("memory", asked, ANSWER_S).items())


def unwatch(node_ids: Collection[str], watcher: str) -> None:
    """Have no more samples taken for a watcher on some nodes. Can be repeated. A silent agent is left alone."""
    if node_ids:
        ask_nodes("release", dict.fromkeys(choose_alive(node_ids), ([watcher],)), 10.0)


def _read_row(node_id: str, row: Sequence[Any]) -> NodeUsage:
    total, used, available, peak, gpus, samples, sampled_at = row
    on_gpus = None if gpus is None else tuple(GpuMemory(*gpu) for gpu in gpus)
    return NodeUsage(node_id, total, used, available, peak, on_gpus, samples, sampled_at)

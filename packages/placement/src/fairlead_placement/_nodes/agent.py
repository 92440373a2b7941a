# SPDX-License-Identifier: Apache-2.0
"""The node agents of this process: one actor for each node on which it holds something, and only for that long.

An agent needs no resources. It ends with the last of what it holds, and with this process; that of this process's own
node stays, so that the next group does not wait for a new process. Workers are not affected when it dies; its ports are
lost, with a warning, and what this process has published there is published again.
"""

import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._ray_private import block_shutdown, collect, connection, create_actor
from ..exceptions import PlacementError
from . import agent_process
from .background import run_in_thread
from .functions import explain_failure
from .head import ask_head, head_deadline

logger = logging.getLogger(__name__)
AGENT_NAME_PREFIX = "fairlead-agent-"
# All processes find the agent of an owner's own node there, whatever namespace they are in.
NAMESPACE = "fairlead"
# OutOfMemoryError: Ray's memory monitor has killed the agent; it prefers what has started last.
_DEAD = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)
# ActorUnavailableError: Ray does not know yet whether the agent has died or will answer again.
_GONE = (*_DEAD, ray.exceptions.ActorUnavailableError)
# The pause before a request is repeated.
PAUSE_S = 0.2
# For an agent, whose process may have to start.
ANSWER_S = 60.0
# fairlead-placement need not be installed on the nodes.
ray.cloudpickle.register_pickle_by_value(agent_process)
_ActorClass: Any = ray.remote(concurrency_groups={"end": 1})(agent_process.NodeAgent)


@dataclass(eq=False)
class _Agent:
    """An agent of this process, and the names of what it holds."""

    node_id: str
    on: object | None  # the connection to Ray
    is_own: bool  # whether this process is on that node too
    handle: Any  # None once it is killed
    holds: set[str]
    end: Any = None  # of a request that ends with the agent
    is_known: bool = False  # whether it has answered, so that the head knows it
    is_late: bool = False  # whether it did not answer the last request that was waited for


# By node id. The lock is reentrant, because a signal handler may release something. No request is made under it.
_lock = threading.RLock()
_agents: dict[str, _Agent] = {}
# Called on a background thread with the names that an agent has held, after it has died.
listeners: list[Callable[[Collection[str]], object]] = []


def ask_agents(
    method: str,
    names: Mapping[str, Sequence[str]],
    *arguments: Any,
    timeout_s: float = ANSWER_S,
    wait: bool = True,
) -> dict[str, Any]:
    """Send a request to the agent of each node at once; return by node id the answer, or the exception.

    Args:
        method: of the agent.
        names: what the agents hold for this request, by node id, until it is released. An agent that is missing is
            created. A method gets these names first.
        arguments: its other arguments.
        timeout_s: seconds that all of it may take.
        wait: whether to wait for the answers; else only errors are returned that are known at once.
    """
    deadline = time.monotonic() + timeout_s
    answers: dict[str, Any] = {}
    left = list(names)
    while left:
        try:
            with head_deadline(max(0.0, deadline - time.monotonic())):
                agents = _get_agents({node_id: names[node_id] for node_id in left})
            outcomes = _send(method, agents, names, *arguments, deadline=deadline if wait else 0.0)
        except (PlacementError, ray.exceptions.RayError) as error:
            return answers | dict.fromkeys(left, error)
        if not wait:
            break
        for node_id, (answer, failure) in outcomes.items():
            late = (
                f"The agent of node {node_id} did not answer {method!r} within {timeout_s:g} s. Its process may be "
                "starting on a very busy node: try again, or look at the node."
            )
            failed = f"The agent of node {node_id} could not do {method!r}"
            answers[node_id] = answer if failure is None else explain_failure(failure, late, failed)
        is_over = time.monotonic() >= deadline
        # A name that was released in the meantime is not held again.
        left = [
            node_id
            for node_id, (_, failure) in outcomes.items()
            if not is_over and isinstance(failure, _GONE) and agents[node_id].holds.issuperset(names[node_id])
        ]
        if left:
            time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
    return answers


def release(names: Mapping[str, Collection[str]], *, timeout_s: float) -> None:
    """Release what agents hold, and end the agents that hold nothing else. One that is late releases it later."""
    here = connection()
    with _lock:
        agents = {node_id: _agents[node_id] for node_id in names.keys() & _agents.keys() if _agents[node_id].on is here}
        for node_id, agent in agents.items():
            agent.holds.difference_update(names[node_id])
    try:
        if agents:
            _send("release", agents, names, deadline=time.monotonic() + timeout_s)
    finally:
        for agent in agents.values():
            _end_if_idle(agent)


def nodes_with(name: str) -> list[str]:
    """Return the nodes on which this process holds something by a name."""
    with _lock:
        return [node_id for node_id, agent in _agents.items() if name in agent.holds]


def _get_agents(names: Mapping[str, Collection[str]]) -> dict[str, _Agent]:
    """Return the agents of nodes by node id, to hold names from now on. Create those that are missing."""
    while True:
        here = connection()
        with _lock:
            for node_id in [node_id for node_id, agent in _agents.items() if agent.on is not here]:
                del _agents[node_id]  # it ended with its connection
            missing = [node_id for node_id in names if node_id not in _agents]
            if not missing:
                for node_id, held in names.items():
                    _agents[node_id].holds.update(held)
                return {node_id: _agents[node_id] for node_id in names}
        own = ray.get_runtime_context().get_node_id()
        request = f"start the agents of node(s) {', '.join(missing[:3])}"
        handles = ask_head(request, lambda node_ids: [*map(_create_actor, node_ids)], missing, undo=_kill)
        for node_id, handle in zip(missing, handles, strict=True):
            agent = _Agent(node_id, here, node_id == own, handle, set(names[node_id]))
            with _lock:
                is_first = _agents.setdefault(node_id, agent) is agent
            if is_first:
                _watch(agent)
            else:  # another thread was faster
                run_in_thread(_kill, [handle])


def _create_actor(node_id: str) -> Any:
    pin = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": pin}
    context = ray.get_runtime_context()
    if node_id == context.get_node_id():
        # The name of an agent that has died may still be taken.
        name = f"{AGENT_NAME_PREFIX}{context.get_job_id()}-{context.get_worker_id()}-{uuid.uuid4().hex[:8]}"
        options |= {"name": name, "namespace": NAMESPACE}
    return create_actor(_ActorClass, (), **options)


def _kill(handles: list[Any], is_known: bool = True) -> None:
    # What takes the lock must not wait.
    with block_shutdown() if is_known else contextlib.nullcontext():
        while handles:
            if connection() is not None:
                ray.kill(handles[-1])
            handles.pop()


def _watch(agent: _Agent) -> None:
    """Have a request wait at an agent for its end."""

    def notice(ended: Any) -> None:
        error = ended.exception()
        if isinstance(error, ray.exceptions.ActorUnavailableError) and agent.handle is not None:
            time.sleep(PAUSE_S)
            _watch(agent)
        elif agent.on is connection():
            _lose(agent, str(error))

    with block_shutdown():
        if agent.on is connection():
            agent.end = agent.handle.wait_for_end.remote().future()
            agent.end.add_done_callback(functools.partial(run_in_thread, notice))


def _lose(agent: _Agent, why: str) -> None:
    """Forget an agent that has died, and report that if it held something."""
    with _lock:
        if _agents.get(agent.node_id) is not agent:
            return
        del _agents[agent.node_id]
        held = [*agent.holds]
    if held:
        logger.warning(
            "The agent of node %s has died: %s. Servers that listen on ports that it held for this process are not "
            "affected, but others can take these ports now. Lease others for what is still to start.",
            agent.node_id[:8],
            " ".join(why.split("\n\t")[0].split()),
        )
        for listener in listeners:
            run_in_thread(listener, held)


def _end_if_idle(agent: _Agent) -> None:
    """End an agent that holds nothing any more, but for one on this process's own node that answers."""
    if agent.is_own and not agent.is_late:
        return
    with _lock:
        if agent.holds or _agents.get(agent.node_id) is not agent or agent.handle is None:
            return
        del _agents[agent.node_id]
        handles, agent.handle = [agent.handle], None
    # Not on this thread: while the head is silent, it waits for an agent that the head does not know yet.
    run_in_thread(_kill, handles, agent.is_known)


def _send(
    method: str, agents: Mapping[str, _Agent], names: Mapping[str, Collection[str]], *arguments: Any, deadline: float
) -> dict[str, tuple[Any, Exception | None]]:
    # A handle goes when another thread releases the last of what the agent holds.
    handles = {node_id: handle for node_id, agent in agents.items() if (handle := agent.handle) is not None}
    sends = {
        node_id: functools.partial(getattr(handle, method).remote, [*names[node_id]], *arguments)
        for node_id, handle in handles.items()
    }
    outcomes: dict[str, Any] = dict.fromkeys(agents.keys() - handles, (None, ray.exceptions.ActorDiedError()))
    left_s = max(0.0, deadline - time.monotonic())
    outcomes |= collect(sends, left_s)
    for node_id, (_, error) in outcomes.items():
        agents[node_id].is_known |= error is None
        agents[node_id].is_late = left_s > 0 and isinstance(error, ray.exceptions.GetTimeoutError)
        if isinstance(error, _DEAD):
            _lose(agents[node_id], str(error))
    return outcomes

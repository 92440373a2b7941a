# SPDX-License-Identifier: Apache-2.0
"""The side of a node agent that asks: one detached actor per job and node, made when first needed."""

import collections
import functools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import _ray_private
from .._ray_private import clean_runtime_env, driver_of, node_of_worker, worker_is_alive
from ..exceptions import PlacementError, PlacementTimeoutError
from . import agent_process, meters, owners
from .inventory import alive_nodes
from .usage import GpuMemory, NodeUsage, ProcessUsage

__all__ = [
    "AGENT_NAME_PREFIX",
    "NodeAgent",
    "ask_nodes",
    "guard_groups",
    "is_driver",
    "known_agents",
    "new_lease_ids",
    "run_on_nodes",
    "this_process",
    "usage_on_nodes",
]

_T = TypeVar("_T")

AGENT_NAME_PREFIX = "fairlead-agent-"
# All processes of a job find its agents there, whatever namespace they are in.
NAMESPACE = "fairlead"
# Just after an agent's death its name may still lead to the dead one, on a busy head for seconds.
PAUSES_S = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)
# The second is its death too, by Ray's memory monitor, which prefers what has started last. The third says that it has
# died, or will answer again: Ray does not know yet.
_GONE = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError, ray.exceptions.ActorUnavailableError)
# fairlead-placement need not be installed on the nodes.
for _module in (agent_process, meters, owners, _ray_private):
    ray.cloudpickle.register_pickle_by_value(_module)


# By session, job and node.
_handles: dict[tuple[str, str, str], Any] = {}
# How many have died there: the name of one that has been killed twice leads to the dead one for good.
_deaths: collections.Counter[tuple[str, str, str]] = collections.Counter()
# By the same: the agent that guards this process's placement groups, and its answer, which is not waited for.
_guards: dict[tuple[str, str, str], tuple[Any, Any]] = {}
# Reentrant: a signal handler may shut a cluster down in the middle of anything.
_lock = threading.RLock()


@functools.cache
def _actor_class() -> Any:
    return ray.remote(agent_process.AgentProcess)


def _handle(node_id: str, *, instead_of: Any = None) -> Any:
    """The agent's handle; of a new agent if the one that is known is `instead_of`, which has died."""
    context = ray.get_runtime_context()
    key = _key(node_id)
    me, driver = context.get_worker_id(), driver_of(key[1])
    with _lock:
        # Only one of several threads that met the dead agent makes a new one.
        if _handles.get(key) is instead_of:
            _deaths[key] += instead_of is not None
            again = f"-{_deaths[key]}" if _deaths[key] else ""
            # A detached agent ends itself. One that could not see its driver end, or whose driver has ended before,
            # which a detached actor outlives, ends with the process that made it.
            sees = worker_is_alive(driver) is True
            _handles[key] = _actor_class()._remote(
                args=(node_id, driver if sees else "", me if me != driver else ""),
                name=f"{AGENT_NAME_PREFIX}{key[1]}-{node_id}{again}",
                namespace=NAMESPACE,
                lifetime="detached" if sees else None,
                # `options` would drop what keeps this process's environment out.
                runtime_env=clean_runtime_env(),
                get_if_exists=True,
                num_cpus=0,
                max_restarts=0,
                # It answers while something slow is under way.
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
        return _handles[key]


def _key(node_id: str) -> tuple[str, str, str]:
    context = ray.get_runtime_context()
    return context.get_session_name(), context.get_job_id(), node_id


def this_process() -> str:
    """Return the worker id of this process, for which the agents hold what it has them hold."""
    worker_id: str = ray.get_runtime_context().get_worker_id()
    return worker_id


def is_driver() -> bool:
    """Return whether this process is its job's driver, whose placement groups Ray removes when it ends."""
    return this_process() == driver_of(ray.get_runtime_context().get_job_id())


def guard_groups() -> None:
    """Have node agents remove the placement groups of this process when it has ended; returns at once.

    Ray does that for a driver. For any other process the agent of its node does it, and, as that node may die with it,
    the agent of the driver's node. Call it before each group is made: an agent that has died is replaced then.
    """
    if is_driver():
        return
    context = ray.get_runtime_context()
    me, driver = context.get_worker_id(), driver_of(context.get_job_id())
    for node_id in {context.get_node_id(), _node_of_driver(driver)} - {None}:
        agent, answer = _guards.get(_key(node_id), (None, None))
        died = answer is not None and _failed_already(answer)
        agent = _handle(node_id, instead_of=agent) if died else _handle(node_id)
        # The answer is kept: Ray prints the error of one that nobody holds.
        _guards[_key(node_id)] = (agent, _send(agent, "guard", me))


@functools.cache
def _node_of_driver(driver: str) -> str | None:
    return node_of_worker(driver)


def _failed_already(answer: Any) -> bool:
    """Return whether a request has failed by now, without waiting for it."""
    done, _ = ray.wait([answer], timeout=0)
    try:
        return bool(done) and ray.get(done[0]) is not None
    except ray.exceptions.RayError:
        return True


class NodeAgent:
    """Does on one node what has to be done there, such as holding ports, for the whole job.

    The actor needs no resources and is made on first use. It lives as long as the job, whichever process asked for it
    first, and ends within 10 s of it, however the job ends. When it dies its leases are gone, workers are not touched,
    and the next request makes a new one.

    Args:
        node_id: Ray's id of a node that is alive.
        timeout_s: seconds that one request may take, the start of the agent's process included.

    Raises:
        PlacementTimeoutError: not here, but from every request: it was not answered in time.
        PlacementError: likewise: the agent could not do it, mostly because its node is gone.

    >>> NodeAgent("0" * 56)
    NodeAgent(00000000)
    """

    def __init__(self, node_id: str, *, timeout_s: float = 60.0) -> None:
        self.node_id = node_id
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"NodeAgent({self.node_id[:8]})"

    def lease(self, count: int, low: int, high: int) -> tuple[list[tuple[int, str]], int, int]:
        """Hold `count` ports of the range low to high, `high` included, or none.

        Returns:
            The ports with their lease ids; how many of the range this agent has leased; how many others have bound.
        """
        lease_ids = new_lease_ids(count)
        ports, leased, in_use = self._ask("lease", lease_ids, low, high, this_process())
        return list(zip(ports, lease_ids, strict=False)), leased, in_use

    def release(self, lease_ids: list[str]) -> None:
        """Give ports back, by lease id."""
        self._ask("release", lease_ids)

    def leased(self) -> list[int]:
        """The ports held now, ascending."""
        ports: list[int] = self._ask("leased")
        return ports

    def usage(self, pids: Sequence[int]) -> list[ProcessUsage]:
        """What processes of the node use, by pid, in the order asked. One that is gone is left out."""
        return [ProcessUsage(*row) for row in self._ask("usage", list(pids))]

    def requests(self) -> dict[str, int]:
        """How many requests to measure processes (`usage`) and to call functions (`run`) have reached the agent."""
        counts: dict[str, int] = self._ask("requests")
        return counts

    def memory(self, watcher: str | None = None, name: str = "") -> NodeUsage:
        """Take a sample of the node's memory.

        Args:
            watcher: for whom samples, once a second, go on until `unwatch`; None: this is the only one.
            name: tag `cluster` of the watcher's metrics.
        """
        total, used, available, peak, gpus, samples, sampled_at = self._ask("memory", watcher, name, this_process())
        on_gpus = None if gpus is None else tuple(GpuMemory(*gpu) for gpu in gpus)
        return NodeUsage(self.node_id, total, used, available, peak, on_gpus, samples, sampled_at)

    def unwatch(self, watcher: str) -> None:
        """Take no more samples for a watcher. Can be repeated; other watchers are served on."""
        self._ask("unwatch", watcher)

    def run(self, function: Callable[..., _T], *args: Any, timeout_s: float | None = None) -> _T:
        """Call a function on the node and return what it returns; other requests are answered meanwhile.

        Args:
            function: shipped by value if its module is registered for that, else by name.
            args: its arguments.
            timeout_s: seconds that this request may take; the agent's if None. The function itself is not interrupted.

        Raises:
            PlacementTimeoutError: no answer by then.
            Exception: what the function raised.
        """
        returned: _T = self._ask("run", function, *args, timeout_s=timeout_s)
        return returned

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        try:
            agent = _handle(self.node_id)
            for pause in PAUSES_S:
                try:
                    return _request(agent, method, *args, timeout_s=max(0.0, deadline - time.monotonic()))
                except _GONE as error:
                    if isinstance(error, ray.exceptions.RayTaskError):
                        raise
                    died = not isinstance(error, ray.exceptions.ActorUnavailableError)
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                if died:
                    agent = _handle(self.node_id, instead_of=agent)
            return _request(agent, method, *args, timeout_s=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.RayTaskError:
            raise  # the function's own, whatever its class
        except ray.exceptions.GetTimeoutError as error:
            raise _late(self.node_id, method, limit) from error
        except ray.exceptions.RayError as error:
            raise _failed(self.node_id, method, error) from error


def new_lease_ids(count: int) -> list[str]:
    """Ids to lease ports under. The driver's: what was asked for and never answered can be given back too."""
    return [uuid.uuid4().hex for _ in range(count)]


def _request(agent: Any, method: str, *args: Any, timeout_s: float) -> Any:
    return ray.get(_send(agent, method, *args), timeout=timeout_s)


def _send(agent: Any, method: str, *args: Any) -> Any:
    return getattr(agent, method).remote(*args)


def run_on_nodes(
    function: Callable[..., _T], arguments: Mapping[str, Sequence[Any]], *, timeout_s: float = 60.0
) -> dict[str, _T | Exception]:
    """Call a function on several nodes at once: one request to each.

    Args:
        function: as of `NodeAgent.run`.
        arguments: the function's positional arguments, by node id.
        timeout_s: seconds that all requests together may take.

    Returns:
        By node id, what the function returned there; where it failed, the exception, not raised: one node that is gone
        does not hide what the others say.
    """
    return ask_nodes("run", {node_id: (function, *args) for node_id, args in arguments.items()}, timeout_s)


def usage_on_nodes(
    pids: Mapping[str, Sequence[int]], *, timeout_s: float = 60.0
) -> dict[str, list[ProcessUsage] | Exception]:
    """What processes on several nodes use, measured at once: one request to each node.

    Args:
        pids: the processes, by node id.
        timeout_s: seconds that all requests together may take.

    Returns:
        By node id, a list as of `NodeAgent.usage`; where that failed, the exception, not raised.
    """
    found = ask_nodes("usage", {node_id: (list(there),) for node_id, there in pids.items()}, timeout_s)
    return {
        node_id: rows if isinstance(rows, Exception) else [ProcessUsage(*row) for row in rows]
        for node_id, rows in found.items()
    }


def ask_nodes(method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, Any]:
    """The same request to several agents at once; by node id the answer or, not raised, the exception."""
    deadline = time.monotonic() + timeout_s
    asked = {node_id: _send(_handle(node_id), method, *args) for node_id, args in arguments.items()}
    refs = list(asked.values())
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    found: dict[str, Any] = {}
    for node_id, ref in asked.items():
        try:
            found[node_id] = ray.get(ref, timeout=0)
        except ray.exceptions.RayTaskError as error:
            found[node_id] = error  # the function's own, whatever its class
        except _GONE:
            # The agent was gone: the node may still be there, and a new agent too.
            left = max(0.0, deadline - time.monotonic())
            try:
                found[node_id] = NodeAgent(node_id)._ask(method, *arguments[node_id], timeout_s=left)
            except Exception as error:  # noqa: BLE001  whatever the function raises
                found[node_id] = error
        except ray.exceptions.GetTimeoutError:
            found[node_id] = _late(node_id, method, timeout_s)
        except ray.exceptions.RayError as error:
            found[node_id] = _failed(node_id, method, error)
    return found


def _failed(node_id: str, method: str, error: BaseException) -> PlacementError:
    return PlacementError(
        f"The agent of node {node_id} could not do {method!r}: {error}. If the node is gone, "
        "`replace_lost_nodes()` of its cluster reserves others."
    )


def _late(node_id: str, method: str, limit: float) -> PlacementTimeoutError:
    return PlacementTimeoutError(
        f"The agent of node {node_id} did not answer {method!r} within {limit:g} s. "
        "Its process may be starting on a very busy node: try again, or look at the node."
    )


def known_agents() -> list[NodeAgent]:
    """The agents this process has made or found and whose nodes are alive."""
    context = ray.get_runtime_context()
    here = (context.get_session_name(), context.get_job_id())
    alive = alive_nodes()
    with _lock:
        return [NodeAgent(node_id) for *where, node_id in _handles if tuple(where) == here and node_id in alive]

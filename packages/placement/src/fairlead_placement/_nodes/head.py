# SPDX-License-Identifier: Apache-2.0
"""Sends requests to Ray's head (its GCS) with a deadline, and reads what the cluster has and who holds it.

Ray itself waits without a limit for a head that hangs, and its waits cannot be interrupted. So each request runs on a
background thread, and may outlive the call. While one outlives it, requests like it wait for it and send nothing.
"""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group_table

from .._model import Node, group_pairs
from .._plan.topology import node_place, sort_nodes
from .._ray_private import connection, drain_deadlines, free_per_node, is_client, live_actors
from .._show import ResourceHolder
from ..exceptions import HeadTimeoutError, PlacementError
from .background import Job, run_in_thread

_T = TypeVar("_T")
# The limit of methods that have none of their own.
HEAD_S = 30.0
# A request gets this long even after the deadline: a reservation that takes only what is free now (0 s) makes some too.
LEAST_S = 0.9
# To report which nodes are alive, if the caller can do without the answer.
ALIVE_S = 5.0
_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("fairlead_head_deadline")
# Requests whose callers have stopped waiting, by their description.
_late: dict[str, Job[Any]] = {}
CLIENT_REMEDY = (
    "Run the driver on a node of the cluster, with address='host:port' of the cluster's head, or submit it as a job "
    "with `ray job submit`."
)


def refuse_client() -> None:
    """Raise a PlacementError if this process is connected to Ray through Ray Client."""
    if is_client():
        raise PlacementError(
            f"This process is connected to Ray through Ray Client, which Fairlead does not support. {CLIENT_REMEDY}"
        )


@contextlib.contextmanager
def head_deadline(timeout_s: float | None = None) -> Iterator[None]:
    """Give all requests to the head that this thread makes in a block one deadline. The earliest of nested ones counts.

    Args:
        timeout_s: seconds from now; None for `HEAD_S`. A single request gets at least `LEAST_S`, unless the head has
            been silent for that long.
    """
    until = time.monotonic() + (HEAD_S if timeout_s is None else timeout_s)
    token = _deadline.set(min(until, _deadline.get(until)))
    try:
        yield
    finally:
        _deadline.reset(token)


def head_is_silent(for_s: float = 0.0) -> bool:
    """Return whether a request whose caller has stopped waiting is under way, and has been for some seconds."""
    here, before = connection(), time.monotonic() - for_s
    return any(job.on is here and job.began <= before and not job.over.is_set() for job in [*_late.values()])


def ask_head(
    request: str,
    function: Callable[..., _T],
    *args: Any,
    timeout_s: float | None = None,
    undo: Callable[[_T], object] | None = None,
) -> _T:
    """Call a function that sends requests to Ray's head, and return what it returns.

    Args:
        request: names the request in the error, as a verb with its object.
        function: the function.
        args: its arguments.
        timeout_s: seconds to wait; None for what is left of `head_deadline`. Outside of it there is no limit, and the
            function runs on this thread.
        undo: reverts what the function did if it returns after this call has ended.

    Raises:
        HeadTimeoutError: the head did not answer in time. The function continues in the background.
        PlacementError: this process is connected through Ray Client, or Ray was shut down meanwhile.
        Exception: any exception of the function.
    """
    here, began = connection(), time.monotonic()
    if here is None:
        refuse_client()
    until = _deadline.get(None)
    if timeout_s is None and until is not None:
        timeout_s = max(0.0, until - began)
        if timeout_s < LEAST_S and not head_is_silent(LEAST_S):
            timeout_s = LEAST_S
    # Ray connects to a cluster on the main thread only.
    if timeout_s is None or not ray.is_initialized():
        return function(*args)
    ends = began + timeout_s

    try:
        late = _late.get(request)
        if late is not None and late.on is here and not late.over.is_set():
            # One caller waits for as long as another one: the head has been silent since the first of them asked.
            began = late.began
            if not late.over.wait(max(0.0, began + timeout_s - time.monotonic())):
                raise TimeoutError
        job = run_in_thread(function, *args, on=here)
        try:
            return job.result(max(0.0, ends - time.monotonic()), undo)
        except BaseException:
            if not job.over.is_set():
                for other in [name for name, other in [*_late.items()] if other.over.is_set()]:
                    _late.pop(other, None)
                _late[request] = job
            raise
    except ray.exceptions.RayTaskError:
        raise  # of a task, not of the head
    except (TimeoutError, ray.exceptions.RpcError) as error:
        raise HeadTimeoutError(
            f"Ray's head (GCS) did not answer a request to {request}; waited {time.monotonic() - began:.1f} s. Its "
            "process (gcs_server) may be stopped, overloaded or unreachable: look at the head node and the network to "
            "it, and try again."
        ) from error


def wait_until(done: Callable[[], object], deadline: float, *, longest_s: float = 0.1) -> bool:
    """Wait until a condition holds, with pauses that double up to `longest_s` seconds; return whether it does.

    `done` returns whether it holds, and is called once more at the deadline, which is by `time.monotonic`.
    """
    pause = min(0.01, longest_s)
    while not done():
        if (left := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest_s)
    return True


def alive_nodes(*, timeout_s: float | None = None) -> frozenset[str]:
    """Return the ids of the nodes that Ray considers alive, including those that are draining, as `ask_head` does."""
    rows = ask_head("list the nodes", ray.nodes, timeout_s=timeout_s)
    return frozenset(row["NodeID"] for row in rows if row["Alive"])


def choose_alive(node_ids: Iterable[str], *, timeout_s: float | None = None) -> list[str]:
    """Return the nodes that are alive; all of them if Ray's head does not answer within `timeout_s` (`ALIVE_S`)."""
    alive = None
    if not head_is_silent(LEAST_S):
        with contextlib.suppress(HeadTimeoutError):
            alive = alive_nodes(timeout_s=ALIVE_S if timeout_s is None else timeout_s)
    return [node_id for node_id in node_ids if alive is None or node_id in alive]


def read_nodes() -> tuple[Node, ...]:
    """Return the nodes that are alive and not draining, in physical order.

    Raises:
        PlacementError: Ray is not running.
        HeadTimeoutError: Ray's head did not answer within `head_deadline`.
    """
    if not ray.is_initialized():
        raise PlacementError("Ray is not running in this process. Call init_ray() or ray.init() first.")

    def read() -> tuple[list[Any], Mapping[str, float], Mapping[str, Mapping[str, float]]]:
        return ray.nodes(), drain_deadlines(), free_per_node()

    rows, leaving, free = ask_head("list the nodes and what is free there", read)
    nodes = {
        row["NodeID"]: Node(
            node_id=row["NodeID"],
            ip=row["NodeManagerAddress"],
            total=row["Resources"],
            # A node that has just joined is listed before Ray knows what is free there. Until then, nothing is.
            free=free.get(row["NodeID"], {}),
            labels=row.get("Labels") or {},
        )
        for row in rows
        if row["Alive"] and row["NodeID"] not in leaving
    }
    ordered = sort_nodes({node_id: node_place(node) for node_id, node in nodes.items()})
    return tuple(nodes[node_id] for _, node_id in ordered)


def read_holders() -> tuple[ResourceHolder, ...]:
    """Return the placement groups that hold resources, and the actors that do outside of any, as `ask_head` does."""
    groups, actors = ask_head("list who holds resources", lambda: (placement_group_table(), live_actors()))
    holders = []
    for group_id, row in groups.items():
        placed = group_pairs((node_id, row["bundles"][index]) for index, node_id in row["bundles_to_node_id"].items())
        bundles = {node_id: tuple(held) for node_id, held in placed.items() if node_id}
        if bundles and row["state"] != "REMOVED":
            # The id ends with that of the job. Only the state API reports it, which needs a dashboard.
            holders.append(ResourceHolder("placement group", row["name"], group_id, group_id[-8:], bundles))
    for actor in actors:
        # An actor in a placement group holds "CPU_group_...", which the group holds already.
        own = {what: amount for what, amount in actor.resources.items() if amount > 0 and "_group_" not in what}
        if own and actor.node_id:
            name = actor.name or actor.class_name
            holders.append(ResourceHolder("actor", name, actor.actor_id, actor.job_id, {actor.node_id: (own,)}))
    return tuple(holders)

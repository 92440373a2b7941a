# SPDX-License-Identifier: Apache-2.0
"""Runs functions on nodes: on threads where this process sees the node's processes itself, elsewhere in tasks.

A task needs no CPU, and starts even if all of them are taken. It is never repeated.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._ray_private import block_shutdown, collect, connection, list_raylets, start_task
from ..exceptions import PlacementError, PlacementTimeoutError
from .background import run_in_thread
from .head import ask_head, head_deadline, refuse_client

_K = TypeVar("_K")
_T = TypeVar("_T")


def run_on_nodes(
    function: Callable[..., _T], arguments: Mapping[str, Sequence[Any]], *, timeout_s: float = 60.0
) -> dict[str, _T | Exception]:
    """Call a function on several nodes at once.

    Where this process sees the processes of a node itself, the function runs on a thread of this process, without a
    request. Elsewhere it runs in a task without the environment of the job, which needs no CPU and takes up to a second
    to start. It is called once, whatever happens, and is not interrupted.

    Args:
        function: shipped by value if its module is registered for that, else by name.
        arguments: the function's positional arguments, by node id.
        timeout_s: seconds that all of it may take.

    Returns:
        By node id, what the function returned there, or the exception with which it failed, which is not raised.
    """
    refuse_client()
    deadline, here = time.monotonic() + timeout_s, find_here(arguments)
    jobs = {node_id: run_in_thread(function, *args) for node_id, args in arguments.items() if node_id in here}
    elsewhere = {node_id: args for node_id, args in arguments.items() if node_id not in here}
    answers: dict[str, Any] = run_in_tasks(function, elsewhere, timeout_s=max(0.0, deadline - time.monotonic()))
    for node_id, job in jobs.items():
        is_over = job.over.wait(max(0.0, deadline - time.monotonic()))
        error = job.future.exception() if is_over else ray.exceptions.GetTimeoutError()
        answers[node_id] = job.future.result() if error is None else _explain(function, node_id, timeout_s, error)
    return {node_id: answers[node_id] for node_id in arguments}


def find_here(node_ids: Iterable[str]) -> frozenset[str]:
    """Return those nodes whose processes this process sees by the same pids, and may read."""
    return _look_for(connection(), frozenset(node_ids))


@functools.lru_cache(maxsize=16)
def _look_for(_: object, node_ids: frozenset[str]) -> frozenset[str]:
    # A node that runs has a raylet, so a look is enough for its life.
    return node_ids.intersection(raylet.node_id for raylet in list_raylets())


def run_in_tasks(
    function: Callable[..., _T], arguments: Mapping[str, Sequence[Any]], *, timeout_s: float
) -> dict[str, _T | Exception]:
    """Call a function in a worker process of Ray on each node; else as `run_on_nodes`."""
    pins = {node_id: NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in arguments}
    options = {node_id: {"scheduling_strategy": pin} for node_id, pin in pins.items()}
    try:
        outcomes = run_tasks(function, arguments, options, timeout_s=timeout_s)
    except (PlacementError, ray.exceptions.RayError) as error:
        return dict.fromkeys(arguments, error)
    return {
        node_id: answer if error is None else _explain(function, node_id, timeout_s, error)
        for node_id, (answer, error) in outcomes.items()
    }


# Calls any other function, so that it is sent to the head once for each connection. A lambda is shipped by value.
_call: Any = ray.remote(lambda code, *args: ray.cloudpickle.loads(code)(*args))


def run_tasks(
    function: Callable[..., _T],
    arguments: Mapping[_K, Sequence[Any]],
    options: Mapping[_K, Mapping[str, Any]],
    *,
    timeout_s: float,
) -> dict[_K, tuple[Any, Exception | None]]:
    """Call a function in a task for each key, without the environment of the job; return each result with its error.

    The options are Ray's, besides `num_cpus=0`. Errors of late tasks are as for `collect`.
    """
    if not arguments:
        return {}
    deadline, code = time.monotonic() + timeout_s, ray.cloudpickle.dumps(function)
    tasks: dict[_K, Any] = {}

    def start() -> dict[_K, Any]:
        return {
            key: start_task(_call, (code, *args), num_cpus=0, max_retries=0, **options[key])
            for key, args in arguments.items()
        }

    try:
        with head_deadline(timeout_s):
            tasks.update(ask_head("send a function to nodes", start, undo=_drop).items())
        sends = {key: functools.partial(tasks.get, key) for key in tasks}
        return collect(sends, deadline - time.monotonic())
    finally:
        _drop(tasks)


def _drop(tasks: dict[Any, Any]) -> None:
    """Drop the references to tasks, while Ray cannot be shut down."""
    with block_shutdown():
        tasks.clear()


def _explain(function: Callable[..., Any], node_id: str, limit_s: float, error: BaseException) -> Exception:
    name = f"The function {getattr(function, '__name__', function)!r}"
    # sys.exit on a thread ends nothing else.
    if isinstance(error, ray.exceptions.WorkerCrashedError) or not isinstance(error, Exception):
        return PlacementError(
            f"{name} ended its process on node {node_id}. It was called once, and is not called again."
        )
    late = (
        f"{name} has not returned on node {node_id} within {limit_s:.3g} s. The node may be very busy, or its raylet "
        "stopped: try again, or look at the node."
    )
    return explain_failure(error, late, f"{name} could not run on node {node_id}")


def explain_failure(error: Exception, late: str, failed: str) -> Exception:
    """Return the error of a request to a node that says what to do; that of a function itself as it is."""
    # A function's own error is a RayTaskError, whatever its class.
    if isinstance(error, ray.exceptions.RayTaskError) or not isinstance(error, ray.exceptions.RayError):
        return error
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return PlacementTimeoutError(late)
    gone = "If the node is gone, `replace_lost_nodes()` of its cluster reserves others."
    return PlacementError(f"{failed}: {error}. {gone}")

# SPDX-License-Identifier: Apache-2.0
"""Functions run on given nodes of the cluster, all at once, without taking any of its resources."""

import functools
import importlib
import logging
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import _build, exceptions
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._ray_private import draining_nodes
from ..exceptions import VenvBuildError, VenvError, VenvTimeoutError

__all__ = ["alive_nodes", "on_nodes", "some"]

logger = logging.getLogger(__name__)

# fairlead-venvs need not be installed on the nodes: these modules travel with a task.
SHIPPED = (
    exceptions,
    *(importlib.import_module(f"{_build.__name__}.{module.name}") for module in pkgutil.iter_modules(_build.__path__)),
)
# How long a node that has to answer for itself may take longer than the driver waits for it, and to end what it does.
GRACE_S = 2.0


def some(labels: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    named = list(labels)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def alive_nodes(nodes: Sequence[str] | None = None) -> dict[str, str]:
    """Return the names for people of the nodes that can run a task, or of the given ones, by id.

    A node that is draining starts no tasks any more: it is left out, and a warning names it.

    Raises:
        ValueError: Ray does not run here, a given node is not alive or is draining, or all nodes are draining.
    """
    import ray

    if not ray.is_initialized():
        raise ValueError("this needs a running Ray: call ray.init() first, or create_local_venv for this machine alone")
    alive = {row["NodeID"]: f"{row['NodeManagerAddress']} ({row['NodeID'][:8]})" for row in ray.nodes() if row["Alive"]}
    leaving = draining_nodes() & alive.keys()
    if nodes is None:
        if leaving:
            logger.warning("Skipped %s: draining nodes start no tasks.", some(alive[node] for node in sorted(leaving)))
        staying = {node: name for node, name in alive.items() if node not in leaving}
        if not staying:
            raise ValueError("All nodes of the cluster are draining. Wait for a node that stays, and try again.")
        return staying
    if isinstance(nodes, str) or not nodes:
        raise ValueError(f"nodes must be a list of node ids, with one at least, got {nodes!r}")
    if unknown := [node for node in nodes if node not in alive]:
        raise ValueError(f"no nodes that are alive have the ids {unknown}; these have {sorted(alive)}")
    if going := [alive[node] for node in nodes if node in leaving]:
        raise ValueError(f"{some(going)}: a draining node starts no tasks. Leave it out of `nodes`.")
    return {node: alive[node] for node in nodes}


def on_nodes(
    calls: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]],
    labels: Mapping[str, str],
    *,
    doing: str,
    deadline: Deadline,
    seen: Callable[[Sequence[int]], None] | None = None,
) -> list[Outcome | VenvError | None]:
    """Answers of functions that run on nodes, all at once, in the order of the calls.

    Args:
        calls: node, one of `node_task`'s functions, arguments.
        labels: of the nodes.
        doing: what is done, for errors.
        deadline: for all of it. A node that has not answered by then has a VenvTimeoutError for an answer.
        seen: is called now and then with the numbers of the calls that are under way.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    refs = [
        # No CPU: a cluster that is full must not hold it up.
        _remote(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(*arguments)
        for node, function, arguments in calls
    ]
    numbers = {ref: number for number, ref in enumerate(refs)}
    pending = list(refs)
    end = time.monotonic() + deadline.left() + GRACE_S
    try:
        while pending and (left := end - time.monotonic()) > 0:
            _, pending = ray.wait(pending, num_returns=1 if seen else len(pending), timeout=min(left, 1.0))
            if seen is not None:
                seen([numbers[ref] for ref in pending])
    finally:
        _cancel(pending)
    late = set(pending)
    return [
        VenvTimeoutError(doing, deadline.timeout_s, labels[node]) if ref in late else _answer(ref, labels[node])
        for ref, (node, _, _) in zip(refs, calls, strict=True)
    ]


def _cancel(refs: Sequence[Any]) -> None:
    """End what runs. It is interrupted first, so that it ends what it has started: a process that is killed cannot."""
    import ray

    for ref in refs:
        ray.cancel(ref)
    _, stubborn = ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_S) if refs else ([], [])
    for ref in stubborn:
        ray.cancel(ref, force=True)


@functools.cache
def _remote(function: Callable[..., Any]) -> Any:
    """A task of the function, which brings along what the function needs.

    Its modules are pickled by value, but not registered for that: an error of this package that a user's actor raises
    has to arrive as the class that the caller knows.
    """
    import ray

    for module in SHIPPED:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        pickled = ray.cloudpickle.dumps(function)
    finally:
        for module in SHIPPED:
            ray.cloudpickle.unregister_pickle_by_value(module)
    unpickled: list[Callable[..., Any]] = []

    def shipped(*arguments: Any) -> Any:
        if not unpickled:  # once in each process
            import pickle

            unpickled.append(pickle.loads(pickled))
        return unpickled[0](*arguments)

    return ray.remote(num_cpus=0, max_retries=0)(shipped)


def _answer(ref: Any, label: str) -> Outcome | VenvError | None:
    import ray

    try:
        answer = ray.get(ref)
    except ray.exceptions.RayError as error:
        reason = (
            f"the node could not do it ({type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]})"
        )
        return VenvBuildError(reason, node=label)
    if answer[0] == "failed":
        *arguments, _ = answer[2]
        kind: type[VenvError] = getattr(exceptions, answer[1])
        return kind(*arguments, label)
    return None if answer[0] == "absent" else Outcome(*answer[1:])

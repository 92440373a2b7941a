# SPDX-License-Identifier: Apache-2.0
"""Runs functions on given nodes of the cluster, all at once, without using any of its resources."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .. import _build, exceptions
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._ray_private import draining_nodes
from ..exceptions import VenvBuildError, VenvError, VenvTimeoutError

__all__ = ["Call", "abbreviate", "alive_nodes", "pickle_by_value", "run_on_nodes"]

logger = logging.getLogger(__name__)

# This module and the modules of this folder are sent with a task, as nodes need not have fairlead-venvs.
SHIPPED = (exceptions, _build)
# The seconds that a node gets after the deadline: to report its own timeout, and to end its processes.
GRACE_S = 2.0

Key = TypeVar("Key")
# A node, one of `node_task`'s functions, and its arguments.
Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


def abbreviate(labels: Iterable[str]) -> str:
    """Return the first three labels, and the number of the others."""
    named = list(labels)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def alive_nodes(nodes: Sequence[str] | None = None) -> dict[str, str]:
    """Return the labels of the nodes that can run a task, or of the given nodes, by their ids.

    A draining node starts no more tasks. It is left out, and a warning names it.

    Raises:
        ValueError: Ray is not running, a given node is not alive or is draining, or all nodes are draining.
    """
    import ray

    if not ray.is_initialized():
        raise ValueError("this needs a running Ray: call ray.init() first, or create_local_venv for this machine alone")
    alive = {row["NodeID"]: f"{row['NodeManagerAddress']} ({row['NodeID'][:8]})" for row in ray.nodes() if row["Alive"]}
    leaving = draining_nodes() & alive.keys()
    if nodes is None:
        if leaving:
            skipped = abbreviate(alive[node] for node in sorted(leaving))
            logger.warning("Skipped %s: draining nodes start no tasks.", skipped)
        staying = {node: name for node, name in alive.items() if node not in leaving}
        if not staying:
            raise ValueError("All nodes of the cluster are draining. Wait for a node that stays, and try again.")
        return staying
    if isinstance(nodes, str) or not nodes:
        raise ValueError(f"nodes must be a list of node ids, with one at least, got {nodes!r}")
    if unknown := [node for node in nodes if node not in alive]:
        raise ValueError(f"no nodes that are alive have the ids {unknown}; these have {sorted(alive)}")
    if going := [alive[node] for node in nodes if node in leaving]:
        raise ValueError(f"{abbreviate(going)}: a draining node starts no tasks. Leave it out of `nodes`.")
    return {node: alive[node] for node in nodes}


def run_on_nodes(
    calls: Mapping[Key, Call],
    labels: Mapping[str, str],
    *,
    doing: str,
    deadline: Deadline,
    report: Callable[[Sequence[Key]], None] | None = None,
) -> dict[Key, Outcome | VenvError | None]:
    """Run functions on nodes, all at once, and return their answers.

    Args:
        calls: the calls by keys of the caller's choice.
        labels: names of the nodes for errors, by node.
        doing: what the functions do, for errors.
        deadline: for all of them. The answer of a node that is late is a VenvTimeoutError.
        report: is called repeatedly with the keys of the calls that have no answer yet.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    keys = {
        # The task needs no CPU, so a full cluster does not delay it.
        _make_task(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(*arguments): key
        for key, (node, function, arguments) in calls.items()
    }
    pending = list(keys)
    end = time.monotonic() + deadline.left() + GRACE_S
    try:
        while pending and (left := end - time.monotonic()) > 0:
            _, pending = ray.wait(pending, num_returns=1 if report else len(pending), timeout=min(left, 1.0))
            if report is not None:
                report([keys[ref] for ref in pending])
    finally:
        _cancel(pending)
    late = set(pending)
    return {
        key: VenvTimeoutError(doing, deadline.timeout_s, label) if ref in late else _fetch(ref, label)
        for ref, key in keys.items()
        for label in [labels[calls[key][0]]]
    }


def _cancel(refs: Sequence[Any]) -> None:
    """End tasks. A task is interrupted first, so that it ends its processes; a task that is killed cannot do that."""
    import ray

    for ref in refs:
        ray.cancel(ref)
    _, stubborn = ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_S) if refs else ([], [])
    for ref in stubborn:
        ray.cancel(ref, force=True)


def pickle_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function with the modules that it needs.

    The modules are registered for pickling by value only meanwhile. Otherwise an error that a user's actor raises would
    arrive as another class than the one that the caller knows.
    """
    import ray

    for module in SHIPPED:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        return ray.cloudpickle.dumps(function)  # type: ignore[no-any-return]
    finally:
        for module in SHIPPED:
            ray.cloudpickle.unregister_pickle_by_value(module)


@functools.cache
def _make_task(function: Callable[..., Any]) -> Any:
    """Return a Ray task of a function, which contains the modules that the function needs."""
    import ray

    pickled = pickle_by_value(function)
    unpickled: list[Callable[..., Any]] = []

    def shipped(*arguments: Any) -> Any:
        if not unpickled:  # once in each process
            import pickle

            unpickled.append(pickle.loads(pickled))
        return unpickled[0](*arguments)

    return ray.remote(num_cpus=0, max_retries=0)(shipped)


def _fetch(ref: Any, label: str) -> Outcome | VenvError | None:
    import ray

    try:
        answer = ray.get(ref)
    except ray.exceptions.RayError as error:
        message = (str(error).strip() or "no message").splitlines()[0]
        return VenvBuildError(f"the task on the node failed ({type(error).__name__}: {message})", node=label)
    if answer[0] == "failed":
        *arguments, _ = answer[2]
        kind: type[VenvError] = getattr(exceptions, answer[1])
        return kind(*arguments, label)
    return None if answer[0] == "absent" else Outcome(*answer[1:])

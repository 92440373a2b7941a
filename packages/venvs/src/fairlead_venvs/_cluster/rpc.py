# SPDX-License-Identifier: Apache-2.0
"""Runs functions on given nodes of the cluster, all at once, without using any of its resources."""

import functools
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import _build, exceptions
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._ray_private import draining_nodes, dumps_by_value, is_client
from ..exceptions import VenvBuildError, VenvError, VenvTimeoutError

logger = logging.getLogger(__name__)

# The seconds that a node gets after the deadline: to report its own timeout, and to end its processes.
GRACE_S = 2.0
CLIENT_REMEDY = (
    "Run the driver on a node of the cluster, with address='host:port' of the cluster's head, or submit it as a job "
    "with `ray job submit`."
)

Key = TypeVar("Key")
# A node, one of `node_task`'s functions, and its arguments.
Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


def abbreviate(labels: Iterable[str]) -> str:
    """Return the first three labels, and the number of the others."""
    named = list(labels)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


@dataclass(frozen=True)
class Nodes:
    """The nodes of one request: their names for errors, by Ray's id, and whether the caller has named them."""

    labels: Mapping[str, str]
    given: bool

    def without_draining(self) -> "Nodes":
        """Return the nodes that can start a task. A warning names the others; a named one is a ValueError."""
        import ray

        leaving = draining_nodes() & self.labels.keys()
        if not self.given:
            # A draining node may be gone by the time at which its refusal is read.
            leaving |= self.labels.keys() - {row["NodeID"] for row in ray.nodes() if row["Alive"]}
        named = abbreviate(self.labels[node] for node in sorted(leaving))
        if leaving and self.given:
            raise ValueError(f"{named}: a draining node starts no tasks. Leave it out of `nodes`.")
        if leaving == self.labels.keys():
            raise ValueError(
                "All nodes of the cluster are draining or lost. Wait for a node that stays, and try again."
            )
        if leaving:
            logger.warning("Skipped %s: draining and lost nodes start no tasks.", named)
        return Nodes({node: name for node, name in self.labels.items() if node not in leaving}, self.given)


def alive_nodes(nodes: Sequence[str] | None = None) -> Nodes:
    """Return the nodes that are alive, or the given ones, with one request to Ray's head."""
    import ray

    if is_client():
        raise VenvError(
            f"This process is connected to Ray through Ray Client, which Fairlead does not support. {CLIENT_REMEDY}"
        )
    if not ray.is_initialized():
        raise ValueError("this needs a running Ray: call ray.init() first, or create_local_venv for this machine alone")
    alive = {row["NodeID"]: f"{row['NodeManagerAddress']} ({row['NodeID'][:8]})" for row in ray.nodes() if row["Alive"]}
    if nodes is None:
        return Nodes(alive, given=False)
    if isinstance(nodes, str) or not nodes:
        raise ValueError(f"nodes must be a list of node ids, with one at least, got {nodes!r}")
    if unknown := [node for node in nodes if node not in alive]:
        raise ValueError(f"no nodes that are alive have the ids {unknown}; these have {sorted(alive)}")
    return Nodes({node: alive[node] for node in nodes}, given=True)


def run_on_nodes(
    calls: Mapping[Key, Call],
    nodes: Nodes,
    *,
    doing: str,
    deadline: Deadline,
    report: Callable[[Sequence[Key]], None] | None = None,
) -> dict[Key, Outcome | VenvError | None]:
    """Run functions on nodes, all at once; return answers by key, without draining nodes. `report` gets open keys."""
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
        # A task is interrupted first, so that it ends its processes; a task that is killed cannot do that.
        for ref in pending:
            ray.cancel(ref)
        _, stubborn = ray.wait(pending, num_returns=len(pending), timeout=GRACE_S) if pending else ([], [])
        for ref in stubborn:
            ray.cancel(ref, force=True)
    late = set(pending)
    answers: dict[Key, Outcome | VenvError | None] = {}
    refused: list[Key] = []
    for ref, key in keys.items():
        label = nodes.labels[calls[key][0]]
        if ref in late:
            answers[key] = VenvTimeoutError(doing, deadline.timeout_s, label)
            continue
        try:
            answers[key] = _read_answer(ray.get(ref), label)
        except ray.exceptions.RayError as error:
            refused += [key] if isinstance(error, ray.exceptions.TaskUnschedulableError) else []
            message = (str(error).strip() or "no message").splitlines()[0]
            reason = f"the task on the node failed ({type(error).__name__}: {message})"
            answers[key] = VenvBuildError(reason, node=label)
    if refused:
        staying = nodes.without_draining().labels
        answers = {key: answer for key, answer in answers.items() if calls[key][0] in staying}
    return answers


def pickle_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function with the functions and classes that it needs, as nodes need not have fairlead-venvs."""
    shipped = (_build.__name__, exceptions.__name__)
    return dumps_by_value(function, lambda module: module in shipped or module.startswith(f"{_build.__name__}."))


@functools.cache
def _make_task(function: Callable[..., Any]) -> Any:
    """Return a Ray task of a function, which contains the modules that the function needs."""
    import ray

    pickled = pickle_by_value(function)
    unpickled: list[Callable[..., Any]] = []

    def shipped(*arguments: Any) -> Any:
        if not unpickled:  # once in each process
            unpickled.append(pickle.loads(pickled))
        return unpickled[0](*arguments)

    return ray.remote(num_cpus=0, max_retries=0)(shipped)


def _read_answer(answer: tuple[Any, ...], label: str) -> Outcome | VenvError | None:
    if answer[0] == "failed":
        *arguments, _ = answer[2]
        kind: type[VenvError] = getattr(exceptions, answer[1])
        return kind(*arguments, label)
    return None if answer[0] == "absent" else Outcome(*answer[1:])

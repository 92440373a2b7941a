# SPDX-License-Identifier: Apache-2.0
"""Environments on the nodes of a Ray cluster: look on every node, then build where one is missing."""

import dataclasses
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import _node, exceptions
from ._lock import Plan, plan_venv
from ._node.build import Outcome, build_here, look_here
from ._node.uv import Deadline, start_deadline
from ._progress import Status
from ._ray_private import draining_nodes, is_client
from ._spec import VenvSpec, as_spec
from .exceptions import VenvBuildError, VenvError, VenvNodesError, VenvTimeoutError

logger = logging.getLogger(__name__)

CLIENT_REMEDY = (
    "Run the driver on a node of the cluster, with address='host:port' of the cluster's head, or submit it as a job "
    "with `ray job submit`."
)
# A node that does not look within so many seconds, or half the time, is asked to build, which begins with a look.
LOOK_S = 60.0
# The seconds that a node gets after the deadline: to report its own timeout, and to end its processes.
GRACE_S = 2.0
_SHIPPING = threading.Lock()
# An environment and a node.
Key = tuple[str, str]
Answers = dict[Key, Outcome | VenvError | None]


def create_local_venv_on_each_node(
    py_executable: str | VenvSpec,
    venv_name: str | None = None,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
    progress: bool = True,
) -> str:
    """Return the interpreter of an environment on every node, and build it on all nodes where it is missing.

    Each node runs a task that needs no CPU and no placement group, so a full cluster does not delay it. The driver
    sends the lock, and the files that only it has; a node needs only uv beside its Ray.

    Args:
        py_executable: a spec, or a command such as "uv run --locked --extra vllm --directory X".
        venv_name: first part of the folder's name, a plain word; by default the project's name.
        nodes: Ray's ids of some nodes, such as one that has just joined; by default all alive nodes.
        timeout_s: for everything together, in seconds.
        progress: show a status line on a terminal.

    Returns:
        Path of `bin/python`, the same on all nodes: the driver's folder (`FAIRLEAD_VENV_DIR`) is used on each.

    Raises:
        TypeError, ValueError: the arguments do not describe an environment or a time limit; Ray is not running; a node
            is not alive.
        VenvBuildError: nothing satisfies the requirements, or the lock does not match. No node has built anything.
        VenvNodesError: the build failed on some nodes. It has the error of each; the other nodes have the environment.
    """
    (python,) = ensure_venvs([py_executable], venv_name=venv_name, nodes=nodes, timeout_s=timeout_s, progress=progress)
    return python


def ensure_venvs(
    py_executables: Iterable[str | VenvSpec],
    *,
    venv_name: str | None = None,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
    progress: bool = True,
) -> list[str]:
    """Do the same as `create_local_venv_on_each_node` for several specs at once; equal content is built once.

    Returns:
        Paths of the interpreters, in the order of the specs.

    Raises:
        As `create_local_venv_on_each_node`.
    """
    specs = [as_spec(spec) for spec in py_executables]
    with Status(shown=progress) as status:
        deadline = start_deadline(timeout_s, status.update)
        labels = alive_nodes(nodes)
        plans = [plan_venv(spec, venv_name, deadline) for spec in specs]
        provide(plans, labels, deadline)
    return [f"{plan.recipe.folder}/bin/python" for plan in plans]


def alive_nodes(nodes: Sequence[str] | None = None) -> Mapping[str, str]:
    """Return the names of the nodes that can start tasks, or of the given ones, by Ray's id."""
    import ray

    if is_client():
        raise VenvError(
            f"This process is connected to Ray through Ray Client, which Fairlead does not support. {CLIENT_REMEDY}"
        )
    if not ray.is_initialized():
        raise ValueError("this needs a running Ray: call ray.init() first, or create_local_venv for this machine alone")
    alive = {row["NodeID"]: f"{row['NodeManagerAddress']} ({row['NodeID'][:8]})" for row in ray.nodes() if row["Alive"]}
    if nodes is not None and (isinstance(nodes, str) or not nodes):
        raise ValueError(f"nodes must be a list of node ids, with one at least, got {nodes!r}")
    if unknown := [node for node in nodes or () if node not in alive]:
        raise ValueError(f"no nodes that are alive have the ids {unknown}; these have {sorted(alive)}")
    chosen = alive if nodes is None else {node: alive[node] for node in nodes}
    leaving = draining_nodes() & chosen.keys()
    named = abbreviate(chosen[node] for node in sorted(leaving))
    if leaving and (nodes is not None or leaving == chosen.keys()):
        raise ValueError(
            f"{named}: a draining node starts no tasks. Leave it out of `nodes`, or wait for another node."
        )
    if leaving:
        logger.warning("Skipped %s: draining nodes start no tasks.", named)
    return {node: name for node, name in chosen.items() if node not in leaving}


def abbreviate(labels: Iterable[str]) -> str:
    """Return the first three labels, and the number of the others."""
    named = list(labels)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def provide(plans: Iterable[Plan], labels: Mapping[str, str], deadline: Deadline) -> dict[Key, Outcome]:
    """Make environments ready on nodes; return each by its folder and the node. Failures are one VenvNodesError."""
    import ray

    distinct = {plan.recipe.folder: plan for plan in plans}
    facts = {folder: (plan.recipe.fingerprint, plan.recipe.shared) for folder, plan in distinct.items()}
    platforms = {folder: plan.recipe.platform for folder, plan in distinct.items()}
    looks = {
        (folder, node): (look_here, platforms[folder], folder, *facts[folder]) for folder in distinct for node in labels
    }
    # A node that does not answer must not take the time in which the others build.
    looking = Deadline(min(deadline.left() / 2, LOOK_S))
    answers = run_on_nodes(looks, labels, "looking for the environment", looking)
    missing = [key for key, answer in answers.items() if answer is None or isinstance(answer, VenvTimeoutError)]
    # Each file is stored once for all nodes.
    files = {
        folder: {name: ray.put(content) for name, content in distinct[folder].read_files()}
        for folder in dict.fromkeys(folder for folder, _ in missing)
    }
    builds = {
        key: (build_here, dataclasses.asdict(distinct[key[0]].recipe), files[key[0]], deadline.left())
        for key in missing
    }

    answers |= run_on_nodes(builds, labels, "building the environment", deadline)
    errors = {key: answer for key, answer in answers.items() if isinstance(answer, VenvError)}
    if errors:
        where = abbreviate(dict.fromkeys(labels[node] for _, node in errors))
        raise VenvNodesError(
            f"{len(errors)} of {len(answers)} environments are not ready, on {where}", list(errors.values())
        )
    return {key: answer for key, answer in answers.items() if isinstance(answer, Outcome)}


def run_on_nodes(
    calls: Mapping[Key, tuple[Any, ...]],
    labels: Mapping[str, str],
    doing: str,
    deadline: Deadline,
) -> Answers:
    """Run functions on nodes, all at once, without using their resources; return the answers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    keys = {}
    for (name, node), (function, *arguments) in calls.items():
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        keys[_make_task(function).options(scheduling_strategy=affinity).remote(*arguments)] = (name, node)
    pending = list(keys)
    end = time.monotonic() + deadline.left() + GRACE_S
    try:
        while pending and (left := end - time.monotonic()) > 0:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=min(left, 1.0))
            if deadline.show is not None and pending:
                waiting = abbreviate(labels[keys[ref][1]] for ref in pending)
                deadline.show(f"{doing}: {len(keys) - len(pending)} of {len(keys)}, waiting for {waiting}")
    finally:
        # A task is interrupted first, so that it ends its processes; a task that is killed cannot do that.
        for ref in pending:
            ray.cancel(ref)
        _, stubborn = ray.wait(pending, num_returns=len(pending), timeout=GRACE_S) if pending else ([], [])
        for ref in stubborn:
            ray.cancel(ref, force=True)
    late = set(pending)
    answers: Answers = {}
    for ref, key in keys.items():
        label = labels[key[1]]
        try:
            answers[key] = (
                VenvTimeoutError(doing, deadline.timeout_s, label) if ref in late else _read(ray.get(ref), label)
            )
        except ray.exceptions.RayError as error:
            message = (str(error).strip() or "no message").splitlines()[0]
            reason = f"the task on the node failed ({type(error).__name__}: {message})"
            answers[key] = VenvBuildError(reason, node=label)
    return answers


def _read(answer: tuple[Any, ...], label: str) -> Outcome | VenvError | None:
    if answer[0] == "failed":
        *arguments, _ = answer[2]
        kind: type[VenvError] = getattr(exceptions, answer[1])
        return kind(*arguments, label)
    return None if answer[0] == "absent" else Outcome(*answer[1:])


@functools.cache
def _make_task(function: Callable[..., Any]) -> Any:
    """Return a Ray task of a function, which contains the modules of this package that it needs."""
    import ray

    shipped = (_node, exceptions)
    # Registered for a moment only: an error that a user's actor raises has to arrive as the class that callers know.
    with _SHIPPING:
        for module in shipped:
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            pickled = ray.cloudpickle.dumps(function)
        finally:
            for module in shipped:
                ray.cloudpickle.unregister_pickle_by_value(module)
    unpickled: list[Callable[..., Any]] = []

    def run(*arguments: Any) -> Any:
        if not unpickled:  # once in each process
            unpickled.append(pickle.loads(pickled))
        return unpickled[0](*arguments)

    return ray.remote(num_cpus=0, max_retries=0)(run)

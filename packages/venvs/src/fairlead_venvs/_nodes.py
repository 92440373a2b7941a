# SPDX-License-Identifier: Apache-2.0
"""Create environments: on this machine, or on the nodes of a Ray cluster that lack them."""

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import _node, exceptions
from ._lock import Plan, VenvSpec, as_spec, plan_venv
from ._node.build import Answer, Outcome, ensure_here, ensure_venv
from ._node.uv import Deadline
from ._ray_private import draining_nodes, is_client
from .exceptions import VenvBuildError, VenvError, VenvNodesError, VenvTimeoutError

logger = logging.getLogger(__name__)

# A node that does not look within so many seconds, or half the time, is asked to build, which begins with a look.
LOOK_S = 60.0
# The seconds that a node gets after the deadline: to report its own timeout, and to end its processes.
GRACE_S = 2.0
_SHIPPING = threading.Lock()
# The folder of an environment, and the id of a node.
Key = tuple[str, str]
Answers = dict[Key, Outcome | VenvError | None]


def create_local_venv(
    py_executable: str | VenvSpec, venv_name: str | None = None, force_rebuild: bool = False, timeout_s: float = 1800
) -> str:
    """Return the interpreter of an environment on this machine, and build it first if it is missing. Needs no cluster.

    Args:
        py_executable: a spec, or a command such as "uv run --locked --extra vllm --directory X".
        venv_name: first part of the folder's name, a plain word; by default "venv".
        force_rebuild: resolve the requirements and build it again. It replaces the existing environment, or is a
            second one if other versions satisfy the requirements now; later calls use the new versions.
        timeout_s: for everything together, in seconds.

    Returns:
        Path of `bin/python`.

    Raises:
        TypeError, ValueError: the arguments do not describe an environment, or a time limit.
        VenvBuildError: the build failed. The error has the output of uv.
        VenvTimeoutError: the environment was not ready in time.
        UvUnavailableError: there is no uv, or it is too old.
    """
    spec = as_spec(py_executable)
    deadline = Deadline(timeout_s)
    plan = plan_venv(spec, venv_name, deadline, refresh=force_rebuild)
    return ensure_venv(plan.recipe, plan.read_files, deadline, force=force_rebuild).python


def create_local_venv_on_each_node(
    py_executable: str | VenvSpec,
    venv_name: str | None = None,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
) -> str:
    """Return the interpreter of an environment on every node, and build it on all nodes where it is missing.

    Args:
        py_executable: as for `create_local_venv`, as `venv_name`.
        nodes: Ray's ids of some nodes, such as one that has just joined; by default all alive ones.
        timeout_s: for everything together, in seconds.

    Returns:
        Path of `bin/python`, the same on all nodes: the driver's folder (`FAIRLEAD_VENV_DIR`) is used on each.

    Raises:
        TypeError, ValueError: the arguments do not describe an environment or a time limit; Ray is not running; a node
            is not alive.
        VenvBuildError: nothing satisfies the requirements, or the lock does not match. No node has built anything.
        VenvNodesError: the build failed on some nodes. It has the error of each; the other nodes have the environment.
    """
    (python,) = ensure_venvs([py_executable], venv_name=venv_name, nodes=nodes, timeout_s=timeout_s)
    return python


def ensure_venvs(
    py_executables: Iterable[str | VenvSpec],
    *,
    venv_name: str | None = None,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
) -> list[str]:
    """Do the same as `create_local_venv_on_each_node` for several specs at once; equal content is built once.

    Returns:
        Paths of the interpreters, in the order of the specs.
    """
    specs = [as_spec(spec) for spec in py_executables]
    deadline, labels = Deadline(timeout_s), alive_nodes(nodes)
    plans = [plan_venv(spec, venv_name, deadline) for spec in specs]
    raise_errors(provide(plans, labels, deadline), labels)
    return [f"{plan.recipe.folder}/bin/python" for plan in plans]


def alive_nodes(nodes: Sequence[str] | None = None) -> Mapping[str, str]:
    """Return the names of the nodes that can start tasks, or of the given ones, by Ray's id."""
    import ray

    if is_client():
        raise VenvError(
            "This process is connected to Ray through Ray Client, which Fairlead does not support. Run the driver on a "
            "node of the cluster, with address='host:port' of the cluster's head, or submit it as a job with "
            "`ray job submit`."
        )
    if not ray.is_initialized():
        raise ValueError("this needs a running Ray: call ray.init() first, or create_local_venv for this machine alone")
    alive = {row["NodeID"]: f"{row['NodeManagerAddress']} ({row['NodeID'][:8]})" for row in ray.nodes() if row["Alive"]}
    leaving = draining_nodes() & alive.keys()
    staying = {node: name for node, name in alive.items() if node not in leaving}
    if nodes is not None and (not nodes or not staying.keys() >= set(nodes)):
        raise ValueError(f"nodes must be ids of nodes that are alive and not draining, {list(staying)}, got {nodes!r}")
    if nodes is None and leaving:
        logger.warning("Skipped %s: draining nodes start no tasks.", abbreviate(alive[node] for node in leaving))
    return {node: staying[node] for node in nodes or staying}


def abbreviate(labels: Iterable[str]) -> str:
    """Return the first three labels, and the number of the others."""
    named = list(labels)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def provide(plans: Iterable[Plan], labels: Mapping[str, str], deadline: Deadline) -> Answers:
    """Make environments ready on nodes; return each, or an error, by its folder and the node."""
    import ray

    distinct = {plan.recipe.folder: plan for plan in plans}
    recipes = {folder: dataclasses.asdict(plan.recipe) for folder, plan in distinct.items()}
    looks = {(folder, node): (ensure_here, recipes[folder], None, LOOK_S) for folder in distinct for node in labels}
    # A node that does not answer must not take the time in which the others build.
    looking = Deadline(min(max(1.0, deadline.left() / 2), LOOK_S))
    answers = run_on_nodes(looks, "looking for the environment", looking)
    missing = [key for key, answer in answers.items() if answer is None or isinstance(answer, VenvTimeoutError)]
    # The files are stored once for all nodes.
    files = {folder: ray.put(distinct[folder].read_files()) for folder in dict.fromkeys(f for f, _ in missing)}
    builds = {key: (ensure_here, recipes[key[0]], files[key[0]], max(1.0, deadline.left())) for key in missing}
    return answers | run_on_nodes(builds, "building the environment", deadline)


def raise_errors(answers: Answers, labels: Mapping[str, str]) -> None:
    """Raise one VenvNodesError if there are errors among the answers."""
    errors = {key: answer for key, answer in answers.items() if isinstance(answer, VenvError)}
    for (_, node), error in errors.items():
        error.node = labels[node]
    if errors:
        where = abbreviate(dict.fromkeys(labels[node] for _, node in errors))
        summary = f"{len(errors)} of {len(answers)} environments are not ready, on {where}"
        raise VenvNodesError(summary, list(errors.values()))


def run_on_nodes(calls: Mapping[Key, tuple[Any, ...]], doing: str, deadline: Deadline) -> Answers:
    """Run functions on nodes, all at once, without using their resources; return the answers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    keys: dict[Any, Key] = {}
    with _shipping():
        for key, (function, *arguments) in calls.items():
            affinity = NodeAffinitySchedulingStrategy(key[1], soft=False)
            keys[_make_task(function).options(scheduling_strategy=affinity).remote(*arguments)] = key
    pending = list(keys)
    try:
        if keys:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=deadline.left() + GRACE_S)
    finally:
        # A task is interrupted, so that it ends its processes; a task that is killed cannot do that.
        for ref in pending:
            ray.cancel(ref)
    answers: Answers = {key: VenvTimeoutError(doing, deadline.timeout_s) for key in keys.values()}
    for ref in keys.keys() - set(pending):
        try:
            kind, arguments = ray.get(ref)
            answers[keys[ref]] = getattr(exceptions, kind, Outcome)(*arguments) if kind else None
        except ray.exceptions.RayError as error:
            message = (str(error).strip() or "no message").splitlines()[0]
            answers[keys[ref]] = VenvBuildError(f"the task on the node failed ({type(error).__name__}: {message})")
    return answers


@functools.cache
def _make_task(function: Callable[..., Answer]) -> Any:
    import ray

    return ray.remote(num_cpus=0, max_retries=0)(function)


@contextlib.contextmanager
def _shipping() -> Iterator[None]:
    """Let the tasks that are first called in the context contain the modules of this package that they need."""
    import ray

    # Registered for a moment only: an error that a user's actor raises has to arrive as the class that callers know.
    with _SHIPPING:
        for module in (_node, exceptions):
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in (_node, exceptions):
                ray.cloudpickle.unregister_pickle_by_value(module)

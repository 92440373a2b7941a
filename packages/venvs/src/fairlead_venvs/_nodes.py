# SPDX-License-Identifier: Apache-2.0
"""Environments on the nodes of a Ray cluster: one task for each, wherever there is room or none."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _build, _install, _layout, _node_task, _publish, _recipe, _redact, _uv, exceptions
from ._local import as_spec, checked_seconds
from ._plan import Plan, planned
from ._progress import Bars
from ._recipe import Outcome
from ._spec import VenvSpec
from ._uv import Deadline
from .exceptions import VenvBuildError, VenvError, VenvNodesError, VenvTimeoutError

__all__ = ["alive_nodes", "create_local_venv_on_each_node", "ensure_on_nodes", "ensure_venvs", "on_nodes"]

# fairlead-venvs need not be installed on the nodes.
SHIPPED = (_build, _install, _layout, _node_task, _publish, _recipe, _redact, _uv, exceptions)
# What travels through Ray's object store to each node that builds.
LIMIT_BYTES = 2 * 2**30
# How long a node that has to answer for itself may take longer than the driver waits for it.
GRACE_S = 2.0


def create_local_venv_on_each_node(
    py_executable: str | VenvSpec,
    venv_name: str | None = None,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
    progress: bool = True,
) -> str:
    """The interpreter of an environment on every node, built where it is not there, on all nodes at once.

    Each node is asked by a task that needs no CPU and no placement group, so a full cluster does not hold it up. What
    it needs (lock, wheels) travels with the task; a node needs uv beside its Ray, nothing else.

    Args:
        py_executable: what it is to hold: a spec, or a command, "uv run --locked --extra vllm --directory X".
        venv_name: first part of the folder's name, a plain word; by default the project's name.
        nodes: Ray's ids of some nodes, such as one that has just joined; by default all that are alive.
        timeout_s: for everything together, in seconds.
        progress: show bars on a terminal.

    Returns:
        Path of `bin/python`, the same on all nodes: the driver's folder (`FAIRLEAD_VENV_DIR`) is used on each.

    Raises:
        ValueError: nothing that could be built; no Ray; a node that is not there.
        VenvNodesError: nodes on which it went wrong, each with its own error. The others have it.
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
    """As `create_local_venv_on_each_node`, for several at once; those of equal content are built once.

    Returns:
        Paths of the interpreters, in the order of the specs.
    """
    outcomes = ensure_on_nodes(py_executables, venv_name, nodes=nodes, timeout_s=timeout_s, progress=progress)
    return [next(iter(one.values())).python for one in outcomes]


def ensure_on_nodes(
    py_executables: Iterable[str | VenvSpec],
    name: str | None = None,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
    progress: bool = True,
) -> list[dict[str, Outcome]]:
    """As `ensure_venvs`; what is known of each environment, by node."""
    specs = [as_spec(one) for one in py_executables]
    deadline = Deadline(checked_seconds("timeout_s", timeout_s))
    there = alive_nodes(nodes)
    with Bars(shown=progress) as bars:
        plans = [planned(spec, name, deadline=deadline, show=bars.line("wheels")) for spec in specs]
        distinct = {plan.recipe.folder: plan for plan in plans}
        done, errors = _looked(distinct, there, deadline, bars)
        missing = {folder: [node for node in there if node not in done[folder]] for folder in distinct}
        lost = {node for _, node in errors}
        missing = {folder: [node for node in some if node not in lost] for folder, some in missing.items()}
        errors |= _made(distinct, missing, there, done, deadline, bars)
    if errors:
        raise VenvNodesError(
            f"{len(errors)} of {len(distinct) * len(there)} environments are not ready, on "
            f"{_some(dict.fromkeys(there[node] for _, node in errors))}",
            list(errors.values()),
        )
    return [{node: done[plan.recipe.folder][node] for node in there} for plan in plans]


Done = dict[str, dict[str, Outcome]]
Errors = dict[tuple[str, str], VenvError]


def _looked(plans: Mapping[str, Plan], there: Mapping[str, str], deadline: Deadline, bars: Bars) -> tuple[Done, Errors]:
    """Ask each node what it has: it is all there is to do most of the time."""
    recipes = {folder: dataclasses.asdict(plan.recipe) for folder, plan in plans.items()}
    asked = [(folder, node) for folder in plans for node in there]
    answers = on_nodes(
        [(node, _node_task.look_here, (recipes[folder],)) for folder, node in asked],
        there,
        doing="looking for the environment",
        deadline=deadline,
    )
    done: Done = {folder: {} for folder in plans}
    errors: Errors = {}
    for key, answer in zip(asked, answers, strict=True):
        if isinstance(answer, Outcome):
            done[key[0]][key[1]] = answer
        elif answer is not None:
            errors[key] = answer
    return done, errors


def _made(
    plans: Mapping[str, Plan],
    missing: Mapping[str, Sequence[str]],
    there: Mapping[str, str],
    done: Done,
    deadline: Deadline,
    bars: Bars,
) -> Errors:
    """Build what is missing; the outcomes go to `done`."""
    import ray

    asked = [(folder, node) for folder, some in missing.items() for node in some]
    if not asked:
        return {}
    calls = []
    for folder in dict.fromkeys(folder for folder, _ in asked):
        plan = plans[folder]
        plan.check(deadline, bars.line(Path(folder).name))
        shipped = [(name, one if isinstance(one, bytes) else one.read_bytes()) for name, one in _fitting(plan)]
        # Stored once, whatever the number of nodes.
        files = [ray.put(shipped)] if shipped else []
        recipe = dataclasses.asdict(plan.recipe)
        calls += [(node, _node_task.build_here, (recipe, files, deadline.left())) for node in missing[folder]]

    def seen(pending: Sequence[int]) -> None:
        for folder, some in missing.items():
            waiting = [there[node] for number in pending for where, node in [asked[number]] if where == folder]
            if some:
                total = len(there)
                bars.update(Path(folder).name, total - len(waiting), total, f"waiting for {_some(waiting)}")

    answers = on_nodes(calls, there, doing="building the environment", deadline=deadline, seen=seen)
    errors: Errors = {}
    for (folder, node), answer in zip(asked, answers, strict=True):
        if isinstance(answer, Outcome):
            done[folder][node] = answer
        else:
            errors[folder, node] = answer or VenvBuildError("nothing was built", node=there[node])
    return errors


def _fitting(plan: Plan) -> Sequence[tuple[str, bytes | Path]]:
    total = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for _, one in plan.files)
    if total > LIMIT_BYTES:
        raise ValueError(
            f"the files of this spec have {total / 2**30:.1f} GiB, too much to ship to each node: put them into a "
            "folder that every node has, and name it in env={'UV_FIND_LINKS': ...}"
        )
    return plan.files


def _some(labels: Iterable[str]) -> str:
    named = list(labels)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def alive_nodes(nodes: Sequence[str] | None = None) -> dict[str, str]:
    """Names for people of the nodes that are alive, or of the given ones, by id.

    Raises:
        ValueError: Ray does not run here, or a given node is not alive.
    """
    import ray

    if not ray.is_initialized():
        raise ValueError("this needs a running Ray: call ray.init() first, or create_local_venv for this machine alone")
    alive = {row["NodeID"]: f"{row['NodeManagerAddress']} ({row['NodeID'][:8]})" for row in ray.nodes() if row["Alive"]}
    if nodes is None:
        return alive
    if isinstance(nodes, str) or not nodes:
        raise ValueError(f"nodes must be a list of node ids, with one at least, got {nodes!r}")
    if unknown := [node for node in nodes if node not in alive]:
        raise ValueError(f"no nodes that are alive have the ids {unknown}; these have {sorted(alive)}")
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
        calls: node, one of `_node_task`'s functions, arguments.
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
        for ref in pending:
            ray.cancel(ref, force=True)
    late = set(pending)
    return [
        VenvTimeoutError(doing, deadline.timeout_s, labels[node]) if ref in late else _answer(ref, labels[node])
        for ref, (node, _, _) in zip(refs, calls, strict=True)
    ]


@functools.cache
def _remote(function: Callable[..., Any]) -> Any:
    import ray

    for module in SHIPPED:
        ray.cloudpickle.register_pickle_by_value(module)
    return ray.remote(num_cpus=0, max_retries=0)(function)


def _answer(ref: Any, label: str) -> Outcome | VenvError | None:
    import ray

    try:
        answer = ray.get(ref)
    except ray.exceptions.RayError as error:
        reason = f"the node could not do it ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        return VenvBuildError(reason, node=label)
    if answer[0] == "failed":
        *arguments, _ = answer[2]
        kind: type[VenvError] = getattr(exceptions, answer[1])
        return kind(*arguments, label)
    return None if answer[0] == "absent" else Outcome(*answer[1:])

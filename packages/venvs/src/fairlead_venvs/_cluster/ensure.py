# SPDX-License-Identifier: Apache-2.0
"""Environments on the nodes of a Ray cluster: look on every node, then build where one is missing."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from .._build import node_task
from .._build.recipe import Outcome
from .._build.uv import Deadline, Session, start_deadline
from .._planning.plan import Plan, plan_venv
from .._progress import Status
from .._spec import VenvSpec, as_spec
from ..exceptions import VenvBuildError, VenvError, VenvNodesError, VenvTimeoutError
from .rpc import Call, Nodes, abbreviate, alive_nodes, run_on_nodes

# The files of one environment go through Ray's object store to each node that builds it.
LIMIT_BYTES = 2 * 2**30
# A node that does not look within so many seconds, or half the time, is asked to build, which begins with a look.
LOOK_S = 60.0


def create_local_venv_on_each_node(
    py_executable: str | VenvSpec,
    venv_name: str | None = None,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
    progress: bool = True,
) -> str:
    """Return the interpreter of an environment on every node, and build it on all nodes where it is missing.

    Each node runs a task that needs no CPU and no placement group, so a full cluster does not delay it. The task
    contains all files (lock, wheels); a node needs only uv beside its Ray.

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
        VenvBuildError: nothing satisfies the requirements, the project's wheel cannot be built, its lock does not
            match, or the files are too large to send. No node has built anything.
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
    specs = [as_spec(one) for one in py_executables]
    deadline = start_deadline(timeout_s)
    outcomes = ensure_on_nodes(specs, venv_name, alive_nodes(nodes), deadline, progress=progress)
    return [next(iter(one.values())).python for one in outcomes]


def ensure_on_nodes(
    specs: Iterable[VenvSpec], name: str | None, nodes: Nodes, deadline: Deadline, *, progress: bool
) -> list[dict[str, Outcome]]:
    """Do the same as `ensure_venvs`, and return for each environment the answers of the nodes."""
    with Status(shown=progress) as status:
        session = Session(deadline, status.line("preparing"))
        plans = [plan_venv(spec, name, session) for spec in specs]
        distinct = {plan.recipe.folder: plan for plan in plans}
        answers = _provision(distinct, nodes, deadline, status)
    errors = {key: answer for key, answer in answers.items() if isinstance(answer, VenvError)}
    if errors:
        raise VenvNodesError(
            f"{len(errors)} of {len(answers)} environments are not ready, on "
            f"{abbreviate(dict.fromkeys(nodes.labels[node] for _, node in errors))}",
            list(errors.values()),
        )
    ready = {key: answer for key, answer in answers.items() if isinstance(answer, Outcome)}
    return [{node: one for (folder, node), one in ready.items() if folder == plan.recipe.folder} for plan in plans]


def _provision(
    plans: Mapping[str, Plan], nodes: Nodes, deadline: Deadline, status: Status
) -> dict[tuple[str, str], Outcome | VenvError]:
    """Make environments ready on nodes; return each, or why it is not, by folder and node, without draining nodes."""
    # Most of the time this is all there is to do.
    looks: dict[tuple[str, str], Call] = {
        (folder, node): (node, node_task.look_here, (folder, plan.recipe.fingerprint, plan.recipe.platform))
        for folder, plan in plans.items()
        for node in nodes.labels
    }
    # One node that does not answer must not take the time in which the others build.
    looking = Deadline(min(deadline.left() / 2, LOOK_S))
    answers = run_on_nodes(looks, nodes, doing="looking for the environment", deadline=looking)
    missing: dict[str, list[str]] = {}
    for (folder, node), answer in answers.items():
        if answer is None or isinstance(answer, VenvTimeoutError):
            missing.setdefault(folder, []).append(node)
    builds: dict[tuple[str, str], Call] = {}
    for folder, lacking in missing.items():
        plans[folder].check_lock(Session(deadline, status.line(os.path.basename(folder))))
        builds |= _make_builds(plans[folder], lacking, deadline)

    def report(pending: Sequence[tuple[str, str]]) -> None:
        for folder in missing:
            if waiting := [nodes.labels[node] for where, node in pending if where == folder]:
                done = f"{len(nodes.labels) - len(waiting)} of {len(nodes.labels)} nodes"
                status.update(f"{os.path.basename(folder)}: {done}", f"waiting for {abbreviate(waiting)}")

    answers |= run_on_nodes(builds, nodes, doing="building the environment", deadline=deadline, report=report)
    return {key: answer for key, answer in answers.items() if answer is not None}


def _make_builds(plan: Plan, nodes: Iterable[str], deadline: Deadline) -> dict[tuple[str, str], Call]:
    import ray

    total = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for _, one in plan.files)
    if total > LIMIT_BYTES:
        raise VenvBuildError(
            f"the files of this spec have {total / 2**30:.1f} GiB, which is too large to send to each node. Put them "
            "into a folder that every node has, and name it in env={'UV_FIND_LINKS': ...}"
        )
    contents = [(name, one if isinstance(one, bytes) else one.read_bytes()) for name, one in plan.files]
    plan.check_files()
    # Stored once for all nodes.
    files = [ray.put(contents)] if contents else []
    recipe = dataclasses.asdict(plan.recipe)
    return {
        (plan.recipe.folder, node): (node, node_task.build_here, (recipe, files, deadline.left())) for node in nodes
    }

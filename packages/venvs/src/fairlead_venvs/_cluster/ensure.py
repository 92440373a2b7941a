# SPDX-License-Identifier: Apache-2.0
"""Environments on the nodes of a Ray cluster: one task for each, wherever there is room or none."""

from collections.abc import Callable, Iterable, Sequence

from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._local import as_spec, checked_seconds
from .._planning.plan import planned
from .._planning.project import Project
from .._progress import Bars
from .._spec import VenvSpec
from ..exceptions import VenvNodesError
from .provision import DRIVER, provisioned
from .renewal import keep_marked
from .rpc import alive_nodes, some

__all__ = ["create_local_venv_on_each_node", "ensure_on_nodes", "ensure_venvs"]


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
        TypeError, ValueError: nothing that could be built; no such deadline; no Ray; a node that is not there.
        VenvBuildError: nothing satisfies the requirements, the project's wheel cannot be built, its lock does not
            match, or there is too much to ship: no node was asked to build.
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

    Raises:
        As `create_local_venv_on_each_node`.
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
    check: Callable[[VenvSpec, Project | None], None] | None = None,
) -> list[dict[str, Outcome]]:
    """As `ensure_venvs`; what is known of each environment, by node.

    Before anything is started, `check` is called with each spec and its project, and may raise.
    """
    specs = [as_spec(one) for one in py_executables]
    deadline = Deadline(checked_seconds("timeout_s", timeout_s))
    there = alive_nodes(nodes)
    with Bars(shown=progress) as bars:
        show = bars.line("preparing")
        plans = [planned(spec, name, deadline=deadline, show=show, check=check) for spec in specs]
        distinct = {plan.recipe.folder: plan for plan in plans}
        done, errors = provisioned(distinct, there, deadline, bars)
    for (_, node), error in errors.items():
        if node == DRIVER:
            raise error
    if errors:
        raise VenvNodesError(
            f"{len(errors)} of {len(distinct) * len(there)} environments are not ready, on "
            f"{some(dict.fromkeys(there[node] for _, node in errors))}",
            list(errors.values()),
        )
    keep_marked((folder, node) for folder, nodes in done.items() for node, one in nodes.items() if one.shared)
    return [{node: done[plan.recipe.folder][node] for node in there} for plan in plans]

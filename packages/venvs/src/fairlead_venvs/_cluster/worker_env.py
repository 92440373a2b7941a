# SPDX-License-Identifier: Apache-2.0
"""What a worker runs in: an environment on its nodes, with the Ray and the Python of the cluster."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._build import node_task
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._local import as_spec, checked_seconds
from .._planning.command import is_uv_command
from .._planning.lockfile import locked_versions
from .._planning.project import Project
from .._planning.requirements import excluded_version
from .._registry import get_actor_python_env
from .._spec import VenvSpec
from ..exceptions import VenvError, VenvMismatchError, VenvNodesError
from .ensure import ensure_on_nodes
from .rpc import alive_nodes, on_nodes

__all__ = ["WorkerEnv", "ensure_worker_env", "make_actor_runtime_env"]


@dataclass(frozen=True)
class WorkerEnv:
    """What a worker runs in.

    Attributes:
        python: path of its interpreter, on every node.
        runtime_env: for Ray: `py_executable` and `env_vars`. Empty if the worker runs in the driver's own Python: any
            runtime_env costs it the processes that Ray has started in advance.
    """

    python: str
    runtime_env: Mapping[str, Any]


def ensure_worker_env(
    python: str | VenvSpec,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 1800,
    progress: bool = True,
) -> WorkerEnv:
    """Make what a worker runs in ready on its nodes, and see to it that it can talk to this cluster.

    Args:
        python: a spec; a command, "uv run ..."; the path of an interpreter that every node has; or the full name of a
            worker class whose environment is registered.
        nodes: Ray's ids of the nodes on which workers will start; by default all that are alive.
        timeout_s: for everything together, in seconds.
        progress: show bars on a terminal.

    Raises:
        TypeError, ValueError: nothing that could be built; no such deadline; a class that is not registered; no Ray; a
            node that is not there.
        VenvMismatchError: another version of Python or Ray was asked for than the cluster has. Nothing has been
            downloaded or built.
        VenvNodesError: nodes on which it went wrong, each with its own error: a VenvMismatchError if Ray is missing in
            the environment, or of another version than the cluster's.
    """
    what = python
    if isinstance(what, str) and not is_uv_command(what) and not _is_path(what):
        what = get_actor_python_env(what)
    if what == sys.executable:
        return WorkerEnv(sys.executable, {})
    if isinstance(what, str) and not is_uv_command(what):
        deadline = Deadline(checked_seconds("timeout_s", timeout_s))
        there = alive_nodes(nodes)
        outcomes = _probed(what, there, deadline)
    else:
        spec = as_spec(what)
        _same_python(spec)
        there = alive_nodes(nodes)
        (outcomes,) = ensure_on_nodes(
            [spec], nodes=list(there), timeout_s=timeout_s, progress=progress, check=_allows_ray
        )
    _same_ray(outcomes, there)
    path = next(iter(outcomes.values())).python
    return WorkerEnv(path, _runtime_env(path, built=not isinstance(what, str) or is_uv_command(what)))


def make_actor_runtime_env(
    actor_class_fqn: str, *, nodes: Sequence[str] | None = None, timeout_s: float = 1800, progress: bool = True
) -> dict[str, Any]:
    """The runtime_env for actors of a registered class, its environment made ready on every node.

    Never a copy of the driver's environment: the interpreter, and VIRTUAL_ENV and PATH that go with it.

    Args:
        actor_class_fqn: full name of the class.
        nodes: as for `ensure_worker_env`, as the rest.

    Returns:
        `{"py_executable": ..., "env_vars": {"VIRTUAL_ENV": ..., "PATH": ...}}`; empty for `PY_EXECUTABLES.SYSTEM`.

    Raises:
        As `ensure_worker_env`.
    """
    what = get_actor_python_env(actor_class_fqn)
    return dict(ensure_worker_env(what, nodes=nodes, timeout_s=timeout_s, progress=progress).runtime_env)


def _is_path(text: str) -> bool:
    return os.sep in text


def _same_python(spec: VenvSpec) -> None:
    wanted = ".".join(map(str, sys.version_info[:2]))
    if spec.python is not None and not f"{spec.python}.".startswith(f"{wanted}."):
        raise VenvMismatchError("python", spec.python, wanted, repr(spec))


def _allows_ray(spec: VenvSpec, project: Project | None) -> None:
    """Refuse a spec that pins another Ray than the cluster's, before anything is downloaded or built.

    Raises:
        VenvMismatchError: its requirements, or the lock of its project, exclude the cluster's Ray.
    """
    import ray

    if spec.setup:
        return  # the command may install another Ray
    python = spec.python or ".".join(map(str, sys.version_info[:2]))
    if project is None:
        found = excluded_version(spec.requirements or (), "ray", ray.__version__, python)
        if found is not None:
            raise VenvMismatchError("ray", found, ray.__version__, repr(spec))
        return
    versions = locked_versions(project.lock, "ray", project.name, project.extras, project.groups, python)
    if versions and ray.__version__ not in versions:
        lock = f"The lock in {project.root}"
        raise VenvMismatchError("ray", " or ".join(sorted(versions)), ray.__version__, lock)


def _probed(python: str, there: Mapping[str, str], deadline: Deadline) -> dict[str, Outcome]:
    """An interpreter that is not ours: ask it, on each node. One that does not run would fail only after minutes."""
    calls = [(node, node_task.probe_here, (python, max(1.0, deadline.left()))) for node in there]
    answers = dict(zip(there, on_nodes(calls, there, doing=f"asking {python}", deadline=deadline), strict=True))
    _raise_for({node: answer for node, answer in answers.items() if isinstance(answer, VenvError)}, there)
    return {node: answer for node, answer in answers.items() if isinstance(answer, Outcome)}


def _same_ray(outcomes: Mapping[str, Outcome], labels: Mapping[str, str]) -> None:
    import ray

    minor = ".".join(map(str, sys.version_info[:2]))
    errors: dict[str, VenvError] = {}
    for node, outcome in outcomes.items():
        where = f"The environment of {outcome.python}"
        if not outcome.version.startswith(f"{minor}."):
            errors[node] = VenvMismatchError("python", outcome.version, minor, where, labels[node])
        elif outcome.ray != ray.__version__:
            found = outcome.ray or "none"
            errors[node] = VenvMismatchError("ray", found, ray.__version__, where, labels[node])
    _raise_for(errors, labels)


def _raise_for(errors: Mapping[str, VenvError], labels: Mapping[str, str]) -> None:
    if errors:
        raise VenvNodesError(f"{len(errors)} of {len(labels)} nodes cannot start the workers", list(errors.values()))


def _runtime_env(python: str, *, built: bool) -> dict[str, Any]:
    folder = os.path.dirname(os.path.dirname(python))
    env_vars = {"PATH": f"{os.path.dirname(python)}:${{PATH}}"}
    # /usr/bin/python lies as an environment's does, and is none.
    if built or os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        env_vars["VIRTUAL_ENV"] = folder
    # A fragment for a shell, which is how Ray takes it.
    return {"py_executable": shlex.quote(python), "env_vars": env_vars}

# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker on its nodes, with the Ray and the Python of the cluster."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._build import node_task
from .._build.recipe import Outcome, this_python
from .._build.uv import start_deadline
from .._planning.project import read_project
from .._planning.requirements import find_excluded_version
from .._planning.spec import is_uv_command
from .._registry import get_actor_python_env
from .._spec import VenvSpec, as_spec
from ..exceptions import VenvError, VenvMismatchError, VenvNodesError
from .ensure import ensure_on_nodes
from .rpc import Call, alive_nodes, run_on_nodes


@dataclass(frozen=True)
class WorkerEnv:
    """The environment of a worker.

    Attributes:
        python: path of its interpreter, on every node.
        runtime_env: `py_executable` and `env_vars` for Ray. Empty if the worker runs in the driver's own Python: with
            any runtime_env, Ray could not use the processes that it has started in advance.
    """

    python: str
    runtime_env: Mapping[str, Any]


def ensure_worker_env(
    python: str | VenvSpec, *, nodes: Sequence[str] | None = None, timeout_s: float = 1800, progress: bool = True
) -> WorkerEnv:
    """Make the environment of a worker ready on its nodes, and check that it can join this cluster.

    Args:
        python: a spec; a command, "uv run ..."; the path of an interpreter that every node has; or the full name of a
            worker class whose environment is registered.
        nodes: Ray's ids of the nodes on which workers will start; by default all alive nodes.
        timeout_s: for everything together, in seconds.
        progress: show a status line on a terminal.

    Raises:
        TypeError, ValueError: the arguments do not describe an environment or a time limit; a class is not registered;
            Ray is not running; a node is not alive.
        VenvMismatchError: the spec has another version of Python or Ray than the cluster. Nothing has been downloaded
            or built.
        VenvNodesError: it failed on some nodes. It has the error of each: a VenvMismatchError if Ray is missing in the
            environment, or has another version than the cluster's.
    """
    what = python
    if isinstance(what, str) and not is_uv_command(what) and os.sep not in what:
        what = get_actor_python_env(what)
    if what == sys.executable:
        return WorkerEnv(sys.executable, {})
    deadline = start_deadline(timeout_s)
    built = not isinstance(what, str) or is_uv_command(what)
    if built:
        spec = as_spec(what)
        if spec.python is not None and not f"{spec.python}.".startswith(f"{this_python()}."):
            raise VenvMismatchError("python", spec.python, this_python(), repr(spec))
        alive = alive_nodes(nodes)
        _check_ray(spec)
        (outcomes,) = ensure_on_nodes([spec], None, alive, deadline, progress=progress)
        path = next(iter(outcomes.values())).python
        _check_answers(outcomes, alive.labels)
    else:
        alive, path = alive_nodes(nodes), str(what)
        # A worker in an interpreter that does not run would only fail after minutes.
        arguments = path, max(1.0, deadline.left())
        calls: dict[str, Call] = {node: (node, node_task.probe_here, arguments) for node in alive.labels}
        _check_answers(run_on_nodes(calls, alive, doing=f"asking {path}", deadline=deadline), alive.labels)
    return WorkerEnv(path, _make_runtime_env(path, built=built))


def make_actor_runtime_env(
    actor_class_fqn: str, *, nodes: Sequence[str] | None = None, timeout_s: float = 1800, progress: bool = True
) -> dict[str, Any]:
    """Make the environment of a registered class ready on every node, and return the runtime_env of its actors.

    Never a copy of the driver's environment: the interpreter, and the variables that go with it.

    Args:
        actor_class_fqn: full name of the class.
        nodes: as for `ensure_worker_env`, as the rest.

    Returns:
        `{"py_executable": ..., "env_vars": {"PATH": ..., "VIRTUAL_ENV": ..., "UV_PROJECT_ENVIRONMENT": ...}}`; empty
        for `PY_EXECUTABLES.SYSTEM`.

    Raises:
        As `ensure_worker_env`.
    """
    what = get_actor_python_env(actor_class_fqn)
    return dict(ensure_worker_env(what, nodes=nodes, timeout_s=timeout_s, progress=progress).runtime_env)


def _check_ray(spec: VenvSpec) -> None:
    """Check that a spec does not pin another Ray than the cluster's, before anything is downloaded or built."""
    import ray

    if spec.setup:
        return  # the command may install another Ray
    if (project := read_project(spec)) is None:
        python = spec.python or this_python()
        pin = find_excluded_version(spec.requirements or (), "ray", ray.__version__, python)
        if pin is not None:
            raise VenvMismatchError("ray", pin, ray.__version__, repr(spec))
        return
    versions = project.find_versions("ray")
    if versions and ray.__version__ not in versions:
        lock = f"The lock in {project.root}"
        raise VenvMismatchError("ray", " or ".join(sorted(versions)), ray.__version__, lock)


def _check_answers(answers: Mapping[str, Outcome | VenvError | None], labels: Mapping[str, str]) -> None:
    import ray

    errors: list[VenvError] = []
    for node, answer in answers.items():
        if isinstance(answer, VenvError):
            errors.append(answer)
        elif answer is not None:
            where = f"The environment of {answer.python}"
            if not answer.version.startswith(f"{this_python()}."):
                errors.append(VenvMismatchError("python", answer.version, this_python(), where, labels[node]))
            elif answer.ray != ray.__version__:
                errors.append(VenvMismatchError("ray", answer.ray or "none", ray.__version__, where, labels[node]))
    if errors:
        raise VenvNodesError(f"{len(errors)} of {len(labels)} nodes cannot start the workers", errors)


def _make_runtime_env(python: str, *, built: bool) -> dict[str, Any]:
    folder = os.path.dirname(os.path.dirname(python))
    env_vars = {"PATH": f"{os.path.dirname(python)}:${{PATH}}"}
    # /usr/bin/python has a path like that of an environment.
    if built or os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        env_vars["VIRTUAL_ENV"] = env_vars["UV_PROJECT_ENVIRONMENT"] = folder
    # Quoted, as Ray puts it into a shell command.
    return {"py_executable": shlex.quote(python), "env_vars": env_vars}

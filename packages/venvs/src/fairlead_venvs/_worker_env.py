# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker on its nodes, with the Ray and the Python of the cluster."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._lock import plan_venv
from ._node.build import Outcome, probe_here, this_python
from ._node.uv import start_deadline
from ._nodes import Answers, alive_nodes, provide, run_on_nodes
from ._progress import Status
from ._registry import get_actor_python_env
from ._request import is_uv_command
from ._spec import VenvSpec, as_spec
from .exceptions import VenvError, VenvMismatchError, VenvNodesError


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
        VenvMismatchError: the spec has another version of Python or Ray than the cluster. Nothing has been built.
        VenvNodesError: it failed on some nodes. It has the error of each: a VenvMismatchError if Ray is missing in the
            environment, or has another version than the cluster's.
    """
    what = python
    if isinstance(what, str) and not is_uv_command(what) and os.sep not in what:
        what = get_actor_python_env(what)
    if what == sys.executable:
        return WorkerEnv(sys.executable, {})
    is_built = not isinstance(what, str) or is_uv_command(what)
    with Status(shown=progress) as status:
        deadline = start_deadline(timeout_s, status.update)
        if is_built:
            spec = as_spec(what)
            if spec.python is not None and not f"{spec.python}.".startswith(f"{this_python()}."):
                raise VenvMismatchError("python", spec.python, this_python(), repr(spec))
            labels = alive_nodes(nodes)
            plan = plan_venv(spec, None, deadline)
            _check_ray(spec, plan.find_version("ray"))
            answers: Answers = {**provide([plan], labels, deadline)}
            path = f"{plan.recipe.folder}/bin/python"
        else:
            labels, path = alive_nodes(nodes), str(what)
            # A worker in an interpreter that does not run would only fail after minutes.
            calls = {("", node): (probe_here, path, max(1.0, deadline.left())) for node in labels}
            answers = run_on_nodes(calls, labels, f"asking {path}", deadline)
    _check_answers(answers, labels)
    return WorkerEnv(path, _make_runtime_env(path, is_built=is_built))


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


def _check_ray(spec: VenvSpec, version: str | None) -> None:
    """Check that a spec does not lock another Ray than the cluster's, before anything is built."""
    import ray

    # A setup command may install another Ray.
    if version not in (None, ray.__version__) and not spec.setup:
        raise VenvMismatchError("ray", str(version), ray.__version__, repr(spec))


def _check_answers(answers: Answers, labels: Mapping[str, str]) -> None:
    import ray

    errors: list[VenvError] = []
    for (_, node), answer in answers.items():
        if isinstance(answer, VenvError):
            errors.append(answer)
        elif isinstance(answer, Outcome):
            where = f"The environment of {answer.python}"
            if not answer.version.startswith(f"{this_python()}."):
                errors.append(VenvMismatchError("python", answer.version, this_python(), where, labels[node]))
            elif answer.ray != ray.__version__:
                errors.append(VenvMismatchError("ray", answer.ray or "none", ray.__version__, where, labels[node]))
    if errors:
        raise VenvNodesError(f"{len(errors)} of {len(labels)} nodes cannot start the workers", errors)


def _make_runtime_env(python: str, *, is_built: bool) -> dict[str, Any]:
    folder = os.path.dirname(os.path.dirname(python))
    env_vars = {"PATH": f"{os.path.dirname(python)}:${{PATH}}"}
    # /usr/bin/python has a path like that of an environment.
    if is_built or os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        env_vars["VIRTUAL_ENV"] = env_vars["UV_PROJECT_ENVIRONMENT"] = folder
    # Quoted, as Ray puts it into a shell command.
    return {"py_executable": shlex.quote(python), "env_vars": env_vars}

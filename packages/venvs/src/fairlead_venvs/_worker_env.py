# SPDX-License-Identifier: Apache-2.0
"""The environment of each worker class, registered in code or listed in a pyproject.toml, and made ready on nodes."""

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._lock import Plan, VenvSpec, as_spec, plan_venv
from ._node.build import Outcome, probe_here, this_python
from ._node.uv import Deadline
from ._nodes import alive_nodes, provide, raise_errors, run_on_nodes
from ._spec import is_uv_command, parse_command
from .exceptions import VenvError, VenvMismatchError

TABLE = "[tool.fairlead.actor-environments]"


class PY_EXECUTABLES:
    """Names of common environments: this interpreter, the lock of the project in the current folder, its extra vllm."""

    SYSTEM: str = sys.executable
    BASE: str = "uv run --locked"
    VLLM: str = "uv run --locked --extra vllm"


actor_environments: dict[str, str | VenvSpec] = {}
"""The registered environments by the full name of the class: a spec, a command of uv, or an interpreter."""


def register_actor_env(fqn: str, spec: str | VenvSpec) -> None:
    """Register or replace the environment of a class by its full name: a spec, a command, or a path on every node."""
    actor_environments[fqn] = spec


def get_actor_python_env(actor_class_fqn: str) -> str | VenvSpec:
    """Return the environment of a worker class, from `known_actor_environments`.

    Raises:
        ValueError: the class is not among them, or the table cannot be read.
    """
    known = known_actor_environments()
    if actor_class_fqn in known:
        return known[actor_class_fqn]
    raise ValueError(
        f"no environment is known for the worker class {actor_class_fqn!r} (known are: {', '.join(known) or 'none'}). "
        f"Give one: by register_actor_env({actor_class_fqn!r}, ...), by the table {TABLE} in a pyproject.toml, or by "
        "python= of the worker group"
    )


def known_actor_environments() -> dict[str, str | VenvSpec]:
    """Return all environments: the registered ones, and for other classes those of the pyproject.toml.

    That is the one of the current folder, or the next one above it that has `[tool.fairlead.actor-environments]`. A
    ValueError says why it cannot be read.
    """
    return dict(sorted({**_read_table(), **actor_environments}.items()))


def _read_table() -> dict[str, str | VenvSpec]:
    for path in [folder / "pyproject.toml" for folder in (Path.cwd(), *Path.cwd().parents)]:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("fairlead", {})
        except (FileNotFoundError, PermissionError):
            continue
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if "actor-environments" in table:
            return {fqn: _parse_entry(fqn, value, path) for fqn, value in table["actor-environments"].items()}
    return {}


def _parse_entry(fqn: str, value: Any, pyproject: Path) -> str | VenvSpec:
    """Read one entry. Its paths are relative to the folder of the pyproject."""
    folder = pyproject.parent
    try:
        if not value or not isinstance(value, (str, Mapping)):
            raise TypeError(f"expected a command, a path or a table of VenvSpec's arguments, got {value!r}")
        if isinstance(value, str) and not is_uv_command(value):
            return PY_EXECUTABLES.SYSTEM if value == "system" else os.path.join(folder, value)
        fields: dict[str, Any] = {"command": value} if isinstance(value, str) else dict(value)
        if "command" in fields:
            fields |= parse_command(fields.pop("command"))
        if "project" in fields:
            fields["project"] = os.path.join(folder, fields["project"])
        if isinstance(links := fields.get("find_links"), list):
            fields["find_links"] = [link if "://" in link else os.path.join(folder, link) for link in links]
        return VenvSpec(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{TABLE} in {pyproject}, {fqn}: {error}") from None


@dataclass(frozen=True)
class WorkerEnv:
    """The environment of a worker.

    Attributes:
        python: path of its interpreter, on every node.
        runtime_env: `py_executable` and `env_vars` for Ray. Empty if the worker runs in the driver's own Python.
    """

    python: str
    runtime_env: Mapping[str, Any]


def ensure_worker_env(
    python: str | VenvSpec, *, nodes: Sequence[str] | None = None, timeout_s: float = 1800
) -> WorkerEnv:
    """Make the environment of a worker ready on its nodes, and check that it can join this cluster.

    Args:
        python: a spec; a command, "uv run ..."; or the path of an interpreter that every node has.
        nodes: Ray's ids of the nodes on which workers will start; by default all alive nodes.
        timeout_s: for everything together, in seconds.

    Raises:
        TypeError, ValueError: as `create_local_venv_on_each_node`.
        VenvMismatchError: the spec has another version of Python or Ray than the cluster. Nothing has been built.
        VenvNodesError: it failed on some nodes, with the error of each: a VenvMismatchError if Ray is missing in the
            environment, or has another version than the cluster's.
    """
    if python == sys.executable:
        return WorkerEnv(sys.executable, {})
    deadline, labels = Deadline(timeout_s), alive_nodes(nodes)
    if is_path := isinstance(python, str) and not is_uv_command(python):
        path = str(python)
        # A worker in an interpreter that does not run would only fail after minutes.
        calls = {(path, node): (probe_here, path, max(1.0, deadline.left())) for node in labels}
        answers = run_on_nodes(calls, f"asking {path}", deadline)
    else:
        plan = plan_venv(as_spec(python), None, deadline)
        path = f"{plan.recipe.folder}/bin/python"
        _check_plan(plan)
        answers = provide([plan], labels, deadline)
    raise_errors({key: _check(answer) for key, answer in answers.items()}, labels)
    folder = os.path.dirname(os.path.dirname(path))
    env_vars = {"PATH": f"{os.path.dirname(path)}:${{PATH}}"}
    # /usr/bin/python has a path like that of an environment.
    if not is_path or os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        env_vars |= {"VIRTUAL_ENV": folder, "UV_PROJECT_ENVIRONMENT": folder}
    # Quoted, as Ray puts it into a shell command.
    return WorkerEnv(path, {"py_executable": shlex.quote(path), "env_vars": env_vars})


def make_actor_runtime_env(
    actor_class_fqn: str, *, nodes: Sequence[str] | None = None, timeout_s: float = 1800
) -> dict[str, Any]:
    """Make the environment of a registered class ready on every node, and return the runtime_env of its actors.

    Args and errors are those of `ensure_worker_env`, for the full name of a class.

    Returns:
        `{"py_executable": ..., "env_vars": {"PATH": ..., "VIRTUAL_ENV": ..., "UV_PROJECT_ENVIRONMENT": ...}}`, and
        never the driver's variables; empty for `PY_EXECUTABLES.SYSTEM`.
    """
    python = get_actor_python_env(actor_class_fqn)
    return dict(ensure_worker_env(python, nodes=nodes, timeout_s=timeout_s).runtime_env)


def _check_plan(plan: Plan) -> None:
    """Check that an environment will not have another Python or Ray than the cluster, before anything is built."""
    import ray

    recipe = plan.recipe
    if not f"{recipe.python}.".startswith(f"{this_python()}."):
        raise VenvMismatchError("python", recipe.python, this_python(), recipe.description)
    versions = re.findall(r'(?m)^name = "ray"\nversion = "(.*)"$', plan.pylock)
    # A setup command may install another Ray.
    if versions and ray.__version__ not in versions and not recipe.setup:
        raise VenvMismatchError("ray", ", ".join(versions), ray.__version__, f"The lock of {recipe.description}")


def _check(answer: Outcome | VenvError | None) -> Outcome | VenvError | None:
    """Return an answer, or an error if its environment has another Python or Ray than the cluster."""
    import ray

    if not isinstance(answer, Outcome):
        return answer
    where = f"The environment of {answer.python}"
    if not answer.version.startswith(f"{this_python()}."):
        return VenvMismatchError("python", answer.version, this_python(), where)
    if answer.ray != ray.__version__:
        return VenvMismatchError("ray", answer.ray or "none", ray.__version__, where)
    return answer

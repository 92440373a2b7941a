# SPDX-License-Identifier: Apache-2.0
"""Which Python the workers of a group run in, made ready on their nodes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead_venvs import VenvError, VenvNodesError, VenvSpec, ensure_worker_env, known_actor_environments

from ..exceptions import WorkerStartError

__all__ = ["WorkerPython", "chosen_python", "ready_python"]


@dataclass(frozen=True)
class WorkerPython:
    """What workers run in; by default the driver's own Python.

    Attributes:
        runtime_env: for Ray; empty for the driver's own, as any costs the processes that Ray keeps ready.
        variables: what tools look at to find the environment they run in.
    """

    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def chosen_python(python: str | VenvSpec | None, class_name: str) -> str | VenvSpec | None:
    """What was given; else what is registered for the class; else None, the driver's own.

    Raises:
        TypeError: it is neither a spec nor text.
        ValueError: the table in the pyproject.toml cannot be read.
    """
    if python is not None and not isinstance(python, (str, VenvSpec)):
        raise TypeError(f"python must be a VenvSpec, a path or a uv command, got {type(python).__name__}")
    if python is None:
        python = known_actor_environments().get(class_name)
    return None if python == sys.executable else python


def ready_python(python: str | VenvSpec | None, nodes: Sequence[str], *, timeout_s: float) -> WorkerPython:
    """Make it ready on the nodes where workers will start, and see to it that it has the cluster's Python and Ray.

    Raises:
        ValueError: nothing that could be built.
        WorkerStartError: what went wrong, on each node where it did.
    """
    if python is None:
        return WorkerPython()
    try:
        ready = ensure_worker_env(python, nodes=list(dict.fromkeys(nodes)), timeout_s=timeout_s)
    except VenvError as error:
        told = "\n".join(map(str, error.exceptions if isinstance(error, VenvNodesError) else [error]))
        raise WorkerStartError(f"{python!r} cannot run the workers:\n{told}") from error
    env_vars = dict(ready.runtime_env.get("env_vars", {}))
    venv = env_vars.pop("VIRTUAL_ENV", None)
    variables = {} if venv is None else {"VIRTUAL_ENV": venv, "UV_PROJECT_ENVIRONMENT": venv}
    return WorkerPython({**ready.runtime_env, "env_vars": env_vars}, variables)

# SPDX-License-Identifier: Apache-2.0
"""Content-addressed uv environments on every node of a Ray cluster: never half-built, never stale."""

from ._housekeeping import Venv, list_venvs, prune
from ._lock import VenvSpec
from ._nodes import create_local_venv, create_local_venv_on_each_node, ensure_venvs
from ._worker_env import (
    PY_EXECUTABLES,
    WorkerEnv,
    actor_environments,
    ensure_worker_env,
    get_actor_python_env,
    known_actor_environments,
    make_actor_runtime_env,
    register_actor_env,
)
from .exceptions import (
    UvUnavailableError,
    VenvBuildError,
    VenvError,
    VenvMismatchError,
    VenvNodesError,
    VenvTimeoutError,
)

__version__ = "0.1.0"

__all__ = [
    "PY_EXECUTABLES",
    "UvUnavailableError",
    "Venv",
    "VenvBuildError",
    "VenvError",
    "VenvMismatchError",
    "VenvNodesError",
    "VenvSpec",
    "VenvTimeoutError",
    "WorkerEnv",
    "actor_environments",
    "create_local_venv",
    "create_local_venv_on_each_node",
    "ensure_venvs",
    "ensure_worker_env",
    "get_actor_python_env",
    "known_actor_environments",
    "list_venvs",
    "make_actor_runtime_env",
    "prune",
    "register_actor_env",
]

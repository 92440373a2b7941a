# SPDX-License-Identifier: Apache-2.0
"""Content-addressed uv environments on every node of a Ray cluster: never half-built, never stale.

>>> import subprocess
>>> from fairlead_venvs import VenvSpec, create_local_venv
>>> python = create_local_venv(VenvSpec(requirements=[]))
>>> subprocess.run([python, "-c", "print('runs')"], capture_output=True, text=True).stdout
'runs\\n'
>>> create_local_venv(VenvSpec(requirements=[])) == python
True
"""

from ._housekeeping import Venv, list_venvs, prune
from ._local import create_local_venv
from ._nodes import create_local_venv_on_each_node, ensure_venvs
from ._registry import (
    PY_EXECUTABLES,
    actor_environments,
    get_actor_python_env,
    known_actor_environments,
    register_actor_env,
)
from ._spec import VenvSpec
from ._worker_env import WorkerEnv, ensure_worker_env, make_actor_runtime_env
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

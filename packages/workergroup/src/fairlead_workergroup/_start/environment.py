# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker: its variables, and the Python that it runs in.

The driver's environment is not copied. A worker gets variables from these sources, where each overrides those before
it: its node, the `runtime_env` of the class's own `@ray.remote`, the driver's variables that are listed here, the
user's `env_vars`, its slot, its rank, and `configure_worker`."""

import fnmatch
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fairlead_venvs import VenvError, VenvNodesError, VenvSpec, ensure_worker_env, known_actor_environments

from .._model import Place
from ..exceptions import WorkerStartError

logger = logging.getLogger(__name__)

EnvVars: TypeAlias = Mapping[str, str] | Callable[[Place], Mapping[str, str]]

NONE: Mapping[str, str] = {}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# Settings of communication libraries, and locations of data that all processes share.
FORWARDED = ("NCCL_*", "GLOO_*", "TORCH_NCCL_*", "CUDA_DEVICE_ORDER", "HF_HOME", "HF_HUB_OFFLINE", "TORCH_HOME")
# Ray chooses the devices, and its own settings belong to a process.
NEVER = ("*_VISIBLE_DEVICES", "*_VISIBLE_CHIPS", "*_VISIBLE_CORES", "*_VISIBLE_MODULES", "RAY_*", *RANK_VARIABLES)
# Frameworks set these for each rank, and Ray does not read them.
OF_FRAMEWORKS = ("RAY_LOCAL_WORLD_SIZE",)
# The loader, the C library or the interpreter reads these before any of our code runs, so they need a new process.
# Libraries that the user's class imports later read the variables of OpenMP and CUDA.
LOADER = (
    "GCONV_PATH",
    "GLIBC_TUNABLES",
    "LANG",
    "LC_*",
    "LD_*",
    "LOCPATH",
    "MALLOC_*",
    "MIMALLOC_*",
    "OPENSSL_CONF",
    "PYTHON*",
    "TCMALLOC_*",
    "TZ",
    "*SAN_OPTIONS",
)


@dataclass(frozen=True)
class WorkerEnvironment:
    """The environment of one worker, split by who sets it."""

    variables: Mapping[str, str] = field(default_factory=dict)  # set by the host before it imports the user's class
    loader_variables: Mapping[str, str] = field(default_factory=dict)  # set by Ray, in a new process
    # The entries of PYTHONPATH, which has no effect in a running process: the host puts them before Python's own.
    path: tuple[str, ...] = ()


def variables_at(env_vars: EnvVars, place: Place) -> Mapping[str, str]:
    """Return the user's variables of the worker at a place."""
    if not callable(env_vars):
        return env_vars
    if not isinstance(given := env_vars(place), Mapping):
        raise TypeError(f"env_vars must return a mapping from names to strings for each place, got {given!r}")
    return check_env_vars(given, is_logged=False)  # it is asked for each place, and again when the group changes


def check_env_vars(env_vars: Mapping[str, str], *, is_logged: bool = True) -> dict[str, str]:
    """Return a copy without the names that Ray or the group sets, which are logged; refuse what is not text.

    A driver under torchrun, Slurm or KubeRay has such names in the `os.environ` that its user passes on.
    """
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env_vars must map names to strings, got {name!r}: {type(value).__name__}")
    dropped = sorted(name for name in env_vars if _matches(name, NEVER) and name not in OF_FRAMEWORKS)
    if dropped and is_logged:
        logger.warning(
            "Workers do not get %s of env_vars: the group sets the variables of ranks, Ray chooses the devices, and "
            "RAY_* belongs to each process.",
            ", ".join(dropped),
        )
    return {name: value for name, value in env_vars.items() if name not in dropped}


def start_variables(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read only when a process starts, including PYTHONPATH."""
    return {name: value for name, value in env_vars.items() if _matches(name, LOADER)}


def forwarded_variables(driver: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that workers get, once for all workers of a group."""
    return {n: v for n, v in driver.items() if _matches(n, FORWARDED) and not _matches(n, NEVER)}


def worker_environment(
    *,
    driver: Mapping[str, str] = NONE,
    of_class: Mapping[str, str] = NONE,
    of_slot: Mapping[str, str] = NONE,
    of_user: Mapping[str, str] = NONE,
    of_rank: Mapping[str, str] = NONE,
    configured: Mapping[str, str] = NONE,
) -> WorkerEnvironment:
    """Merge the variables of all sources, those of the driver as `forwarded_variables` returns them."""
    overridden = sorted(name for name in configured if name in of_rank or name in of_user)
    if overridden:
        logger.warning("configure_worker overrides %s for rank %s", ", ".join(overridden), of_rank.get("RANK", "?"))
    merged = {**of_class, **driver, **of_user, **of_slot, **of_rank, **configured}
    path = merged.pop("PYTHONPATH", "")
    return WorkerEnvironment(
        variables={n: v for n, v in merged.items() if not _matches(n, LOADER)},
        loader_variables=start_variables(merged),
        path=tuple(entry for entry in path.split(os.pathsep) if entry),
    )


# The workers of a group have the same variables.
@functools.lru_cache(maxsize=4096)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class WorkerPython:
    """The Python of the workers, with its own `variables`. An empty `runtime_env` lets Ray use prestarted processes."""

    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # by which tools find their environment


def choose_python(python: str | VenvSpec | None, class_name: str) -> str | VenvSpec | None:
    """Return the given Python, or else the one registered for the class, or else None for the driver's own."""
    if python is not None and not isinstance(python, (str, VenvSpec)):
        raise TypeError(f"python must be a VenvSpec, a path or a uv command, got {type(python).__name__}")
    if python is None:
        python = known_actor_environments().get(class_name)
    return None if python == sys.executable else python


def prepare_python(python: str | VenvSpec | None, nodes: Sequence[str], *, timeout_s: float) -> WorkerPython:
    """Build the Python on the nodes where workers will start, and check that it has the cluster's Python and Ray."""
    if python is None:
        return WorkerPython()
    try:
        ready = ensure_worker_env(python, nodes=list(dict.fromkeys(nodes)), timeout_s=timeout_s)
    except VenvError as error:
        reasons = "\n".join(map(str, error.exceptions if isinstance(error, VenvNodesError) else [error]))
        raise WorkerStartError(f"{python!r} cannot run the workers:\n{reasons}") from error
    env_vars = dict(ready.runtime_env.get("env_vars", {}))
    of_venv = [name for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT") if name in env_vars]
    variables = {name: env_vars.pop(name) for name in of_venv}
    return WorkerPython({**ready.runtime_env, "env_vars": env_vars}, variables)

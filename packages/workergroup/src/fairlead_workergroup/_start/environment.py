# SPDX-License-Identifier: Apache-2.0
"""Which variables a worker gets. Pure: the driver's environment comes in as an argument.

The driver's environment is not copied. What a worker gets, each overriding what stands before it: what its node
provides, the `runtime_env` of the class's own `@ray.remote`, the driver variables named here, the user's `env_vars`,
the rank variables, and what `configure_worker` answers.
"""

import fnmatch
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["RANK_VARIABLES", "WorkerEnvironment", "check_env_vars", "start_variables", "worker_environment"]

logger = logging.getLogger(__name__)

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Tuning of the communication libraries, and where data that all processes share lies.
FORWARDED = ("NCCL_*", "GLOO_*", "TORCH_NCCL_*", "CUDA_DEVICE_ORDER", "HF_HOME", "HF_HUB_OFFLINE", "TORCH_HOME")
# Ray chooses the devices, and its own settings belong to a process.
NEVER = ("*_VISIBLE_DEVICES", "*_VISIBLE_CHIPS", "RAY_*", *RANK_VARIABLES)
# Read by the loader, the C library or the interpreter before a line of ours runs: these need a new process. Those of
# OpenMP and of CUDA are read by libraries that the user's class imports later.
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
    """What one worker gets, by the way it gets it.

    Attributes:
        variables: set by the host before the user's class is imported.
        loader_variables: set by Ray before the process starts; any of them costs the prestarted process.
        path: the entries of PYTHONPATH, put into `sys.path` before Python's own, as the variable does nothing in a
            running process.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    loader_variables: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()


def check_env_vars(env_vars: Mapping[str, str]) -> None:
    """Refuse what is not text and what is not the user's to set.

    Raises:
        TypeError: a name or a value is not a string.
        ValueError: a name that is reserved.
    """
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env_vars must map names to strings, got {name!r}: {type(value).__name__}")
        if _matches(name, NEVER):
            raise ValueError(
                f"env_vars may not name {name!r}: Ray chooses the devices, the group sets "
                f"{', '.join(RANK_VARIABLES)}, and RAY_* belongs to each process. Remove it."
            )


def start_variables(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that only count when a process starts, PYTHONPATH among them."""
    return {name: value for name, value in env_vars.items() if _matches(name, LOADER)}


def worker_environment(
    *,
    driver: Mapping[str, str],
    of_class: Mapping[str, str],
    of_slot: Mapping[str, str],
    of_user: Mapping[str, str],
    of_rank: Mapping[str, str],
    configured: Mapping[str, str],
) -> WorkerEnvironment:
    """Put the layers together; none of them is changed."""
    forwarded = {n: v for n, v in driver.items() if _matches(n, FORWARDED) and not _matches(n, NEVER)}
    below = {**of_class, **forwarded, **of_user, **of_slot, **of_rank}
    overridden = sorted(name for name in configured if name in of_rank or name in of_user)
    if overridden:
        logger.warning("configure_worker overrides %s for rank %s", ", ".join(overridden), of_rank.get("RANK", "?"))
    merged = {**below, **configured}
    path = merged.pop("PYTHONPATH", "")
    return WorkerEnvironment(
        variables={n: v for n, v in merged.items() if not _matches(n, LOADER)},
        loader_variables=start_variables(merged),
        path=tuple(entry for entry in path.split(os.pathsep) if entry),
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

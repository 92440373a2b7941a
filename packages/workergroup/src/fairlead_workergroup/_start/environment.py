# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a worker: its variables, its Python, the Ray options of its actor, and its accelerators.

The driver's environment is not copied. A worker gets variables from these sources, where each overrides those before
it: its node, the `runtime_env` of the class's own `@ray.remote`, the driver's variables that are listed here, the
user's `env_vars`, its slot, its rank, and `configure_worker`."""

import copy
import fnmatch
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairlead_placement import Slot
from fairlead_venvs import VenvError, VenvNodesError, VenvSpec, ensure_worker_env, known_actor_environments

from .._model import Place
from ..exceptions import WorkerStartError

logger = logging.getLogger(__name__)

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
    "*MALLOC_*",
    "OPENSSL_CONF",
    "PYTHON*",
    "TZ",
    "*SAN_OPTIONS",
)
# The group sets these options of a class's own `@ray.remote`, which decide where an actor runs, its name, and restarts.
_OURS = (
    "accelerator_type",
    "allow_out_of_order_execution",
    "fallback_strategy",
    "get_if_exists",
    "label_selector",
    "lifetime",
    "max_restarts",
    "max_task_retries",
    "name",
    "namespace",
    "num_cpus",
    "num_gpus",
    "placement_group",
    "placement_group_bundle_index",
    "placement_group_capture_child_tasks",
    "scheduling_strategy",
)


def check_env_vars(env_vars: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy without the names that Ray or the group sets, which are logged; refuse what is not text.

    A driver under torchrun, Slurm or KubeRay has such names in the `os.environ` that its user passes on.
    """
    env_vars = {} if env_vars is None else env_vars
    if not isinstance(env_vars, Mapping):
        raise TypeError(f"env_vars must be a mapping from names to strings, got {env_vars!r}")
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env_vars must map names to strings, got {name!r}: {type(value).__name__}")
    dropped = sorted(name for name in env_vars if _matches(name, NEVER) and name not in OF_FRAMEWORKS)
    if dropped:
        logger.warning(
            "Workers do not get %s of env_vars: the group sets the variables of ranks, Ray chooses the devices, and "
            "RAY_* belongs to each process.",
            ", ".join(dropped),
        )
    return {name: value for name, value in env_vars.items() if name not in dropped}


def start_variables(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read only when a process starts, such as PYTHONPATH."""
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
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that the host sets before it imports the user's class, and those that need a new process.

    Those of the driver are as `forwarded_variables` returns them.
    """
    overridden = sorted(name for name in configured if name in of_rank or name in of_user)
    if overridden:
        logger.warning("configure_worker overrides %s for rank %s", ", ".join(overridden), of_rank.get("RANK", "?"))
    merged = {**of_class, **driver, **of_user, **of_slot, **of_rank, **configured}
    return {n: v for n, v in merged.items() if not _matches(n, LOADER)}, start_variables(merged)


# The workers of a group have the same variables.
@functools.lru_cache(maxsize=4096)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def choose_python(python: str | VenvSpec | None, class_name: str) -> str | VenvSpec | None:
    """Return the given Python, or else the one registered for the class, or else None for the driver's own."""
    if python is not None and not isinstance(python, (str, VenvSpec)):
        raise TypeError(f"python must be a VenvSpec, a path or a uv command, got {type(python).__name__}")
    if python is None:
        python = known_actor_environments().get(class_name)
    return None if python == sys.executable else python


def prepare_python(python: str | VenvSpec | None, nodes: Sequence[str], *, timeout_s: float) -> Mapping[str, Any]:
    """Build the Python on the nodes where workers will start, check its versions, and return the `runtime_env` for it.

    It is empty for the driver's own Python, so that Ray can use prestarted processes.
    """
    if python is None:
        return {}
    try:
        return ensure_worker_env(python, nodes=list(dict.fromkeys(nodes)), timeout_s=timeout_s).runtime_env
    except VenvError as error:
        reasons = "\n".join(map(str, error.exceptions if isinstance(error, VenvNodesError) else [error]))
        raise WorkerStartError(f"{python!r} cannot run the workers:\n{reasons}") from error


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The accelerators of its node that a worker sees, and the master port.

    Attributes:
        visible_devices: which accelerators a worker with accelerators sees. "own": those of its slot, and LOCAL_RANK is
            0, as code expects that runs one process for each device. "node": those of all workers of the group on its
            node, in the order of the ranks, and LOCAL_RANK is the index of its first one, as with torchrun.
        master_port: the master port, or the first and the last port of a range of which one is leased on the node of
            rank 0; None for the `port_range` of the cluster. With one port, all epochs have the same, and the group
            cannot be resized, because a resize needs a second port while the old workers use the first.
    """

    visible_devices: Literal["own", "node"] = "own"
    master_port: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.visible_devices not in ("own", "node"):
            raise ValueError(f"visible_devices must be 'own' or 'node', got {self.visible_devices!r}")
        read_master_ports(self)


def read_master_ports(options: WorkerOptions) -> tuple[int, int] | None:
    """Return the first and the last port that the master port may be; None for those of the cluster."""
    ports = options.master_port
    if ports is None:
        return None
    bounds = (ports, ports) if isinstance(ports, int) else ports
    if isinstance(bounds, tuple) and [type(port) for port in bounds] == [int, int]:
        first, last = bounds
        if 1 <= first <= last <= 65535:
            return first, last
    raise ValueError(
        f"master_port must be a port, or the first and the last port of a range, such as (29500, 29503), got {ports!r}"
    )


def device_facts(place: Place, near: Sequence[Slot], chosen: WorkerOptions) -> dict[str, Any]:
    """Return the facts for `show_devices`, given the slots of the group on the node; none without accelerators."""
    if not place.slot.accelerators:
        return {}
    return {
        "visible": chosen.visible_devices,
        "slots": [dict(slot.accelerators) for slot in near],
        "local_rank": place.local_rank,
    }


def recursive_merge_options(default_options: Mapping[str, Any], extra_options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of Ray options: dicts are merged deeply, other values are replaced by those of `extra_options`.

    Compatible with NeMo RL. Neither input is changed. A `_nsight` entry at the top of `runtime_env` becomes
    `nsight`, Ray's own name.

    >>> recursive_merge_options({"runtime_env": {"env_vars": {"A": "1"}}}, {"runtime_env": {"env_vars": {"B": "2"}}})
    {'runtime_env': {'env_vars': {'A': '1', 'B': '2'}}}
    """
    merged = _merge(default_options, extra_options)
    runtime_env = merged.get("runtime_env")
    if isinstance(runtime_env, dict) and "_nsight" in runtime_env:
        runtime_env["nsight"] = runtime_env.pop("_nsight")
    return merged


def _merge(default: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: copy.deepcopy(value) for name, value in default.items()}
    for name, value in extra.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge(below, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def check_concurrency(options: Mapping[str, Any], *, concurrent: bool) -> None:
    """Refuse options that would run methods on several threads; `max_concurrency` of an asyncio actor does not."""
    several = "concurrency_groups" if options.get("concurrency_groups") else ""
    if not concurrent and options.get("max_concurrency", 1) not in (None, 1):
        several = f"max_concurrency={options['max_concurrency']!r}"
    if several:
        raise ValueError(
            f"{several} would run the methods of a worker on several threads, and its methods run one at a time. "
            "Remove the option; async methods overlap in a group with async_communication=True."
        )


def actor_options(
    slot: Slot,
    *,
    of_class: Mapping[str, Any],
    resources: Mapping[str, Any],
    runtime_env: Mapping[str, Any],
    concurrent: bool = False,
) -> dict[str, Any]:
    """Return the Ray options of a worker in a slot, and refuse requests for which Ray would wait without an error."""
    options = {name: value for name, value in of_class.items() if name not in _OURS and value is not None}
    options.pop("runtime_env", None)
    held = slot.worker_resources
    own = {"num_cpus": held.get("CPU", 0), "num_gpus": held.get("GPU", 0)}
    if memory := int(held.get("memory", 0)):
        own["memory"] = memory
    options = recursive_merge_options(options, {**own, **resources})
    check_concurrency(options, concurrent=concurrent)
    if others := {n: v for n, v in held.items() if n not in ("CPU", "GPU", "memory")}:
        options["resources"] = {**others, **options.get("resources", {})}
    bundle = slot.placement_group.bundle_specs[slot.bundle_index]
    requested = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options.get("resources", {})}
    for name, amount in {**requested, "memory": options.get("memory") or 0}.items():
        if amount > bundle.get(name, 0):
            raise ValueError(
                f"A worker requests {amount:g} {name}, but its bundle holds {bundle.get(name, 0):g}: {dict(bundle)}. "
                "Request less, or reserve larger bundles (cpus_per_worker, node_resource_constraints)."
            )
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    return options

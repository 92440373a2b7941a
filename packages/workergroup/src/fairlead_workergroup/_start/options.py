# SPDX-License-Identifier: Apache-2.0
"""The options of workers: the accelerators that they see, the master port, and the Ray options of their actors."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from fairlead_placement import Slot

from .._model import Place

# The group sets these options, which decide where an actor runs, its name, and its restarts.
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
# What to use in their place, where there is something.
_INSTEAD = {
    "accelerator_type": "label_selector of the cluster",
    "max_restarts": "restart=Restart(...)",
    "num_cpus": "cpus_per_worker of the cluster",
    "num_gpus": "use_gpus or accelerators of the cluster",
    "name": "name_prefix=",
    "env_vars": "env_vars=",
}
# Parts of a `runtime_env` that choose another Python, and the variables.
_OURS_IN_ENV = ("conda", "container", "env_vars", "image_uri", "pip", "py_executable", "uv")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The accelerators of its node that a worker sees, the Ray options of its actor, and the master port.

    Attributes:
        visible_devices: which accelerators a worker with accelerators sees. "own": those of its slot, and LOCAL_RANK is
            0, as code expects that runs one process for each device. "node": those of all workers of the group on its
            node, in the order of the ranks, and LOCAL_RANK is the index of its first one, as with torchrun.
        share_devices: let workers of the group have the same device, such as parts of one. Otherwise such a worker does
            not start.
        ray_options: options of Ray's actors, such as `{"runtime_env": {"nsight": "default"}}`, merged over those of the
            class. Those that the group sets, which decide for example where a worker runs, are refused.
        master_port: the master port, or the first and the last port of a range of which one is leased on the node of
            rank 0; None for the `port_range` of the cluster. With one port, all epochs have the same, and the group
            cannot be resized, because a resize needs a second port while the old workers use the first.
    """

    visible_devices: Literal["own", "node"] = "own"
    share_devices: bool = False
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    master_port: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.visible_devices not in ("own", "node"):
            raise ValueError(f"visible_devices must be 'own' or 'node', got {self.visible_devices!r}")
        check_ray_options(self.ray_options)
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
        "share": chosen.share_devices,
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


def check_ray_options(options: object) -> None:
    """Refuse Ray options of a group that are not options, or that the group sets."""
    if not isinstance(options, Mapping):
        raise TypeError(f"ray_options must be a dict of Ray options, got {options!r}")
    ours = {repr(name): _INSTEAD.get(name) for name in options if name in _OURS}
    for name in options.get("runtime_env") or {}:
        if name in _OURS_IN_ENV:
            ours[f"'runtime_env' with {name!r}"] = _INSTEAD.get(name, "python=")
    if ours:
        texts = [f"{name} (use {instead})" if instead else name for name, instead in ours.items()]
        raise ValueError(f"ray_options has {', '.join(texts)}, which the group sets itself: remove it")
    if options:
        try:
            ray.remote(**options)(type("Worker", (), {}))
        except (TypeError, ValueError) as error:
            raise type(error)(f"ray_options: {error}") from None


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

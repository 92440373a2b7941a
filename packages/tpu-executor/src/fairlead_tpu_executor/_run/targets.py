# SPDX-License-Identifier: Apache-2.0
"""The hosts that work is sent to, their environment variables, and how work is started there.

Our variables override the user's, and these override the node's.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import Slot
from fairlead_placement.extension import number_slots

from .. import _host, _ray_private
from .._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import SliceInfo
from .._reserve.leases import Held
from .work import Work, split_startup_variables

# The hosts need not have fairlead-tpu-executor.
ray.cloudpickle.register_pickle_by_value(_host)
ray.cloudpickle.register_pickle_by_value(_ray_private)
_ONCE: Any = ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)
_CALL, _CALL_RAW, _HOST_ACTOR = _ONCE(_host.call), _ONCE(_host.call_raw), ray.remote(_host.HostActor)

ENV_CALL_INDEX: str = "EXECUTOR_CALL_INDEX"
ENV_CALL_SLICE: str = "EXECUTOR_CALL_SLICE"
# These three count all hosts of all slices; the other variables count within a slice.
ENV_JOB_COORDINATOR_ADDRESS: str = "EXECUTOR_JOB_COORDINATOR_ADDRESS"
ENV_PROCESS_COUNT: str = "EXECUTOR_PROCESS_COUNT"
ENV_PROCESS_INDEX: str = "EXECUTOR_PROCESS_INDEX"
cancel_task = functools.partial(ray.cancel, force=True)
# With one slice none of these may be set, not even by the node: libtpu would wait for other slices.
_MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")


@dataclass(frozen=True)
class Target:
    """A host that work is sent to."""

    slice: SliceInfo
    at: int  # the number of the slice
    worker: int
    node_id: str
    facts: Mapping[str, Any]  # what the process needs to know about the host, as plain data
    options: Mapping[str, Any]  # the Ray options of a task there


def make_targets(work: Work, config: AcceleratorConfigType, held: Held, *, first_hosts: bool = False) -> list[Target]:
    """Return every host as a target for some work, or worker 0 of each slice only (`first_hosts`)."""
    env_vars, runtime_env = work.environment(config)
    tpu = config if isinstance(config, TpuAcceleratorConfig) else None
    zone = {"TPU_ZONE": "EMPTY"} if tpu else {}  # if neither the node nor the user has set it
    targets: list[Target] = []
    for at, lease in enumerate(held.leases):
        options = {**work.remote_options(config, lease.slice), **({"runtime_env": runtime_env} if runtime_env else {})}
        for worker, node_id in enumerate(lease.slice.node_ids[:1] if first_hosts else lease.slice.node_ids):
            facts = {
                # A TPU host has one process of ours at a time, over all pools; without TPUs each bundle has one.
                "name": node_id if tpu else f"{lease.group.id.hex()}-{worker}",
                "env": {**zone, **env_vars, **host_environment(config, held, at, worker)},
                "zone": lease.slice.zone if tpu else "",
                "lock_files": tpu.lock_files if tpu else (),
            }
            place = {"scheduling_strategy": PlacementGroupSchedulingStrategy(lease.group, worker)}
            targets.append(Target(lease.slice, at, worker, node_id, facts, options | place))
    return targets


def make_slots(config: AcceleratorConfigType, held: Held, labels: Mapping[str, Mapping[str, str]]) -> tuple[Slot, ...]:
    """Return every host as a slot with what a process there needs. `labels` are those of each node."""
    envs = [host_environment(config, held, slot.node_idx, slot.bundle_index) for slot in held.slots]
    return number_slots(
        replace(
            slot,
            labels=labels.get(slot.node_id, {}),
            worker_resources=config.request(held.slices[slot.node_idx]),
            env={name: value for name, value in env.items() if value is not None},
        )
        for slot, env in zip(held.slots, envs, strict=True)
    )


def host_environment(config: AcceleratorConfigType, held: Held, at: int, worker: int) -> dict[str, str | None]:
    """Return the variables of worker `worker` of slice number `at`, by name; None marks a variable to remove."""
    slices, one = held.slices, held.slices[at]
    ours: dict[str, str | None] = {
        ENV_CALL_INDEX: str(worker),
        ENV_CALL_SLICE: str(at),
        "EXECUTOR_NUM_HOSTS": str(one.num_hosts),
        "EXECUTOR_COORDINATOR_ADDRESS": held.leases[at].port.host_port,
        ENV_JOB_COORDINATOR_ADDRESS: held.leases[0].port.host_port,
        ENV_PROCESS_COUNT: str(held.first_hosts[-1]),
        ENV_PROCESS_INDEX: str(held.first_hosts[at] + worker),
    }
    if isinstance(config, TpuAcceleratorConfig):
        ours |= {
            "TPU_HOST_ID": str(worker),
            "TPU_SLICE_NAME": one.slice_name,
            "TPU_NUM_DEVICES": str(one.num_accelerators_per_host),
            "TPU_VERSION": config.tpu_version,
            "TPU_POD_COUNT": str(len(slices)),
            **dict.fromkeys(_MEGASCALE),
        }
    if held.megascale is not None:
        values = (held.megascale.host_port, str(len(slices)), str(held.megascale.port), str(at))
        ours |= dict(zip(_MEGASCALE, values, strict=True))
    return {**split_startup_variables(config.env_vars)[0], **ours}


def submit(target: Target, payload: Any, *, dedicated: bool = False) -> Any:
    """Start a task on a host. In a `dedicated` process, which is always new, it returns the function's own result."""
    task, options = (_CALL_RAW, _require_new_process(target.options)) if dedicated else (_CALL, target.options)
    # The list delays the unpickling until the environment on the host is set.
    return task.options(**options).remote(dict(target.facts), [payload])


def start_actor(target: Target, payload: Any) -> Any:
    """Start an actor on a host, and return its handle. Its first call makes the instance of the user's class."""
    actor = _HOST_ACTOR.options(**_require_new_process(target.options), max_restarts=0)
    return actor.remote(dict(target.facts), [payload])


def _require_new_process(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with an environment that no other task of the job has, so that no used process has it either."""
    own = options.get("runtime_env") or {}
    variables = {**(own.get("env_vars") or {}), "FAIRLEAD_OWN_PROCESS": "1"}
    return {**options, "runtime_env": {**own, "env_vars": variables}}

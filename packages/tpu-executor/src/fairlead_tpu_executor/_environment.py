# SPDX-License-Identifier: Apache-2.0
"""The variables of each host, and the hosts as slots for worker groups.

Our variables override the user's, and these override the node's.
"""

from collections.abc import Mapping
from dataclasses import replace

from ray.util.tpu import get_tpu_coordinator_env_vars

from fairlead_placement import Slot, extension

from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._leases import Held

ENV_CALL_INDEX: str = "EXECUTOR_CALL_INDEX"
ENV_CALL_SLICE: str = "EXECUTOR_CALL_SLICE"
# These three count all hosts of all slices; the other variables count within a slice.
ENV_JOB_COORDINATOR_ADDRESS: str = "EXECUTOR_JOB_COORDINATOR_ADDRESS"
ENV_PROCESS_COUNT: str = "EXECUTOR_PROCESS_COUNT"
ENV_PROCESS_INDEX: str = "EXECUTOR_PROCESS_INDEX"
# With one slice none of these may be set, not even by the node: libtpu would wait for other slices.
_MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")
# The loader and the interpreter read these before any of our code runs, so they need a new process.
_STARTUP_PREFIXES = ("LD_", "PYTHON")


def split_startup_variables(env_vars: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that a running process can set, and those that take effect only in a new process."""
    startup = {name: value for name, value in env_vars.items() if name.startswith(_STARTUP_PREFIXES)}
    return {name: value for name, value in env_vars.items() if name not in startup}, startup


def host_environment(config: AcceleratorConfigType, held: Held, number: int, worker: int) -> dict[str, str | None]:
    """Return the variables of a worker of slice `number`, by name; None marks a variable to remove."""
    place = held.slices[number]
    ours: dict[str, str | None] = {
        ENV_CALL_INDEX: str(worker),
        ENV_CALL_SLICE: str(number),
        "EXECUTOR_NUM_HOSTS": str(place.num_hosts),
        "EXECUTOR_COORDINATOR_ADDRESS": held.leases[number].port.host_port,
        ENV_JOB_COORDINATOR_ADDRESS: held.leases[0].port.host_port,
        ENV_PROCESS_COUNT: str(held.first_hosts[-1]),
        ENV_PROCESS_INDEX: str(held.first_hosts[number] + worker),
    }
    if isinstance(config, TpuAcceleratorConfig):
        ours |= {
            "TPU_HOST_ID": str(worker),
            "TPU_SLICE_NAME": place.slice_name,
            "TPU_NUM_DEVICES": str(place.num_accelerators_per_host),
            "TPU_VERSION": config.tpu_version,
            "TPU_POD_COUNT": str(len(held.slices)),
            **dict.fromkeys(_MEGASCALE),
        }
    if (port := held.megascale) is not None:
        ours |= get_tpu_coordinator_env_vars(port.host_port, len(held.slices), number, str(port.port))
    return {**split_startup_variables(config.env_vars)[0], **ours}


def make_slots(config: AcceleratorConfigType, held: Held, labels: Mapping[str, Mapping[str, str]]) -> tuple[Slot, ...]:
    """Return every host as a slot with what a process there needs. `labels` are those of each node."""
    envs = [host_environment(config, held, slot.node_idx, slot.bundle_index) for slot in held.slots]
    return extension.number_slots(
        replace(
            slot,
            labels=labels.get(slot.node_id, {}),
            worker_resources=config.request(held.slices[slot.node_idx]),
            env={name: value for name, value in env.items() if value is not None},
        )
        for slot, env in zip(held.slots, envs, strict=True)
    )

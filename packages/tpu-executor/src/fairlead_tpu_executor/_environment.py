# SPDX-License-Identifier: Apache-2.0
"""The variables of each host, the hosts as slots for worker groups, and JAX over all hosts.

Our variables override the user's, and these override the node's.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.util.tpu import get_tpu_coordinator_env_vars

from fairlead_placement import Slot, extension

from ._config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from ._reservation import Lease
from .exceptions import JaxUnavailableError

ENV_CALL_INDEX: str = "EXECUTOR_CALL_INDEX"
ENV_CALL_SLICE: str = "EXECUTOR_CALL_SLICE"
# These three count all hosts of all slices; the other variables count within a slice.
_OF_JOB = ("EXECUTOR_JOB_COORDINATOR_ADDRESS", "EXECUTOR_PROCESS_COUNT", "EXECUTOR_PROCESS_INDEX")
# With one slice none of these may be set, not even by the node: libtpu would wait for other slices.
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")


def host_environment(
    config: AcceleratorConfigType, leases: Sequence[Lease], number: int, worker: int
) -> dict[str, str]:
    """Return the variables of a worker of slice `number`, by name."""
    place = leases[number].slice
    ours = {
        ENV_CALL_INDEX: str(worker),
        ENV_CALL_SLICE: str(number),
        "EXECUTOR_NUM_HOSTS": str(place.num_hosts),
        "EXECUTOR_COORDINATOR_ADDRESS": leases[number].port.host_port,
        "EXECUTOR_JOB_COORDINATOR_ADDRESS": leases[0].port.host_port,
        "EXECUTOR_PROCESS_COUNT": str(len(leases) * place.num_hosts),  # All slices are of one type.
        "EXECUTOR_PROCESS_INDEX": str(number * place.num_hosts + worker),
    }
    if isinstance(config, TpuAcceleratorConfig):
        ours |= {
            "TPU_HOST_ID": str(worker),
            "TPU_SLICE_NAME": place.slice_name,
            "TPU_NUM_DEVICES": str(place.num_accelerators_per_host),
            "TPU_VERSION": config.tpu_version,
            "TPU_POD_COUNT": str(len(leases)),
        }
        if len(leases) > 1:
            first = replace(leases[0].port, port=megascale_port(config))
            ours |= get_tpu_coordinator_env_vars(first.host_port, len(leases), number, str(first.port))
    return ours


def megascale_port(config: AcceleratorConfigType) -> int:
    """Return the port of the coordinator of several slices: the configuration's, else `COORD_PORT`, else 8081."""
    if isinstance(config, TpuAcceleratorConfig) and config.megascale_port is not None:
        return config.megascale_port
    text = config.env_vars.get("COORD_PORT") or os.environ.get("COORD_PORT") or str(MEGASCALE_DEFAULT_PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"COORD_PORT must be a port, 1 to 65535, got {text!r}.")
    return int(text)


def make_slots(config: AcceleratorConfigType, leases: Sequence[Lease]) -> tuple[Slot, ...]:
    """Return every host as a slot with what a process there needs, in the order of slices and TPU worker ids."""
    return extension.number_slots(
        Slot(
            placement_group=lease.group,
            bundle_index=worker,
            node_idx=number,
            node_id=lease.slice.node_ids[worker],
            node_ip=lease.slice.node_ips[worker],
            node_rank=0,
            local_rank=0,
            worker_resources=config.request(lease.slice),
            env={**config.env_vars, **host_environment(config, leases, number, worker)},
        )
        for number, lease in enumerate(leases)
        for worker in range(lease.slice.num_hosts)
    )


def initialize_jax(*, timeout_s: float = 300.0, **options: Any) -> None:
    """Join all hosts of all slices in one JAX cluster; call it first in a function that a pool runs.

    It imports jax and calls `jax.distributed.initialize` with the coordinator on worker 0 of slice 0, the number of
    hosts, and the index of this host in the order of the results. Every host of the run has to call it, so it does not
    work under `run_on_first_hosts`. `options` are further arguments of jax, such as `local_device_ids`.

    Raises:
        JaxUnavailableError: jax is not installed here, or this process does not run a function of a pool.
        ValueError: `timeout_s`, the seconds to wait for all hosts, is not above 0.
        Exception: jax raises its own exceptions, for example when a host is missing at the end of the timeout.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}.")
    missing = [name for name in _OF_JOB if not os.environ.get(name)]
    if missing:
        raise JaxUnavailableError(
            f"initialize_jax needs the variables that a run sets, and this process lacks {', '.join(missing)}. "
            "Call it in a function that SlicePool.run, RayExecutor or TpuRemoteManager runs on the hosts."
        )
    try:
        import jax
    except ImportError as error:
        raise JaxUnavailableError(
            "initialize_jax needs jax, which cannot be imported on this host. Install it there, or name it in "
            'execution_env={"pip": ["jax"]}.'
        ) from error
    address, count, index = (os.environ[name] for name in _OF_JOB)
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=int(count),
        process_id=int(index),
        initialization_timeout=math.ceil(timeout_s),
        **options,
    )

# SPDX-License-Identifier: Apache-2.0
"""JAX over all hosts of all slices, set up inside a function that runs on them."""

import math
import os
from typing import Any

from ._environment import ENV_JOB_COORDINATOR_ADDRESS, ENV_PROCESS_COUNT, ENV_PROCESS_INDEX
from .exceptions import JaxUnavailableError

_NEEDED = (ENV_JOB_COORDINATOR_ADDRESS, ENV_PROCESS_COUNT, ENV_PROCESS_INDEX)


def initialize_jax(*, timeout_s: float = 300.0, **options: Any) -> None:
    """Join all hosts of all slices in one JAX cluster; call it first in a function that a pool runs.

    It imports jax and calls `jax.distributed.initialize` with the coordinator on worker 0 of slice 0, the number of
    hosts, and the index of this host in the order of the results. Every host of the run has to call it, so it does not
    work under `run_on_first_hosts`. `options` are further arguments of jax, such as `local_device_ids`.

    Raises:
        JaxUnavailableError: jax is not installed here, or this process does not run a function of a pool.
        ValueError: `timeout_s`, the seconds to wait for all hosts, is not above 0.
        Exception: jax raises its own exceptions, for example when a host is missing at the end of the timeout.

    >>> initialize_jax()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fairlead_tpu_executor.exceptions.JaxUnavailableError: initialize_jax needs the variables that a run sets, ...
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}.")
    missing = [name for name in _NEEDED if not os.environ.get(name)]
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
    jax.distributed.initialize(
        coordinator_address=os.environ[ENV_JOB_COORDINATOR_ADDRESS],
        num_processes=int(os.environ[ENV_PROCESS_COUNT]),
        process_id=int(os.environ[ENV_PROCESS_INDEX]),
        initialization_timeout=math.ceil(timeout_s),
        **options,
    )

# SPDX-License-Identifier: Apache-2.0
"""Functions and classes on TPU slices, from a pool that survives preemption; also on hosts with CPUs or GPUs."""

from ._classic import (
    RayExecutor,
    SlicePoolManager,
    TpuRemoteManager,
    autoscale_execute,
    autoscale_execute_resumable,
    execute,
    execute_resumable,
    resolve_maybe_refs,
)
from ._config import (
    MEGASCALE_DEFAULT_PORT,
    AcceleratorConfigType,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    TpuAcceleratorConfig,
)
from ._device import DeviceClass, DeviceFunction, DeviceInstances, device_remote, tpu_remote
from ._environment import ENV_CALL_INDEX, ENV_CALL_SLICE, initialize_jax
from ._pool import SlicePool
from ._slices import SliceInfo
from ._verdicts import JobError, JobFailed, JobInfo, JobPreempted, JobStatus, JobSucceeded, handle_ray_error
from .exceptions import (
    InsufficientSlicesError,
    JaxUnavailableError,
    OpenInstancesError,
    PreemptionLimitError,
    SliceLostError,
    TpuExecutorError,
)

__version__ = "0.1.0"

__all__ = [
    "AcceleratorConfigType",
    "CpuAcceleratorConfig",
    "DeviceClass",
    "DeviceFunction",
    "DeviceInstances",
    "ENV_CALL_INDEX",
    "ENV_CALL_SLICE",
    "GpuAcceleratorConfig",
    "InsufficientSlicesError",
    "JaxUnavailableError",
    "JobError",
    "JobFailed",
    "JobInfo",
    "JobPreempted",
    "JobStatus",
    "JobSucceeded",
    "MEGASCALE_DEFAULT_PORT",
    "OpenInstancesError",
    "PreemptionLimitError",
    "RayExecutor",
    "SliceInfo",
    "SliceLostError",
    "SlicePool",
    "SlicePoolManager",
    "TpuAcceleratorConfig",
    "TpuExecutorError",
    "TpuRemoteManager",
    "autoscale_execute",
    "autoscale_execute_resumable",
    "device_remote",
    "execute",
    "execute_resumable",
    "handle_ray_error",
    "initialize_jax",
    "resolve_maybe_refs",
    "tpu_remote",
]

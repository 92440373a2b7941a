# SPDX-License-Identifier: Apache-2.0
"""A platform of verl for tests: Ray counts and assigns logical GPUs, tensors are on the CPU, collectives use Gloo.

verl's own hook loads it: VERL_USE_EXTERNAL_MODULES=fairlead_logical_gpus VERL_PLATFORM=logical_gpus.
"""

import contextlib
import os
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_):
    """Do nothing."""


def zero(*_):
    """Return 0."""
    return 0


def true(*_):
    """Return True."""
    return True


def count():
    """Return the number of logical GPUs of a node."""
    return int(os.environ.get("LOGICAL_GPUS", "4"))


device = types.SimpleNamespace(
    **dict.fromkeys(["set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"], nothing),
    **dict.fromkeys(["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"], zero),
    is_available=true,
    is_bf16_supported=true,
    device_count=count,
    current_device=zero,
    current_stream=nothing,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    mem_get_info=lambda *_: (8 << 30, 16 << 30),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    get_device_name=lambda *_: "cpu",
    Stream=None,
    Event=None,
)


@PlatformRegistry.register("logical_gpus")
class LogicalGpus(PlatformBase):
    """The CPU, which Ray counts as GPUs."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device
    is_available = true
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing

    def current_device(self):
        return "cpu"

    def device_count(self):
        return count()

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, *_):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, _):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self):
        return False

    def rollout_env_vars(self):
        return {}


init_of_torch = torch.distributed.init_process_group


def init_process_group(backend=None, *args, **kwargs):
    """Accept verl's "cpu:gloo,<device>:<backend>", which torch refuses if the device is the CPU too."""
    return init_of_torch("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group

# SPDX-License-Identifier: Apache-2.0
"""A plug-in of pytest that runs tests of verl, unchanged, on private local clusters with logical GPUs.

FAIRLEAD_VERL=0 runs them with verl's own groups.
"""

import os

os.environ.update(
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_memory_monitor_refresh_ms="0",
    TOKENIZERS_PARALLELISM="false",
    VERL_ENGINE_DEVICE="cuda",
    VERL_PLATFORM="logical_gpus",
    VERL_USE_EXTERNAL_MODULES="fairlead_logical_gpus",
)

import pytest
import ray
import torch

init_of_ray = ray.init


def init(address=None, **options):
    """Start a cluster with logical GPUs and enough CPUs for all groups of a test."""
    options = {"num_cpus": 200, "num_gpus": 8, **options, "include_dashboard": False, "log_to_driver": False}
    return init_of_ray("local", **options)


ray.init = init
# The tests ask torch how many GPUs there are.
torch.cuda.device_count = lambda: int(os.environ.get("LOGICAL_GPUS", "4"))


@pytest.fixture(autouse=True)
def _shut_ray_down():
    yield
    if ray.is_initialized():
        ray.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""Which implementation of verl's pools and groups this process uses: that of this package, or verl's own."""

import os

import ray
from verl.single_controller import ray as verl_ray

VERLS = "verl.single_controller.ray.base"
OURS = {"RayWorkerGroup": "fairlead_verl._groups"} | dict.fromkeys(
    ["RayResourcePool", "SubRayResourcePool"], "fairlead_verl._pools"
)
# A method that each class defines itself, here and in verl.
METHODS = {
    "RayWorkerGroup": "execute_all_sync",
    "RayResourcePool": "get_placement_groups",
    "SubRayResourcePool": "__init__",
}
IS_ON = os.environ.get("FAIRLEAD_VERL") != "0"
WANTED = OURS if IS_ON else dict.fromkeys(OURS, VERLS)


def name_modules():
    """Return the module that implements each of verl's classes."""
    return {name: getattr(getattr(verl_ray, name), method).__module__ for name, method in METHODS.items()}


def look_at_worker(_):
    """Return the modules and the process of a worker."""
    return name_modules(), os.getpid()


def check_classes(group):
    """Check in this process and in each worker of a group whose classes are in use; return the workers' processes."""
    assert (name_modules(), type(group).execute_all_sync.__module__) == (WANTED, WANTED["RayWorkerGroup"])
    found = ray.get([worker.__ray_call__.remote(look_at_worker) for worker in group.workers])
    assert [modules for modules, _ in found] == [WANTED] * len(found)
    return [pid for _, pid in found]

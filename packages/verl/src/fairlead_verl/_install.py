# SPDX-License-Identifier: Apache-2.0
"""The replacement of verl's classes in one process."""

import importlib
import os
import sys

import ray

#: The versions of verl that the tests of this package cover.
VERSIONS: tuple[str, ...] = ("0.9.1",)


def install() -> bool:
    """Replace verl's pools and worker groups in this process, unless they shall stay.

    They stay if the environment variable `FAIRLEAD_VERL` is "0", and with a version of verl that is not in `VERSIONS`
    unless the variable is "1".

    Returns:
        Whether they have been replaced.
    """
    choice = os.environ.get("FAIRLEAD_VERL", "")
    if choice == "0":
        return False
    version = importlib.import_module("verl").__version__
    if version not in VERSIONS and choice != "1":
        # Every worker imports verl too.
        if not (ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE):
            print(  # noqa: T201
                f"fairlead-verl was tested with verl {', '.join(VERSIONS)}, and this is verl {version}: it uses its "
                "own worker groups. Set FAIRLEAD_VERL=1 to use those of Fairlead.",
                file=sys.stderr,
            )
        return False
    exported, defined = (importlib.import_module(f"verl.single_controller.ray{name}") for name in ("", ".base"))
    pools, groups = (importlib.import_module(f"fairlead_verl.{name}") for name in ("_pools", "_groups"))
    for cls in (pools.RayResourcePool, pools.SubRayResourcePool, groups.RayWorkerGroup):
        # A pickle then imports verl first, which installs this package, and it also loads where this package is off.
        cls.__module__ = defined.__name__
        for module in (exported, defined):
            setattr(module, cls.__name__, cls)
    return True

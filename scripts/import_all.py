# SPDX-License-Identifier: Apache-2.0
"""Import every module of an installed package: `python import_all.py fairlead_batching`."""

import importlib
import pkgutil
import sys

# What extras and frameworks bring, so that a module that imports it cannot be imported without it.
OPTIONAL = {"torch", "opentelemetry", "jax", "ray", "verl", "nixl_cu12", "xxhash", "zmq", "rich", "miles", "slime"}

package = importlib.import_module(sys.argv[1])
assert str(package.__file__).startswith(sys.prefix), f"{package.__file__} is not from {sys.prefix}"
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise

# SPDX-License-Identifier: Apache-2.0
"""The functions that requests call: small, because they travel with each of them."""

import sys
import types
from typing import Any

import ray

SHARED = "_fairlead_transfer"


def find_shared(name: str, default: Any) -> Any:
    """Return a value that the copies of this code in a process share, such as "ends"; set it if there is none."""
    return sys.modules.setdefault(SHARED, types.ModuleType(SHARED)).__dict__.setdefault(name, default)


def serve(worker: Any, key: tuple[str, str], code: bytes | None, operation: str, *args: Any) -> Any:
    """Run an operation of the worker's end of a link; make the end first if this process has none.

    The code is the pickled class of the end; None if the process has been given it before.
    """
    ends = find_shared("ends", {})
    if key not in ends:
        if operation in ("close", "release", "prepare"):
            return None
        ends[key] = ray.cloudpickle.loads(code)(key)
    return ends[key].serve(worker, operation, args)

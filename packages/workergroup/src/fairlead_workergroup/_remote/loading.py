# SPDX-License-Identifier: Apache-2.0
"""Finding a user's class by what was sent of it. Shipped by value, as `_host` is: the standard library and Ray only."""

import functools
import importlib
from typing import Any

import ray

__all__ = ["found", "load", "undecorated"]


def load(target: Any) -> type:
    """The user's class, from its full name, its pickled bytes or itself; `@ray.remote` is taken off."""
    return undecorated(found(target))


def found(target: Any) -> Any:
    """What a full name or pickled bytes stand for, or the object itself."""
    if isinstance(target, bytes):
        return ray.cloudpickle.loads(target)
    return _import(target) if isinstance(target, str) else target


def undecorated(found: Any) -> type:
    """The class itself, without `@ray.remote`."""
    cls = getattr(found, "__ray_actor_class__", found)
    if not isinstance(cls, type):
        raise TypeError(f"a worker must be a class, got {found!r}")
    return cls


def _import(full_name: str) -> Any:
    """`package.module.Outer.Class`: the longest prefix that is a module, then attributes."""
    parts = full_name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # Only "there is no such module" means that the name is a class; what the module misses is its own error.
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise
            missing = error
            continue
        try:
            return functools.reduce(getattr, parts[split:], module)
        except AttributeError as error:
            raise ImportError(f"module {module_name!r} has no {'.'.join(parts[split:])!r}") from error
    raise missing

# SPDX-License-Identifier: Apache-2.0
"""Every use of a Ray API that is not public, each with its reason and its fallback."""

import io
import os
import types
from collections.abc import Callable
from typing import Any


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are about to leave the cluster; empty if Ray lacks this call.

    `ray.nodes()` shows draining nodes as alive, and a task with affinity to one of them fails. Without this call,
    Fairlead reports that failure as an error of the node.
    """
    import ray

    ask: Any = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(ask()) if ask is not None else frozenset()


def is_client() -> bool:
    """Return whether this process is connected through Ray Client, for which most of Ray's functions fail.

    `ray.is_initialized()` is true of such a process too. Fallback: False. Ray's own errors then say that something is
    wrong.
    """
    try:
        from ray.util.client import ray as client

        return bool(client.is_connected())
    except (ImportError, AttributeError):
        return False


def announced_address() -> str | None:
    """Return the address that `ray start` of this user has announced on this machine, or None.

    For "auto", Ray itself also takes any other cluster of the machine, such as the private one of another program.
    Fallback: None.
    """
    try:
        from ray._private.utils import get_ray_address_file
    except ImportError:
        return None
    try:
        with open(get_ray_address_file(None), encoding="utf-8") as file:
            return file.read(300).strip() if os.fstat(file.fileno()).st_uid == os.getuid() else None
    except (OSError, UnicodeDecodeError):
        return None


def dumps_by_value(value: Any, by_value: Callable[[str], bool]) -> bytes:
    """Pickle a value, with the functions and classes by value whose module's name `by_value` accepts.

    `ray.cloudpickle.register_pickle_by_value` is public, but it affects the whole process: two threads would undo each
    other's registration, and an error that a user's actor raises would arrive as another class than its caller knows.
    Fallback: by reference, so that the nodes need fairlead-venvs.
    """
    from ray import cloudpickle

    reduce_class: Any = getattr(cloudpickle.cloudpickle, "_dynamic_class_reduce", None)
    if reduce_class is None or not hasattr(cloudpickle.CloudPickler, "_dynamic_function_reduce"):
        return bytes(cloudpickle.dumps(value))

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and by_value(str(obj.__module__)):
                return reduce_class(obj) if isinstance(obj, type) else self._dynamic_function_reduce(obj)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""Every use of Ray that is not public, each with its reason and its fallback."""

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction


def topology_is_valid(generation: str, topology: str) -> bool:
    """Return whether Ray's table of TPU topologies, which its label selectors use, has this one.

    Fallback: every topology with the right number of chips is valid.
    """
    try:
        from ray._private.accelerators import TPUAcceleratorManager

        return bool(TPUAcceleratorManager.is_valid_tpu_accelerator_topology(generation, topology))
    except (ImportError, AttributeError):
        return True


def usual_topology(generation: str, chips: int) -> str:
    """Return the most compact topology in Ray's table with so many chips, or "" if there is none.

    Ray's request for a new slice needs a topology, and nothing public lists them. Fallback: "".
    """
    try:
        from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY
    except ImportError:
        return ""
    shapes = {text: [int(size) for size in text.split("x")] for text in VALID_TPU_TOPOLOGY.get(generation, ())}
    matching = sorted((sum(shape), text) for text, shape in shapes.items() if math.prod(shape) == chips)
    return matching[0][1] if matching else ""


def process_is_fresh() -> bool:
    """Return, in a task, whether no other task ran in this process, by Ray's counters for each function.

    Fallback: no process counts as fresh, and each task starts twice.
    """
    manager = getattr(ray._private.worker.global_worker, "function_actor_manager", None)
    counters = getattr(manager, "_num_task_executions", None)
    # The one counter is that of this task. It has max_calls=1, so it cannot have run here before.
    return counters is not None and len(counters) == 1


def unwrap_remote(target: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function or class under `@ray.remote` and its options; anything else as it is, without options.

    Nothing public reads either of them. Fallback: a TypeError refuses what is under `@ray.remote`.
    """
    try:
        if isinstance(target, RemoteFunction):
            return target._function, dict(target._default_options)
        if isinstance(target, ActorClass):
            return target.__ray_actor_class__, dict(target._default_options)
    except AttributeError as error:
        raise TypeError(
            f"This version of Ray does not show what is under the @ray.remote of {target!r}. "
            "Pass the plain function or class."
        ) from error
    return target, {}


@contextlib.contextmanager
def no_announcement() -> Iterator[None]:
    """Keep `ray.cluster_utils.Cluster` from announcing its address, and from removing what `ray start` announced.

    Fallback: it does both, so drivers of other programs join it, and do not find the cluster of `ray start`.
    """
    with contextlib.ExitStack() as patches:
        for module, name in (("ray._private.utils", "write_ray_address"), ("ray._common.utils", "reset_ray_address")):
            with contextlib.suppress(ImportError, AttributeError):
                owner = importlib.import_module(module)
                patches.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, lambda *_: None)
        yield

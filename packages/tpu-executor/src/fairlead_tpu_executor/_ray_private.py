# SPDX-License-Identifier: Apache-2.0
"""Every use of Ray that is not public, each with its reason and its fallback."""

import contextlib
import importlib
import tempfile
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


def head_answers(timeout_s: float) -> bool:
    """Return whether Ray's head answers a small request in time. The public requests have no deadline.

    Fallback: the head counts as answering, and a request waits as long as Ray does.
    """
    client = getattr(ray._private.worker.global_worker, "gcs_client", None)
    try:
        client.check_alive([], timeout=timeout_s)  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return True
    except ray.exceptions.RayError:
        return False
    return True


def session_folder() -> str:
    """Return the folder of this node's Ray session, which Ray mounts in the containers of its workers.

    Nothing public names it. Fallback: the system's folder for temporary files.
    """
    node = getattr(ray._private.worker.global_worker, "node", None)
    try:
        return str(node.get_session_dir_path())  # type: ignore[union-attr]
    except AttributeError:
        return tempfile.gettempdir()


def process_is_fresh() -> bool:
    """Return, in a task, whether no other task ran in this process, by Ray's counters for each function.

    Fallback: no process counts as fresh, and each run starts new processes.
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

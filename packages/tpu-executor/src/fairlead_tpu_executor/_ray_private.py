# SPDX-License-Identifier: Apache-2.0
"""Every call on Ray that is not public, each with its reason and what happens without it."""

import ray

__all__ = ["head_answers", "process_is_fresh", "topology_is_valid"]


def topology_is_valid(generation: str, topology: str) -> bool:
    """Whether Ray's table of TPU topologies has this one.

    Ray's own table is what its label selectors go by, and nothing public reads it. Without it every topology with the
    right number of chips is taken.
    """
    try:
        from ray._private.accelerators import TPUAcceleratorManager

        valid: bool = TPUAcceleratorManager.is_valid_tpu_accelerator_topology(generation, topology)
    except (ImportError, AttributeError):
        return True
    return valid


def head_answers(timeout_s: float) -> bool:
    """Return whether Ray's head answers a small request within `timeout_s` seconds.

    The public requests have no deadline. Without this one the head is taken to answer, and a request waits for as long
    as Ray does.
    """
    client = getattr(ray._private.worker.global_worker, "gcs_client", None)
    try:
        client.check_alive([], timeout=timeout_s)  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return True
    except ray.exceptions.RayError:
        return False
    return True


def process_is_fresh() -> bool:
    """In a task: whether no other task ran in this process.

    Ray keeps a counter for each function that was loaded to be run, and says nowhere how many there are. Without these
    no process is taken to be fresh, and runs pay for processes of their own.
    """
    manager = getattr(ray._private.worker.global_worker, "function_actor_manager", None)
    counters = getattr(manager, "_num_task_executions", None)
    # The one is that of the task that asks. It has max_calls=1, so it cannot have run here before.
    return counters is not None and len(counters) == 1

# SPDX-License-Identifier: Apache-2.0
"""One attempt: a task on every host, watched until its outcome is clear."""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import Slot, extension

from . import _host
from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._environment import MEGASCALE
from ._reservation import Lease
from ._slices import SliceInfo
from ._verdicts import HostError, judge_one
from ._work import Work

logger = logging.getLogger(__name__)
# The hosts need not have fairlead-tpu-executor.
ray.cloudpickle.register_pickle_by_value(_host)
_CALL: Any = ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(_host.call)
_HOST_ACTOR: Any = ray.remote(_host.HostActor)
_POLL_S = 0.1
_LOOK_S = 1.0
# A killed process ends within seconds; one that is stuck in the kernel may never end.
CANCEL_S = 10.0
# Seconds of silence of Ray's head after which `HeadTimeoutError` ends a run or a call.
SILENT_S = 30.0


def look_at_nodes(node_ids: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return which of these nodes are dead, and which are dead or draining; a silent head is a HeadTimeoutError."""
    rows, draining = extension.ask_head(
        "list the nodes", lambda: (ray.nodes(), extension.drain_deadlines()), timeout_s=SILENT_S
    )
    asked = frozenset(node_ids)
    dead = asked - {row["NodeID"] for row in rows if row["Alive"]}
    return dead, dead | (asked & draining.keys())


def start(
    work: Work, config: AcceleratorConfigType, leases: Sequence[Lease], slot: Slot, *, of_class: bool = False
) -> Any:
    """Start a task on a host of the slices, and return its reference; or an actor of a class, and return its handle."""
    tpu = config if isinstance(config, TpuAcceleratorConfig) else None
    place, runtime_env = leases[slot.node_idx].slice, work.runtime_env(config)
    # No other task has this environment, not even a child, so the task gets a new process.
    variables = {**runtime_env["env_vars"], **slot.env, "FAIRLEAD_OWN_PROCESS": uuid.uuid4().hex}
    facts = {
        "unset": MEGASCALE if tpu and len(leases) == 1 else (),
        # The node's own zone comes first, so the process sets this one.
        "zone": variables.pop("TPU_ZONE", "EMPTY") if tpu else "",
        "lock_files": tpu.lock_files if tpu else (),
    }
    remote = (_HOST_ACTOR if of_class else _CALL).options(
        **work.remote_options(config.request(place)),
        runtime_env={**runtime_env, "env_vars": variables},
        scheduling_strategy=PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle_index),
    )
    # The list delays the unpickling until the environment on the host is set.
    return remote.remote(facts, [work.payload])


def run_once(
    leases: Sequence[Lease],
    slots: Sequence[Slot],
    call: Callable[[Slot], Any],
    grace_s: float,
    check_open: Callable[[], object],
) -> tuple[list[Any], list[HostError]]:
    """Call a function on hosts of slices until the outcome is clear, and end what still runs.

    Returns the values in the order of the slots, or the errors in the order of arrival. `call` starts the function, and
    `check_open` raises if the pool was closed.
    """
    calls: dict[Any, tuple[SliceInfo, int]] = {}  # slices and workers, by the references of the calls
    values: dict[Any, Any] = {}
    errors: dict[Any, HostError] = {}
    try:
        for slot in slots:
            calls[call(slot)] = leases[slot.node_idx].slice, slot.bundle_index
        nodes = {ref: place.node_ids[worker] for ref, (place, worker) in calls.items()}
        first_at = looked_at = time.monotonic()
        is_over = False
        while len(values) < len(calls) and not is_over:
            first_at = first_at if errors else time.monotonic()
            running = [ref for ref in calls if ref not in values and ref not in errors]
            if not running:
                time.sleep(_POLL_S)
            for ref in running and ray.wait(running, num_returns=len(running), timeout=_POLL_S)[0]:
                running.remove(ref)
                try:
                    values[ref] = ray.get(ref)
                except Exception as error:  # noqa: BLE001 - Ray's, or the user's in a class that is both
                    errors[ref] = HostError(*calls[ref], error)
            now = time.monotonic()
            if errors or now - looked_at >= _LOOK_S:
                check_open()  # A task that comes after the end of its placement group would wait forever.
                dead, gone = look_at_nodes(nodes.values())
                looked_at = now
                # Ray fails the tasks of a dead node, except those that it does not know to be there.
                for ref in [ref for ref in running if nodes[ref] in dead]:
                    errors[ref] = HostError(*calls[ref], ray.exceptions.NodeDiedError("its node is dead"))
                is_late = now >= first_at + grace_s
                is_over = bool(errors) and is_clear([*errors.values()], gone, is_running=bool(running), is_late=is_late)
        return [values[ref] for ref in calls if not errors], [*errors.values()]
    finally:
        ended = values.keys() | {ref for ref, host in errors.items() if not host.is_of_dead_node}
        _cancel({ref: host for ref, host in calls.items() if ref not in ended})


def is_clear(errors: Sequence[HostError], gone: Collection[str], *, is_running: bool, is_late: bool) -> bool:
    """Return whether no further event can change the verdict. `is_late` says that the grace period is over.

    If the function raised on every host, the failure is the function's. A host that raised while others still run may
    be the first sign of a preemption, and so may the death of a process.
    """
    if is_late or any(judge_one(host.error, host.node_id in gone) == "preempted" for host in errors):
        return True
    return not is_running and all(isinstance(host.error, ray.exceptions.RayTaskError) for host in errors)


def _cancel(running: Mapping[Any, tuple[SliceInfo, int]]) -> None:
    """End calls that still run, and wait until their processes are gone, at most `CANCEL_S`."""
    if not running:
        return
    for ref in running:
        ray.cancel(ref, force=True)
    _, left = ray.wait([*running], num_returns=len(running), timeout=CANCEL_S, fetch_local=False)
    if left:
        hosts = ", ".join(f"worker {worker} of {place.slice_name}" for place, worker in map(running.__getitem__, left))
        logger.warning("The function was cancelled, but has not ended yet on %s.", hosts)

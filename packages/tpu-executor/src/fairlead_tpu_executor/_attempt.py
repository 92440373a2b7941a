# SPDX-License-Identifier: Apache-2.0
"""One attempt: a task on every host, watched until its outcome is clear."""

import functools
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
cancel_task = functools.partial(ray.cancel, force=True)
_POLL_S = 0.1
_LOOK_S = 1.0
# A killed process ends within seconds; one that is stuck in the kernel may never end.
CANCEL_S = 10.0
# Seconds of silence of Ray's head after which `HeadTimeoutError` ends a run or a call.
SILENT_S = 30.0


def look_at_nodes(node_ids: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return which of these nodes are dead, and which are dead or draining.

    Raises:
        HeadTimeoutError: the head has not answered for `SILENT_S`. No node counts as lost while it does not answer.
    """
    alive, draining = extension.ask_head("list the nodes", _read, timeout_s=SILENT_S)
    dead = frozenset(node_ids) - alive
    return dead, dead | (draining & frozenset(node_ids))


def _read() -> tuple[frozenset[str], frozenset[str]]:
    """Return the nodes that are alive, and those that are draining."""
    return frozenset(row["NodeID"] for row in ray.nodes() if row["Alive"]), frozenset(extension.drain_deadlines())


@dataclass(frozen=True)
class Target:
    """A host that work is sent to."""

    slice: SliceInfo
    number: int  # of the slice
    worker: int
    facts: Mapping[str, Any]  # what the process needs to know about the host, as plain data
    options: Mapping[str, Any]  # the Ray options of a task there

    @property
    def node_id(self) -> str:
        return self.slice.node_ids[self.worker]


def make_targets(
    work: Work, config: AcceleratorConfigType, leases: Sequence[Lease], slots: Sequence[Slot]
) -> list[Target]:
    """Return hosts of slices as targets for some work."""
    tpu = config if isinstance(config, TpuAcceleratorConfig) else None
    targets: list[Target] = []
    for slot in slots:
        place = leases[slot.node_idx].slice
        runtime_env = work.runtime_env(config)
        # No other task has this environment, not even a child, so the task gets a new process.
        variables = {**runtime_env["env_vars"], **slot.env, "FAIRLEAD_OWN_PROCESS": uuid.uuid4().hex}
        # The node's own zone comes first, so the process sets this one.
        zone = variables.pop("TPU_ZONE", "EMPTY") if tpu else ""
        options = {
            **work.remote_options(config, place),
            "runtime_env": {**runtime_env, "env_vars": variables},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle_index),
        }
        facts = {
            "unset": MEGASCALE if tpu and len(leases) == 1 else (),
            "zone": place.zone or zone,
            "lock_files": tpu.lock_files if tpu else (),
        }
        targets.append(Target(place, slot.node_idx, slot.bundle_index, facts, options))
    return targets


def submit(target: Target, payload: Any) -> Any:
    """Start a task on a host, and return its reference."""
    # The list delays the unpickling until the environment on the host is set.
    return _CALL.options(**target.options).remote(target.facts, [payload])


def start_actor(target: Target, payload: Any) -> Any:
    """Start an actor on a host, and return its handle. Its first call makes the instance of the user's class."""
    return _HOST_ACTOR.options(**target.options, max_restarts=0).remote(target.facts, [payload])


def run_once(
    targets: Sequence[Target], payload: Any, grace_s: float, check_open: Callable[[], object]
) -> tuple[list[Any], list[HostError]]:
    """Call a function on every host until the outcome is clear, and end what still runs.

    Returns the values in the order of the targets, or the errors in the order of arrival. `check_open` raises if the
    pool was closed.
    """
    calls: dict[Any, Target] = {}  # by their references
    values: dict[Any, Any] = {}
    errors: dict[Any, HostError] = {}
    try:
        for target in targets:
            calls[submit(target, payload)] = target
        _watch(calls, values, errors, grace_s, check_open)
        return [values[ref] for ref in calls if not errors], [*errors.values()]
    finally:
        ended = values.keys() | {ref for ref, host in errors.items() if not host.is_of_dead_node}
        _cancel({ref: target for ref, target in calls.items() if ref not in ended})


def _watch(
    calls: Mapping[Any, Target],
    values: dict[Any, Any],
    errors: dict[Any, HostError],
    grace_s: float,
    check_open: Callable[[], object],
) -> None:
    """Add values and errors as calls end, until there are values of all, or no further event can change the verdict."""
    nodes = frozenset(target.node_id for target in calls.values())
    first_at = looked_at = time.monotonic()
    while len(values) < len(calls):
        first_at = first_at if errors else time.monotonic()
        running = [ref for ref in calls if ref not in values and ref not in errors]
        for ref in _wait(running):
            running.remove(ref)
            try:
                values[ref] = ray.get(ref)
            except Exception as error:  # noqa: BLE001 - Ray's, or the user's in a class that is both
                errors[ref] = HostError(calls[ref].slice, calls[ref].worker, error)
        now = time.monotonic()
        if errors or now - looked_at >= _LOOK_S:
            check_open()  # A task that comes after the end of its placement group would wait forever.
            dead, gone = look_at_nodes(nodes)
            looked_at = now
            # Ray fails the tasks of a dead node, except those that it does not know to be there.
            for ref in [ref for ref in running if calls[ref].node_id in dead]:
                lost = ray.exceptions.NodeDiedError("its node is dead")
                errors[ref] = HostError(calls[ref].slice, calls[ref].worker, lost)
            if errors and is_clear(
                [*errors.values()], gone, is_running=bool(running), is_late=now >= first_at + grace_s
            ):
                return


def _wait(running: list[Any]) -> list[Any]:
    """Return the references that are done, after a short wait for the first one."""
    if not running:
        time.sleep(_POLL_S)
        return []
    done, _ = ray.wait(running, timeout=_POLL_S)
    return list(ray.wait(running, num_returns=len(running), timeout=0)[0]) if done else []


def is_clear(errors: Sequence[HostError], gone: Collection[str], *, is_running: bool, is_late: bool) -> bool:
    """Return whether no further event can change the verdict. `is_late` says that the grace period is over.

    If the function raised on every host, the failure is the function's. A host that raised while others still run may
    be the first sign of a preemption, and so may the death of a process.
    """
    if is_late or any(judge_one(host.error, host.node_id in gone) == "preempted" for host in errors):
        return True
    return not is_running and all(isinstance(host.error, ray.exceptions.RayTaskError) for host in errors)


def _cancel(running: Mapping[Any, Target]) -> None:
    """End calls that still run, and wait until their processes are gone, at most `CANCEL_S`."""
    if not running:
        return
    for ref in running:
        cancel_task(ref)
    _, left = ray.wait([*running], num_returns=len(running), timeout=CANCEL_S, fetch_local=False)
    if left:
        hosts = ", ".join(f"worker {running[ref].worker} of {running[ref].slice.slice_name}" for ref in left)
        logger.warning("The function was cancelled, but has not ended yet on %s.", hosts)

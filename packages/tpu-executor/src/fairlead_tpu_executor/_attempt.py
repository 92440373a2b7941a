# SPDX-License-Identifier: Apache-2.0
"""One attempt: a task on every host, watched until its outcome is clear."""

import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import HeadTimeoutError, extension

from . import _host
from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._environment import MEGASCALE, host_environment
from ._reservation import Lease
from ._slices import SliceInfo
from ._verdicts import HostError, NodeLostError, judge_one
from ._work import Work

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
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


def ask(request: str, function: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
    """Call a function that sends requests to the head, within `SILENT_S`; `undo` reverts what it does too late."""
    return extension.ask_head(request, function, timeout_s=SILENT_S, undo=undo)


class NodeWatch:
    """Looks which nodes are dead or draining. No node counts as lost while Ray's head does not answer."""

    def __init__(self) -> None:
        self._silent_since = math.inf

    def look(self, node_ids: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return which of these nodes are dead, and which are dead or draining. It takes a second at most.

        Raises:
            HeadTimeoutError: the head has not answered for `SILENT_S`.
        """
        try:
            alive, draining = extension.ask_head("list the nodes", _read, timeout_s=min(_LOOK_S, SILENT_S))
        except HeadTimeoutError:
            self._silent_since = min(self._silent_since, time.monotonic())
            if time.monotonic() - self._silent_since >= SILENT_S:
                raise
            return frozenset(), frozenset()
        self._silent_since = math.inf
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
    work: Work, config: AcceleratorConfigType, leases: Sequence[Lease], *, first_hosts: bool = False
) -> list[Target]:
    """Return every host as a target for some work, or worker 0 of each slice only (`first_hosts`)."""
    tpu = config if isinstance(config, TpuAcceleratorConfig) else None
    targets: list[Target] = []
    for number, lease in enumerate(leases):
        place = lease.slice
        for worker in range(1 if first_hosts else place.num_hosts):
            runtime_env = work.runtime_env(config)
            # No other task has this environment, not even a child, so the task gets a new process.
            ours = {**host_environment(config, leases, number, worker), "FAIRLEAD_OWN_PROCESS": uuid.uuid4().hex}
            variables = {**runtime_env["env_vars"], **ours}
            # The node's own zone comes first, so the process sets this one.
            zone = variables.pop("TPU_ZONE", "EMPTY") if tpu else ""
            runtime_env["env_vars"] = variables
            options = {
                **work.remote_options(config, place),
                "runtime_env": runtime_env,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(lease.group, worker),
            }
            facts = {
                "unset": [name for name in MEGASCALE if tpu and name not in ours],
                "zone": place.zone or zone,
                "lock_files": tpu.lock_files if tpu else (),
            }
            targets.append(Target(place, number, worker, facts, options))
    return targets


def submit(target: Target, payload: Any) -> Any:
    """Start a task on a host, and return its reference."""
    # The list delays the unpickling until the environment on the host is set.
    return _CALL.options(**target.options).remote(target.facts, [payload])


def start_actor(target: Target, payload: Any) -> Any:
    """Start an actor on a host, and return its handle. Its first call makes the instance of the user's class."""
    return _HOST_ACTOR.options(**target.options, max_restarts=0).remote(target.facts, [payload])


@dataclass
class HostCall:
    """A task on a host, and its outcome."""

    target: Target
    ref: Any
    value: Any = None
    error: BaseException | None = None
    done: bool = False

    def blame(self, error: BaseException) -> HostError:
        return HostError(self.target.slice, self.target.worker, error)


def run_once(
    targets: Sequence[Target], payload: Any, grace_s: float, watch: NodeWatch, check_open: Callable[[], object]
) -> tuple[list[HostCall], list[HostError]]:
    """Call a function on every host until its outcome is clear, end what still runs, and return calls and errors.

    `check_open` raises if the pool was closed.
    """
    calls: list[HostCall] = []

    def start() -> None:
        for target in targets:
            calls.append(HostCall(target, submit(target, payload)))

    try:
        ask("start tasks", start, undo=lambda _: cancel(calls))
        return calls, _watch(calls, grace_s, watch, check_open)
    finally:
        cancel([call for call in calls if not call.done])


def _watch(
    calls: Sequence[HostCall], grace_s: float, watch: NodeWatch, check_open: Callable[[], object]
) -> list[HostError]:
    """Wait until every call is done, or the reason why not is clear; return the errors in the order of arrival."""
    nodes = frozenset(call.target.node_id for call in calls)
    pending = {call.ref: call for call in calls}
    errors: list[HostError] = []
    first_at = looked_at = time.monotonic()
    while pending or errors:
        for ref in _wait(pending):
            call = pending.pop(ref)
            call.done = True
            try:
                call.value = ray.get(ref)
            except Exception as error:  # noqa: BLE001 - Ray's, or the user's in a class that is both
                call.error = error
                first_at = first_at if errors else time.monotonic()
                errors.append(call.blame(error))
        now = time.monotonic()
        if errors or now - looked_at >= _LOOK_S:
            check_open()  # A task that comes after the end of its placement group would wait forever.
            dead, gone = watch.look(nodes)
            looked_at = now
            # Ray fails the tasks of a dead node, except those that it does not know to be there.
            for ref in [ref for ref, call in pending.items() if call.target.node_id in dead]:
                errors.append(pending.pop(ref).blame(NodeLostError("its node is dead")))
            if errors and is_clear(errors, calls, gone, now - first_at, grace_s):
                break
    return errors


def _wait(pending: Mapping[Any, HostCall]) -> list[Any]:
    """Return the references that are done, after a short wait for the first one."""
    if not pending:
        time.sleep(_POLL_S)
        return []
    done, _ = ray.wait([*pending], timeout=_POLL_S)
    return list(ray.wait([*pending], num_returns=len(pending), timeout=0)[0]) if done else []


def is_clear(
    errors: Sequence[HostError], calls: Sequence[HostCall], gone: Collection[str], waited_s: float, grace_s: float
) -> bool:
    """Return whether no further event can change the verdict."""
    if any(judge_one(host.error, host.node_id in gone) == "preempted" for host in errors):
        return True
    # If the function raised on every host, the failure is the function's. A host that raised while others still run may
    # be the first sign of a preemption.
    if all(call.done and isinstance(call.error, ray.exceptions.RayTaskError | None) for call in calls):
        return True
    return waited_s >= grace_s


def cancel(running: Sequence[HostCall]) -> None:
    """End calls that still run, and wait until their processes are gone, at most `CANCEL_S`."""
    if not running:
        return
    for call in running:
        cancel_task(call.ref)
    _, left = ray.wait([call.ref for call in running], num_returns=len(running), timeout=CANCEL_S, fetch_local=False)
    if left:
        hosts = [f"worker {call.target.worker} of {call.target.slice.slice_name}" for call in running]
        logger.warning("The function was cancelled, but has not ended yet on %d of %s.", len(left), ", ".join(hosts))

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

from . import _host, _ray_private
from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._environment import host_environment
from ._head import NodeWatch, ask
from ._leases import Held
from ._slices import SliceInfo
from ._verdicts import HostError, NodeLostError, judge_one
from ._work import Work

logger = logging.getLogger(__name__)
# The hosts need not have fairlead-tpu-executor.
ray.cloudpickle.register_pickle_by_value(_host)
ray.cloudpickle.register_pickle_by_value(_ray_private)
_CALL: Any = ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(_host.call)
_HOST_ACTOR: Any = ray.remote(_host.HostActor)
cancel_task = functools.partial(ray.cancel, force=True)
_POLL_S = 0.5
_GRACE_POLL_S = 0.1
_CHECK_S = 1.0
# A killed process ends within seconds; one that is stuck in the kernel may never end.
CANCEL_S = 10.0


@dataclass(frozen=True)
class Target:
    """A host that work is sent to."""

    slice: SliceInfo
    number: int  # of the slice
    worker: int
    node_id: str
    facts: Mapping[str, Any]  # what the process needs to know about the host, as plain data
    options: Mapping[str, Any]  # the Ray options of a task there


def make_targets(work: Work, config: AcceleratorConfigType, held: Held, *, first_hosts: bool = False) -> list[Target]:
    """Return every host as a target for some work, or worker 0 of each slice only (`first_hosts`)."""
    env_vars, runtime_env = work.environment(config)
    tpu = config if isinstance(config, TpuAcceleratorConfig) else None
    zone = {"TPU_ZONE": "EMPTY"} if tpu else {}  # if neither the node nor the user has set it
    targets: list[Target] = []
    for number, lease in enumerate(held.leases):
        place = lease.slice
        options = {**work.remote_options(config, place), **({"runtime_env": runtime_env} if runtime_env else {})}
        for worker, node_id in enumerate(place.node_ids[:1] if first_hosts else place.node_ids):
            facts = {
                "env": {**zone, **env_vars, **host_environment(config, held, number, worker)},
                "zone": place.zone if tpu else "",
                "lock_files": tpu.lock_files if tpu else (),
            }
            strategy = PlacementGroupSchedulingStrategy(lease.group, worker)
            targets.append(Target(place, number, worker, node_id, facts, {**options, "scheduling_strategy": strategy}))
    return targets


def submit(target: Target, payload: Any, *, own_process: bool = False) -> Any:
    """Start a task on a host, and return its reference.

    Without `own_process` the task starts sooner, but may come to a process in which another task ran: then its value is
    `USED_PROCESS`, and it has to be submitted again.
    """
    facts, options = dict(target.facts), target.options
    if own_process:
        facts["is_own_process"], options = True, _require_own_process(options)
    # The list delays the unpickling until the environment on the host is set.
    return _CALL.options(**options).remote(facts, [payload])


def start_actor(target: Target, payload: Any) -> Any:
    """Start an actor on a host, and return its handle. Its first call makes the instance of the user's class."""
    actor = _HOST_ACTOR.options(**_require_own_process(target.options), max_restarts=0)
    return actor.remote({**target.facts, "is_own_process": True}, [payload])


def _require_own_process(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with an environment that no other task has, not even a child, so that no used process has it."""
    own = options.get("runtime_env") or {}
    variables = {**(own.get("env_vars") or {}), "FAIRLEAD_OWN_PROCESS": uuid.uuid4().hex}
    return {**options, "runtime_env": {**own, "env_vars": variables}}


@dataclass(frozen=True)
class RunScope:
    """The facts that all attempts of a run share."""

    work: Work
    payload: Any
    watch: NodeWatch
    start: Callable[[Callable[[], Any]], Any]  # calls a function, unless the pool was closed
    grace_s: float


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


def run_once(targets: Sequence[Target], scope: RunScope) -> tuple[list[HostCall], list[HostError]]:
    """Call a function on every host until its outcome is clear, end what still runs, and return calls and errors."""
    calls: list[HostCall] = []

    def start() -> None:
        for target in targets:
            calls.append(HostCall(target, submit(target, scope.payload)))

    try:
        begin = functools.partial(scope.start, start)
        ask("start tasks", begin, undo=lambda _: cancel(calls))
        return calls, _watch(calls, scope)
    finally:
        cancel([call for call in calls if not call.done])


def _watch(calls: Sequence[HostCall], scope: RunScope) -> list[HostError]:
    """Wait until every call is done, or the reason why not is clear; return the errors in the order of arrival."""
    nodes = frozenset(call.target.node_id for call in calls)
    pending = {call.ref: call for call in calls}
    errors: list[HostError] = []
    first_at = looked_at = time.monotonic()
    while pending or errors:
        for ref in _wait_for_any(pending, _GRACE_POLL_S if errors else _POLL_S):
            call = pending.pop(ref)
            if (again := _finish(call, scope)) is not None:
                pending[again] = call
            elif call.error is not None:
                first_at = first_at if errors else time.monotonic()
                errors.append(call.blame(call.error))
        now = time.monotonic()
        if errors or now - looked_at >= _CHECK_S:
            dead, gone = scope.watch.look(nodes)
            looked_at = now
            # Ray fails the tasks of a dead node, except those that it does not know to be there.
            for ref in [ref for ref, call in pending.items() if call.target.node_id in dead]:
                errors.append(pending.pop(ref).blame(NodeLostError("its node is dead")))
            if errors and is_clear(errors, calls, gone, now - first_at, scope.grace_s):
                break
    return errors


def _wait_for_any(pending: Mapping[Any, HostCall], timeout_s: float) -> list[Any]:
    """Return the references that are done, after a short wait for the first one."""
    if not pending:
        time.sleep(timeout_s)
        return []
    done, _ = ray.wait(list(pending), num_returns=1, timeout=timeout_s)
    if done and len(pending) > 1:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
    return list(done)


def _finish(call: HostCall, scope: RunScope) -> Any | None:
    """Note the outcome of a task that is done; return the next task if it came to a process that was used before."""
    try:
        value = ray.get(call.ref)
    except Exception as error:  # noqa: BLE001 - Ray's, or the user's in a class that is both
        call.done, call.error = True, error
        return None
    if isinstance(value, str) and value == _host.USED_PROCESS:
        again = functools.partial(submit, call.target, scope.payload, own_process=True)
        begin = functools.partial(scope.start, again)
        call.ref = ask("start a task", begin, undo=cancel_task)
        return call.ref
    call.done, call.value = True, value
    return None


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

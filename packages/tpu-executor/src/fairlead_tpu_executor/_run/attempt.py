# SPDX-License-Identifier: Apache-2.0
"""One attempt: a task on every host, watched until its outcome is clear."""

import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from fairlead_placement import PlacementError
from fairlead_placement.extension import Job, group_pairs, run_in_thread, run_on_nodes

from .. import _host
from .._health import Head, dead_nodes, gone_nodes, silent_nodes
from ..exceptions import HeadUnreachableError
from .targets import Target, cancel_task, submit
from .verdicts import HostError, NodeSilentError, judge_one
from .work import Work

logger = logging.getLogger(__name__)
_POLL_S = 0.5
_GRACE_POLL_S = 0.1
_CHECK_S = 1.0
# A killed process ends within seconds; one that is stuck in the kernel may never end.
_CANCEL_S = 10.0


@dataclass(frozen=True)
class RunScope:
    """The facts that all attempts of a run share. Closing the pool ends the epoch, and with it the run."""

    work: Work
    payload: Any
    head: Head
    check_open: Callable[[], None]
    grace_s: float
    crash_grace_s: float  # in the place of `grace_s` after the death of a process, if it is longer


@dataclass
class HostCall:
    """A task on a host, and its outcome."""

    target: Target
    ref: Any
    value: Any = None
    error: BaseException | None = None
    done: bool = False
    dedicated: bool = False  # whether its process was new for certain

    def blame(self, error: BaseException) -> HostError:
        return HostError(self.target.slice, self.target.worker, error)


def run_once(targets: Sequence[Target], scope: RunScope) -> tuple[list[HostCall], list[HostError]]:
    """Call a function on every host until its outcome is clear, end what still runs, and return calls and errors."""
    calls: list[HostCall] = []
    head = scope.head

    def start() -> None:
        for target in targets:
            calls.append(HostCall(target, submit(target, scope.payload)))

    try:
        head.call(start, undo=lambda _: [cancel_task(call.ref) for call in calls])
        return calls, watch(calls, scope)
    finally:
        if running := [call for call in calls if not call.done]:
            cancel(running, head)


def watch(calls: Sequence[HostCall], scope: RunScope) -> list[HostError]:
    """Wait until every call is done, or the reason why not is clear; return the errors in the order of arrival."""
    head = scope.head
    nodes = frozenset(call.target.node_id for call in calls)
    request: Job[Collection[str]] | None = None
    pending = {call.ref: call for call in calls}
    errors: list[HostError] = []
    first_at = checked_at = time.monotonic()
    while pending or errors:
        soon = bool(errors) and time.monotonic() - first_at < scope.grace_s
        for ref in _wait_for_any(pending, _GRACE_POLL_S if soon else _POLL_S):
            call = pending.pop(ref)
            try:
                call.done, call.value = (True, ray.get(ref)) if call.dedicated else ray.get(ref)
            except Exception as error:  # noqa: BLE001 - Ray's, or the user's in a class that is both
                call.done, call.error = True, error
                first_at = first_at if errors else time.monotonic()
                errors.append(call.blame(error))
            if not call.done:  # It came to a process in which something else ran before.
                again = functools.partial(submit, call.target, scope.payload, dedicated=True)
                call.ref, call.dedicated = head.call(again, undo=cancel_task), True
                pending[call.ref] = call
        now = time.monotonic()
        # Ray fails the tasks of a dead node; this check covers the tasks that Ray does not know to be there.
        if not errors and request is not None and request.over.is_set():
            errors += _blame_nodes(head.result(request), calls, "its node is dead")
            request, first_at = None, now
        elif not errors and now - checked_at >= _CHECK_S:
            checked_at = now
            if not head.check() and request is None:
                request = run_in_thread(dead_nodes, nodes)
        if pending or errors:
            scope.check_open()  # Ray keeps a task for ever that comes after the end of its placement group.
        if errors and _is_clear(errors, calls, scope, now - first_at):
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


def _blame_nodes(nodes: Collection[str], calls: Sequence[HostCall], why: str) -> list[HostError]:
    """Return an error for each call on these nodes that has not succeeded."""
    return [
        call.blame(NodeSilentError(why))
        for call in calls
        if call.target.node_id in nodes and not (call.done and call.error is None)
    ]


def _is_clear(errors: list[HostError], calls: Sequence[HostCall], scope: RunScope, waited_s: float) -> bool:
    """Return whether no further event can change the verdict; add an error for each node that is dead or silent."""
    head = scope.head
    nodes = {call.target.node_id for call in calls}
    gone = head.call(gone_nodes, nodes)
    # If an accelerator did not start, other hosts may show soon whether that is the failure of its host.
    if any(judge_one(one.error, one.node_id in gone, accelerators=False) == "preempted" for one in errors):
        return True
    if lost := _blame_nodes(head.call(dead_nodes, nodes), calls, "its node is dead"):
        errors += lost
        return True
    if silent := head.call(silent_nodes, nodes):
        if waited_s >= scope.grace_s:
            errors += _blame_nodes(silent, calls, "its raylet does not answer")
        return waited_s >= scope.grace_s
    # If the function raised on every host, the failure is the function's. A host that raised while others still run may
    # be the first sign of a preemption. A cloud provider ends the processes of a host up to a minute before the host.
    if all(call.done and isinstance(call.error, ray.exceptions.RayTaskError | None) for call in calls):
        return True
    crashed = any(type(one.error) is ray.exceptions.WorkerCrashedError for one in errors)
    return waited_s >= (max(scope.grace_s, scope.crash_grace_s) if crashed else scope.grace_s)


def cancel(running: Sequence[HostCall], head: Head) -> None:
    """End calls that still run, and wait until their processes are gone, at most `_CANCEL_S`."""
    for call in running:
        cancel_task(call.ref)
    deadline = time.monotonic() + _CANCEL_S
    try:
        gone = head.call(gone_nodes, {call.target.node_id for call in running})
        present = [call for call in running if call.target.node_id not in gone]
        if present:
            ray.wait([call.ref for call in present], num_returns=len(present), timeout=_CANCEL_S, fetch_local=False)
            left_s = max(0.1, deadline - time.monotonic())
            names = group_pairs((call.target.node_id, call.target.facts["name"]) for call in present)
            # A host that does not answer is probably being lost; otherwise the next processes there wait.
            wait = functools.partial(run_on_nodes, _host.wait_for_end, timeout_s=left_s + 1.0)
            head.call(wait, {node_id: (its, left_s) for node_id, its in names.items()})
    except (HeadUnreachableError, PlacementError) as error:
        hosts = ", ".join(f"worker {call.target.worker} of {call.target.slice.slice_name}" for call in running)
        logger.warning("The function was cancelled, but it is unknown whether it has ended on %s: %s", hosts, error)

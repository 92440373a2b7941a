# SPDX-License-Identifier: Apache-2.0
"""One attempt: a task on every host, watched until it is known what became of it."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from fairlead_placement.spi import run_on_nodes

from .. import _host
from .._health import Head, Question
from .._nodes import dead_nodes, gone_nodes, silent_nodes
from ..exceptions import HeadUnreachableError
from .targets import Place
from .verdicts import HostError, NodeSilentError, judge_one

__all__ = ["HostCall", "cancel", "watch"]

logger = logging.getLogger(__name__)
_POLL_S = 0.5
_GRACE_POLL_S = 0.1
_CHECK_S = 1.0
# A process that is killed is gone within seconds; one that is stuck in the kernel may never be.
_CANCEL_S = 10.0


@dataclass
class HostCall:
    """A task on a host, and what became of it."""

    place: Place
    ref: Any
    value: Any = None
    error: BaseException | None = None
    done: bool = False

    @property
    def host_error(self) -> HostError:
        """What went wrong."""
        assert self.error is not None
        return HostError(self.place.slice, self.place.worker, self.error)


def watch(
    calls: Sequence[HostCall], resubmit: Callable[[HostCall], Any], head: Head, *, grace_s: float, accelerators: bool
) -> list[HostError]:
    """Wait until every call is done, or it is clear why not; return the errors in the order in which they were seen.

    Calls that are not done are left as they are. A function may run for any time; every other wait has a deadline.

    Args:
        calls: what was submitted.
        resubmit: makes a new reference for a call that came to a process in which something else had run.
        head: tells which nodes are alive. While it is silent no node is taken to be dead.
        grace_s: how long after a first error to wait for what explains it.
        accelerators: as for `judge`.

    Raises:
        HeadUnreachableError: the head did not answer in time.
    """
    nodes = frozenset(call.place.node_id for call in calls)
    looking: Question[frozenset[str]] | None = None
    pending = {call.ref: call for call in calls}
    errors: list[HostError] = []
    first_at = checked_at = time.monotonic()
    while pending or errors:
        for ref in _done(pending, grace=bool(errors)):
            call = pending.pop(ref)
            if not _settle(call):
                call.ref = resubmit(call)
                pending[call.ref] = call
            elif call.error is not None:
                first_at = first_at if errors else time.monotonic()
                errors.append(call.host_error)
        now = time.monotonic()
        # Ray fails the tasks of a node that died; this is for those that it does not know to be there.
        if not errors and looking is not None and looking.done:
            errors += _on(looking.result(), calls, "its node is dead")
            looking, first_at = None, now
        elif not errors and now - checked_at >= _CHECK_S:
            checked_at = now
            head.check()
            if looking is None and head.silent_s == 0:
                looking = head.start(dead_nodes, nodes)
        if errors and _is_clear(errors, calls, head, now - first_at, grace_s, accelerators):
            break
    return errors


def _done(pending: Mapping[Any, HostCall], *, grace: bool) -> list[Any]:
    """References that are done, waiting a moment for one."""
    if not pending:
        time.sleep(_GRACE_POLL_S)
        return []
    done, _ = ray.wait(list(pending), num_returns=1, timeout=_GRACE_POLL_S if grace else _POLL_S)
    if done and len(pending) > 1:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
    return list(done)


def _settle(call: HostCall) -> bool:
    """Fetch the answer of a call that is done; False if it has to be submitted again."""
    try:
        ran, call.value = ray.get(call.ref)
    except Exception as error:  # noqa: BLE001 - Ray's, or the user's in a class that is both
        ran, call.error = True, error
    call.done = bool(ran)
    return call.done


def _on(nodes: Collection[str], calls: Sequence[HostCall], why: str) -> list[HostError]:
    """An error for each call on some nodes that has not succeeded."""
    return [
        HostError(call.place.slice, call.place.worker, NodeSilentError(why))
        for call in calls
        if call.place.node_id in nodes and not (call.done and call.error is None)
    ]


def _is_clear(
    errors: list[HostError],
    calls: Sequence[HostCall],
    head: Head,
    waited: float,
    grace_s: float,
    accelerators: bool,
) -> bool:
    """Whether nothing that is still to come could change the verdict; adds what is seen of nodes."""
    nodes = {call.place.node_id for call in calls}
    gone = head.ask(gone_nodes, nodes)
    if any(judge_one(one.error, one.node_id in gone, accelerators=accelerators) == "infrastructure" for one in errors):
        return True
    if lost := _on(head.ask(dead_nodes, nodes), calls, "its node is dead"):
        errors += lost
        return True
    if silent := head.ask(silent_nodes, nodes):
        if waited >= grace_s:
            errors += _on(silent, calls, "its raylet does not answer")
        return waited >= grace_s
    # What the function raised everywhere is the function's. A process that died, or a host that raised while others
    # still run, may be the first sign of a host that is being taken away.
    everywhere = all(call.done for call in calls)
    raised = all(isinstance(one.error, ray.exceptions.RayTaskError) for one in errors)
    return waited >= grace_s or (everywhere and raised)


def cancel(calls: Sequence[HostCall], head: Head) -> None:
    """End what still runs, and wait until it is gone; at most `_CANCEL_S`, and not for hosts that are gone.

    When the head does not answer, a warning names the hosts on which the function may still run.
    """
    running = [call for call in calls if not call.done]
    for call in running:
        ray.cancel(call.ref, force=True)
    if not running:
        return
    deadline = time.monotonic() + _CANCEL_S
    try:
        gone = head.ask(gone_nodes, {call.place.node_id for call in running})
        there = [call for call in running if call.place.node_id not in gone]
        if there:
            ray.wait([call.ref for call in there], num_returns=len(there), timeout=_CANCEL_S, fetch_local=False)
            head.ask(_wait_for_processes, there, max(0.1, deadline - time.monotonic()))
    except HeadUnreachableError as error:
        hosts = ", ".join(f"worker {call.place.worker} of {call.place.slice.slice_name}" for call in running)
        logger.warning("The function was cancelled, but it is unknown whether it has ended on %s: %s", hosts, error)


def _wait_for_processes(there: Sequence[HostCall], timeout_s: float) -> None:
    """Wait until the processes of calls are gone."""
    names: dict[str, list[str]] = {}
    for call in there:
        names.setdefault(call.place.node_id, []).append(call.place.facts["name"])
    # A host that does not say so is going, and its processes with it; or their successors there wait for them.
    run_on_nodes(
        _host.are_over, {node_id: (its, timeout_s) for node_id, its in names.items()}, timeout_s=timeout_s + 1.0
    )

# SPDX-License-Identifier: Apache-2.0
"""The interface for packages that are built on fairlead-workergroup, besides the names that users need.

These names follow the same versioning as those of `fairlead_workergroup`. They read the members of a group at one
moment, send a function to single workers, collect what they reply by a deadline, and show that in the trace.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from ._calls.route import Site
from ._group import RayWorkerGroup
from ._membership.model import Member, Resize, Snapshot, WorkerProcess
from ._membership.roster import Roster, direct, find_worker
from ._observe.evidence import judge_errors
from ._observe.query import cancel_calls, late_workers
from ._observe.requests import find_log
from ._ray_private import actor_id_of, ownership_of
from ._remote.references import borrow, dump
from ._transport.base import Transport
from ._transport.messages import Message, MessageStream
from ._world import OneTimeEvent
from .exceptions import LateWorker, WorkerFailure, WorkerGroupError

__all__ = [
    "Member",
    "Message",
    "MessageStream",
    "OneTimeEvent",
    "Reply",
    "Resize",
    "Site",
    "Snapshot",
    "Transport",
    "WorkerProcess",
    "actor_id_of",
    "borrow",
    "cancel",
    "collect",
    "dump",
    "ownership_of",
    "read_members",
    "record_span",
    "send_function",
    "stream_function",
]

# How long the nodes may take to say what late workers do. The caller's deadline has passed by then.
LOOK_S = 0.7


@dataclass(frozen=True)
class Reply:
    """The outcome of one request; exactly one of the attributes other than `worker` counts.

    Attributes:
        worker: who was asked.
        value: what the function returned.
        error: what the function raised.
        failure: why the worker was lost.
        late: what the worker was doing at the deadline.
    """

    worker: WorkerProcess
    value: Any = None
    error: BaseException | None = None
    failure: WorkerFailure | None = None
    late: LateWorker | None = None

    @property
    def is_good(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.failure is None and self.late is None


def read_members(group: RayWorkerGroup) -> Snapshot:
    """Return the members of a group as they are now.

    Raises:
        WorkerGroupError: the group, or its Ray, has been shut down.
    """
    return _roster(group).check_alive()


def send_function(member: Member, name: str, pickled: bytes, *args: Any, alone_within_s: float | None = None) -> Any:
    """Send a function to one worker, which calls it with the user's instance as its first argument.

    Args:
        member: the worker.
        name: what errors and statuses call the function.
        pickled: the function, pickled by `ray.cloudpickle`.
        args: its other arguments; references among them are resolved.
        alone_within_s: run it while no method of the worker runs. On a worker whose async methods overlap, later
            methods wait meanwhile; if the running ones do not end within so many seconds, `TimeoutError` is raised.

    Returns:
        The reference to the result.
    """
    with direct(member):
        if alone_within_s is None:
            return member.handle._fairlead_function_plain.remote(name, pickled, *args)
        return member.handle._fairlead_function_alone.remote(alone_within_s, name, pickled, *args)


def stream_function(member: Member, pickled: Any, *args: Any) -> Any:
    """Let one worker run a generator function, such as one that serves the calls of a transport.

    Args:
        member: the worker.
        pickled: the function, pickled by `ray.cloudpickle`, or a reference to that. If the async methods of the workers
            overlap, it is an async generator function.
        args: its first arguments. Two follow: a function that returns the method of a name on the worker's host, and
            one that gets a function which returns the id of the task that runs, or None at the end.

    Returns:
        The `ObjectRefGenerator` of its items.
    """
    return member.handle._fairlead_stream.remote(pickled, *args)


def collect(
    group: RayWorkerGroup,
    requests: Mapping[int, tuple[WorkerProcess, Any]],
    timeout_s: float,
    *,
    all_of_them: bool = False,
) -> dict[int, Reply]:
    """Wait for requests.

    Args:
        group: of the workers; losses are noted in it.
        requests: the worker and the reference of each, by any number.
        timeout_s: seconds to wait.
        all_of_them: wait for the others when one has failed.

    Returns:
        A reply for each request that ended. If one has failed, and `all_of_them` is not set, the others are missing. At
        the deadline there is a late reply for each one that has not ended.
    """
    deadline = time.monotonic() + timeout_s
    by_ref = {ref: number for number, (_, ref) in requests.items()}
    replies: dict[int, Reply] = {}
    pending = list(by_ref)
    while pending:
        ready, pending = ray.wait(
            pending, num_returns=len(pending) if all_of_them else 1, timeout=max(0.0, deadline - time.monotonic())
        )
        if not all_of_them and pending:
            more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            ready = [*ready, *more]
        for ref in ready:
            worker, _ = requests[by_ref[ref]]
            replies[by_ref[ref]] = _reply(group, worker, ref)
        if not all_of_them and any(not reply.is_good for reply in replies.values()):
            return replies
        if pending and time.monotonic() >= deadline:
            workers = {by_ref[ref]: requests[by_ref[ref]][0] for ref in pending}
            seen = late_workers(list(workers.values()), within_s=LOOK_S)
            replies.update(
                (number, Reply(workers[number], late=late)) for number, late in zip(workers, seen, strict=True)
            )
            break
    return replies


def cancel(requests: Mapping[int, tuple[WorkerProcess, Any]]) -> None:
    """Keep requests that have not started from starting; what their workers run goes on."""
    if requests:
        cancel_calls(list(requests.values()), within_s=LOOK_S)


@contextlib.contextmanager
def record_span(name: str, *groups: RayWorkerGroup) -> Iterator[None]:
    """Show what a block does with some groups, such as a transfer, as a span in their traces.

    Args:
        name: the name of the span; it is cut off after 64 bytes.
        groups: the groups, which this process has made.

    Raises:
        WorkerGroupError: a group, or its Ray, has been shut down.
    """
    logs = {group_id: find_log(group_id) for group_id in dict.fromkeys(group.handle().group_id for group in groups)}
    with contextlib.ExitStack() as spans:
        for log in filter(None, logs.values()):
            spans.enter_context(log.span(name))
        yield


def _reply(group: RayWorkerGroup, worker: WorkerProcess, ref: Any) -> Reply:
    try:
        return Reply(worker, ray.get(ref))
    except ray.exceptions.RayTaskError as error:
        return Reply(worker, error=error.cause if isinstance(error.cause, BaseException) else error)
    except ray.exceptions.RayError as error:
        roster = _roster(group)
        lost = judge_errors(roster.judge, {worker: error})
        roster.note(lost)
        return Reply(worker, failure=lost[0].failure()) if lost else Reply(worker, error=error)


def _roster(group: RayWorkerGroup) -> Roster:
    workers = group.workers
    found = find_worker(actor_id_of(workers[0])) if workers else None
    if found is None:
        raise WorkerGroupError(f"{group!r}: it has been shut down; make a new group")
    return found[0]

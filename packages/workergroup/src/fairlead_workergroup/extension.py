# SPDX-License-Identifier: Apache-2.0
"""The interface for packages that are built on fairlead-workergroup, besides the names that users need.

These names follow the same versioning as those of `fairlead_workergroup`. They read the members of a group at one
moment, send a function to single workers, and collect what they reply by a deadline. They also look at groups of other
processes.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from ._group import RayWorkerGroup
from ._membership.core import find_core
from ._membership.losses import find_losses
from ._model import GroupState, Member
from ._observe.publications import read_groups
from ._observe.query import cancel_calls, late_workers
from ._remote.outside import look_from_outside
from ._world import Deadline
from .exceptions import LateWorker, WorkerFailure

__all__ = [
    "Member",
    "Reply",
    "cancel",
    "check_calls",
    "collect",
    "look_from_outside",
    "read_groups",
    "read_members",
    "send_function",
    "wait_for_turn",
]

_Entry = TypeVar("_Entry")

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

    worker: Member
    value: Any = None
    error: BaseException | None = None
    failure: WorkerFailure | None = None
    late: LateWorker | None = None

    @property
    def is_good(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.failure is None and self.late is None


def read_members(group: RayWorkerGroup) -> GroupState:
    """Return the members of a group as they are now.

    Raises:
        WorkerGroupError: the group, or its Ray, has been shut down.
    """
    return find_core(group).check_alive()


def send_function(
    member: Member,
    name: str,
    pickled: bytes,
    *args: Any,
    alone_within_s: float | None = None,
    first: Sequence[Any] | None = None,
) -> Any:
    """Send a function to one worker, which calls it with the user's instance as its first argument.

    Args:
        member: the worker.
        name: what errors and statuses call the function.
        pickled: the function, pickled by `ray.cloudpickle`.
        args: its other arguments; references among them are resolved.
        alone_within_s: run it while no method of the worker runs. On a worker whose async methods overlap, later
            methods wait until then; if the running ones do not end within so many seconds, `TimeoutError` is raised.
        first: with `alone_within_s`, other arguments with which the worker calls the function before it waits. Of two
            requests to a worker whose async methods overlap, Ray may deliver the second one first.

    Returns:
        The reference to the result.
    """
    how: dict[str, Any] = {"method": name, "function": True}
    if alone_within_s is not None:
        how |= {"alone": alone_within_s, "first": first}
    return member.handle._fairlead_call.remote(how, pickled, *args)


def collect(
    group: RayWorkerGroup,
    requests: Mapping[int, tuple[Member, Any]],
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
            seen = late_workers(list(workers.values()))
            replies.update(
                (number, Reply(workers[number], late=late)) for number, late in zip(workers, seen, strict=True)
            )
            break
    return replies


def cancel(requests: Mapping[int, tuple[Member, Any]]) -> None:
    """Keep requests that have not started from starting; what their workers run goes on."""
    if requests:
        cancel_calls(list(requests.values()), within_s=LOOK_S)


def check_calls(group: RayWorkerGroup, check: Callable[[str, Sequence[int]], None]) -> Callable[[], None]:
    """Let a function refuse calls that this process makes with a group; return the function that ends that.

    It gets the name of the method and the ranks, and refuses the call by an error, which its caller gets. It is asked
    before anything is stored, and again when the call is sent, and must not wait. Calls that a change of membership
    makes, such as `Restart.method`, are not checked.
    """
    return _add(find_core(group).checks, check)


def wait_for_turn(group: RayWorkerGroup, timeout_s: float) -> bool:
    """Wait until each call that this process has begun to send is sent to all its ranks; return whether it is in time.

    While the group changes its members no call is sent, so this waits for the end of the change.
    """
    return find_core(group).wait_for_turn(Deadline.after(timeout_s))


def _add(entries: list[_Entry], entry: _Entry) -> Callable[[], None]:
    """Add an entry; return the function that removes it, which can be called again."""
    entries.append(entry)

    def remove() -> None:
        with contextlib.suppress(ValueError):  # it has been called before
            entries.remove(entry)

    return remove


def _reply(group: RayWorkerGroup, worker: Member, ref: Any) -> Reply:
    try:
        return Reply(worker, ray.get(ref))
    except ray.exceptions.RayTaskError as error:
        return Reply(worker, error=error.cause if isinstance(error.cause, BaseException) else error)
    except ray.exceptions.RayError as error:
        core = find_core(group)
        lost = find_losses(core, {worker: error})
        core.note(lost.items())
        return Reply(worker, failure=lost[worker]) if lost else Reply(worker, error=error)

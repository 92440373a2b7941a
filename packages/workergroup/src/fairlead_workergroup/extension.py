# SPDX-License-Identifier: Apache-2.0
"""The interface for packages that are built on fairlead-workergroup, besides the names that users need.

These names follow the same versioning as those of `fairlead_workergroup`. `Site` reads the members of a group, sends
functions to its workers, and refuses calls. The other names look at the groups of all processes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._calls.call import as_call
from ._calls.results import MultiWorkerFuture, Outcome
from ._group import RayWorkerGroup
from ._membership.core import find_core
from ._model import GroupState, Member
from ._observe.board import read_groups
from ._observe.query import cancel_calls
from ._remote.node import look_from_outside
from .exceptions import CallTimeoutError

__all__ = ["Member", "Site", "look_from_outside", "read_groups"]

# How long the nodes may take to cancel requests.
CANCEL_S = 0.7


class Site:
    """A group of this process, for a package that sends requests of its own to the workers.

    It does not keep the group alive. A value that is not a `RayWorkerGroup` is a TypeError.
    """

    def __init__(self, group: RayWorkerGroup) -> None:
        self._core = find_core(group)

    def state(self) -> GroupState:
        """Return the members of the group as they are now; raise `WorkerGroupError` if it has been shut down."""
        return self._core.check_alive()

    def send(
        self,
        name: str,
        pickled: bytes,
        arguments: Mapping[Member, Sequence[Any]],
        *,
        alone_s: float | None = None,
        first: Sequence[Any] | None = None,
    ) -> dict[Member, Any]:
        """Send a function to workers, which call it with the user's instance as its first argument.

        Calls of this process that `check_calls` has let pass are sent to all of their workers before it, and all others
        after it.

        Args:
            name: what errors and statuses call the function.
            pickled: the function, pickled by `ray.cloudpickle`.
            arguments: the other arguments at each worker; references among them are resolved.
            alone_s: run it while no method of the worker runs. On a worker whose async methods overlap, later methods
                wait until then; if the running ones do not end within so many seconds, it raises `TimeoutError`.
            first: with `alone_s`, other arguments with which the worker calls the function before it waits. Of two
                requests to a worker whose async methods overlap, Ray may deliver the second one first.

        Returns:
            The request to each worker: the reference to its result.
        """
        how: dict[str, Any] = {"method": name, "function": True}
        if alone_s is not None:
            how |= {"alone": alone_s, "first": first}
        with self._core.turn:
            return {
                member: member.handle._fairlead_call.remote(how, pickled, *values)
                for member, values in arguments.items()
            }

    def collect(
        self, requests: Mapping[Member, Any], timeout_s: float, *, all_of_them: bool = False
    ) -> dict[int, Outcome]:
        """Wait for requests; losses of workers are noted in the group.

        Args:
            requests: as `send` returns them.
            timeout_s: seconds to wait.
            all_of_them: wait for the others when one has failed.

        Returns:
            By rank, the outcome of each request that ended. If one has failed, and `all_of_them` is not set, the others
            are missing. The error is the worker's own, the `WorkerFailureError` of its loss, or for each one that has
            not ended by the deadline one `CallTimeoutError` of all of them.
        """
        futures = MultiWorkerFuture([*requests.values()], called_workers=[member.rank for member in requests])
        outcomes: dict[int, Outcome] = {}
        try:
            for outcome in as_call(self._core, None, futures, timeout_s):
                outcomes[outcome.rank] = outcome
                if outcome.error is not None and not all_of_them:
                    break
        except CallTimeoutError as error:
            late = [member for member in requests if member.rank not in outcomes]
            outcomes |= {member.rank: Outcome(member.rank, dict(member.coords), error=error) for member in late}
        return outcomes

    def cancel(self, requests: Mapping[Member, Any]) -> None:
        """Keep requests that have not started from starting; what their workers run goes on."""
        if requests:
            cancel_calls([*requests.items()], within_s=CANCEL_S)

    def check_calls(self, check: Callable[[str, Sequence[int]], None]) -> Callable[[], None]:
        """Let a function refuse calls that this process makes with the group.

        It gets the name of the method and the ranks, and refuses the call by an error, which its caller gets. It is
        asked before anything is stored, and again when the call is sent, and must not wait. Calls that a change of
        membership makes, such as `Restart.method`, are not checked.

        Returns:
            The function that ends that, which can be called again.
        """
        checks = self._core.checks
        checks.append(check)

        def end() -> None:
            if check in checks:
                checks.remove(check)

        return end

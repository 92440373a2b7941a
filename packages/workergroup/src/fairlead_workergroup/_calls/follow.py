# SPDX-License-Identifier: Apache-2.0
"""The repetition of calls of handles that all of their workers have refused, because they are in another epoch."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray.exceptions import TaskCancelledError

from fairlead_sharding import NamedSharding

from .. import _world
from .._world import Deadline
from ..exceptions import EpochError, format_ranks
from .errors import refused_epochs
from .execution import Execution
from .plan import Column, Recipients
from .sender import make_requests

# A request reaches a worker that is not busy within this time.
REFUSED_S = 1.0
# A call waits between repetitions for workers that do not have the facts of its epoch yet, about 5 s in all.
PAUSE_S, MOST_REFUSALS = 0.01, 9


@dataclass(eq=False)
class Follower:
    """Repeats a call with the same values, planned for the group as it is then."""

    columns: Sequence[Column]  # the arguments as they were sent; the last ones are the keyword arguments `names`
    names: Sequence[str]
    recipients: Recipients
    replan: Callable[[], tuple[Recipients, NamedSharding]] | None  # the recipients and axes of now; None for the same
    was_ahead: bool = False  # whether workers in a later epoch have refused it, which may happen once

    def follow(self, call: Execution, limit: Deadline) -> bool:
        """Repeat a call; return True."""
        call.check_open()
        attempt = call.attempt
        ran, refusals = _find_refusals(call, limit)
        newest = max((epoch for _, epoch in refusals), default=call.epoch)
        is_ahead = newest > call.epoch
        # An argument that was refused stays as it is.
        is_argument = any(planned != call.epoch for planned, _ in refusals)
        if ran or is_argument or (is_ahead and self.was_ahead) or attempt == MOST_REFUSALS:
            raise _refused_error(call, newest, ran) from None
        self.was_ahead |= is_ahead
        _world.current.event().wait(limit.left(at_most=PAUSE_S * 2**attempt))
        call.sender.renew(newest)
        order, found = call.order, self.recipients
        # Values that were split for the size of the group before have to be sent to the same recipients.
        if self.replan is not None and all(column.index is None for column in self.columns):
            found, sharding = self.replan()
            order = order._replace(ranks=found.called, sharding=sharding)
        requests = make_requests(order.method, found, self.columns, self.names)
        with call.sender.explained():
            sent = call.sender.send(order._replace(requests=requests, deadline=limit))
        call.begin_again(order, found, sent)
        return True


def _find_refusals(call: Execution, limit: Deadline) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ranks that have run a call, or may have, and for each refusal the epochs of call and worker."""
    ends = list(call.completions.values())
    _world.current.wait(ends, num_returns=len(ends), timeout=limit.left(at_most=REFUSED_S), fetch_local=False)
    ran: list[int] = []
    if pending := call.pending():
        # Workers that run it may wait for those that have refused it, and those that are busy may still refuse it.
        parts = {call.ranks[at]: call.futures[at] for at in pending}
        ran += call.sender.cancel(parts, call.method.name, force=False)
        if not ran:
            _world.current.wait(ends, num_returns=len(ends), timeout=limit.left(), fetch_local=False)
            call.check_late(limit)
    refusals: list[tuple[int, int]] = []
    for at in set(call.completions).difference(call.pending()):
        error = _error_of(call, at)
        if (epochs := refused_epochs(error)) is not None:
            refusals.append(epochs)
        elif call.ranks[at] not in ran and not (at in pending and _is_cancellation(error)):
            ran.append(call.ranks[at])
    return sorted(ran), refusals


def _error_of(call: Execution, at: int) -> BaseException | None:
    """Return the error of a worker that has finished; None if it has none, or had items before."""
    items = call.items.setdefault(at, [])
    if call.yields_items and at in call.answering and not items:
        items.extend(itertools.islice(call.futures[at], 1))
    try:
        for ref in (*items[:1], call.completions[at]):
            _world.current.get([ref], timeout=None)
    except Exception as error:  # noqa: BLE001  any exception of the worker
        return error
    return None


def _is_cancellation(error: BaseException | None) -> bool:
    """Return whether a worker has dropped a call that was cancelled before it started."""
    return isinstance(error, TaskCancelledError) or isinstance(getattr(error, "cause", None), TaskCancelledError)


def _refused_error(call: Execution, epoch: int, ran: Sequence[int]) -> EpochError:
    refused = tuple(rank for rank in call.ranks if rank not in ran)
    reason = f"{call.method.name!r} was planned for epoch {call.epoch}, and the epoch of the group has changed: "
    if ran:
        reason += (
            f"rank(s) {format_ranks(ran)} have run it or begun to, and rank(s) {format_ranks(refused)} have not. The "
            "rest of the call was cancelled. Make the call again if these ranks may run it twice."
        )
    else:
        reason += "none of its workers has run it. Make the call again."
    return EpochError(reason, epoch, tuple(ran), refused)

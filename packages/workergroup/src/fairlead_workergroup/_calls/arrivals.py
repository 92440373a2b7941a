# SPDX-License-Identifier: Apache-2.0
"""What comes back of a call that has been sent: values, outcomes and failures; who is late; and its cancellation."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, TaskCancelledError

from fairlead_placement import PlacementError

from .. import _world
from .._membership.core import Core, Sent
from .._membership.losses import diagnose
from .._observe.calls import Outcome
from .._observe.query import cancel_calls, late_workers
from .._ray_private import end_of, is_stream
from .._transport import replies, wait
from .._transport.wait import ON_THREAD, block
from .._world import NEVER, Deadline
from ..exceptions import (
    CallCancelledError,
    CallTimeoutError,
    StaleGroupError,
    WorkerFailureError,
    WorkerGroupError,
    format_ranks,
)

logger = logging.getLogger(__name__)

# A request reaches a worker that is not busy within this time.
REFUSED_S = 1.0


class Arrivals:
    """What has come back of a call that has been sent."""

    def __init__(self, core: Core, sent: Sent, cancelled: set[int]) -> None:
        self.sent = sent
        self._core = core
        self._cancelled = cancelled  # the ranks that had not finished when the call was cancelled; `Call` adds others
        self._method: str = sent.call.method.name
        self._ranks: Sequence[int] = sent.call.called
        self._refused: StaleGroupError | None = None  # once workers have refused a call of a handle

    def pending(self) -> list[int]:
        """Return the positions of the workers that have not finished."""
        self._core.connection.check()
        at_of = {end_of(reply): at for at, reply in enumerate(self.sent.replies)}
        return [at_of[ref] for ref in replies.wait(list(at_of))[1]]

    def wait(self, deadline: Deadline) -> bool:
        """Wait until all called workers have finished, and log those that have not; return whether it is in time."""
        waiting = self.sent.replies
        if self.sent.call.method.backpressure is None:  # otherwise generators end only when their items are taken
            waiting = list(map(end_of, waiting))
        while waiting:
            self._core.connection.check()
            news = block(ON_THREAD.news(waiting, deadline.left(at_most=replies.REPORT_EVERY_S)))
            waiting = [reply for reply in waiting if not news.get(reply)]
            if deadline.passed:
                return not self.pending()
            if not news:
                self.check_late(NEVER)
        return True

    def check_late(self, deadline: Deadline) -> Deadline:
        """Do what the function of this name does for this call."""
        return check_late(self._core, self._method, self.sent.call.began, self.sent.replies, deadline)

    def late_error(self, pending: Sequence[int]) -> CallTimeoutError:
        """Return the error that says what the workers at these positions are doing."""
        late = [self.sent.replies[at] for at in pending]
        return late_error(self._core, self._method, self.sent.call.began, late, len(self._ranks))

    def value(self, reply: Any) -> Any:
        """Return the value of a reply that has ended; of a generator, the list of its items."""
        if not is_stream(reply):
            return replies.values([reply])[0]
        wait.drain([reply], NEVER, self.check_late)
        values = replies.values(wait.taken(reply))
        if count := wait.taken(reply).handed_out:
            raise WorkerGroupError(
                f"stream() has handed out {count} item(s) of {self._method!r} of rank "
                f"{self._ranks[self.sent.replies.index(reply)]}, and they are not kept. Take the rest from stream() "
                "too, or make the call again and ask for its result only."
            )
        return values

    def outcome(self, at: int) -> Outcome:
        """Return the outcome of a called worker that has finished."""
        reply = self.sent.replies[at]
        try:
            return self.make_outcome(at, self.value(reply))
        except (RayError, WorkerGroupError) as error:
            if self._ranks[at] in self._cancelled:
                return self.make_outcome(at, error=CallCancelledError(self._method, (self._ranks[at],)))
            # A call of the owner is never refused; an argument of it may be.
            if not self._core.is_owner and _refused_epoch(error) is not None:
                raise self._refused_error() from None
            return self.make_outcome(at, error=diagnose(wait.ends_of([reply]), error, self._core, self._method))

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each worker; of those that return no result, only the errors."""
        pending, errors = self.pending(), dict[int, BaseException]()
        if pending and not self._cancelled:
            late = self.late_error(pending)  # one request a node
            errors = {at: replace(late, late=(one,)) for at, one in zip(pending, late.late, strict=True)}
        for at in pending:
            errors.setdefault(at, CallCancelledError(self._method, (self._ranks[at],)))
        wanted, others = self.sent.call.recipients.positions
        outcomes = [
            self.make_outcome(at, error=errors[at]) if at in errors else self.outcome(at) for at in (*wanted, *others)
        ]
        return outcomes[: len(wanted)] + [one for one in outcomes[len(wanted) :] if one.error is not None]

    def make_outcome(self, at: int, value: Any = None, error: BaseException | None = None) -> Outcome:
        """Return the outcome of the worker at a position."""
        return Outcome(self._ranks[at], dict(self._core.now[self._ranks[at]].coords), value, error)

    def failure(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of Ray, with all ranks that have failed so far."""
        self._core.connection.check()
        if self._cancelled:
            return CallCancelledError(self._method, tuple(sorted(self._cancelled)))
        failure = diagnose(wait.ends_of(self.sent.replies), error, self._core, self._method, self.sent.call.deadline)
        if self._core.is_owner or isinstance(failure, WorkerFailureError):
            return failure
        # The error of an item may be here before its generator has ended.
        is_refused = any(_refused_epoch(one) is not None for one in (error, *_find_errors(self.sent).values()))
        return self._refused_error() if is_refused else failure

    def cancel(self, *, force: bool) -> list[int]:
        """Cancel the rest of the call, as `cancel` does."""
        unfinished = {self._ranks[at]: self.sent.replies[at] for at in self.pending()}
        self._cancelled.update(unfinished)
        return cancel(self._core, unfinished, self._method, force=force) if unfinished else []

    def _refused_error(self) -> StaleGroupError:
        """Return the error of a call of a handle that workers have refused, and cancel the rest of the call once."""
        self._refused = self._refused or _cancel_refused(self._core, self.sent)
        return replace(self._refused)


def check_late(core: Core, method: str, began: float, futures: Sequence[Any], deadline: Deadline) -> Deadline:
    """Log the workers that have not finished a call; return the deadline of the rest of the wait.

    When all have finished, only their values are on the way, which does not count against the deadline.
    """
    core.connection.check()
    ends = list(dict.fromkeys(map(end_of, futures)))
    if not (pending := replies.wait(ends)[1]):
        return NEVER
    late = late_error(core, method, began, pending, len(ends))
    if deadline.passed:
        raise late
    logger.warning("%s", late)
    return deadline


def late_error(core: Core, method: str, began: float, pending: Sequence[Any], called: int) -> CallTimeoutError:
    """Return the error that says what the workers are doing that have not finished their replies."""
    members = {one.rank: one for reply in pending if (one := core.find(replies.actor_of(reply))) is not None}
    return CallTimeoutError(method, _world.current.now() - began, called, late_workers(list(members.values())))


def cancel(core: Core, sent: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
    """Drop the requests of a call that have not started, given by rank; return the ranks that run it.

    With `force`, kill these; not their successors, if they have been replaced in the meantime.
    """
    workers = {rank: core.find(replies.actor_of(reply)) or core.now[rank] for rank, reply in sent.items()}
    calls = [(workers[rank], reply) for rank, reply in sent.items()]
    running = cancel_calls(calls, in_order=not core.described.worker_class.concurrent)
    if force:  # a shutdown kills them anyway
        killed = [workers[rank] for rank in running if core.is_present(workers[rank])]
        for worker in killed:
            ray.kill(worker.handle)
        cause = f"its call of {method!r} was cancelled with force"
        core.note([(worker, worker.failure("cancelled", cause)) for worker in killed])
    return running


def _refused_epoch(error: BaseException | None) -> int | None:
    """Return the epoch of the worker that has refused a call with this error; None if it has not."""
    epochs: tuple[int, int] | None = getattr(getattr(error, "cause", None), "fairlead_epochs", None)
    return None if epochs is None else epochs[1]


def _cancel_refused(core: Core, sent: Sent) -> StaleGroupError:
    """Cancel the rest of a call that workers have refused, and return its error.

    Even if the caller's timeout is shorter, this waits up to 1 s (`REFUSED_S`) for the other workers, so that the error
    can name those that have run the call, and up to 2 s more for the new roster.
    """
    method, ranks = sent.call.method.name, sent.call.called
    pending = set(replies.wait(list(map(end_of, sent.replies)), REFUSED_S)[1])
    # They may wait for those that have refused it.
    late = {rank: reply for rank, reply in zip(ranks, sent.replies, strict=True) if end_of(reply) in pending}
    ran = set(cancel(core, late, method, force=False) if late else ())
    errors = _find_errors(sent)
    own = {rank: _refused_epoch(error) for rank, error in errors.items()}
    dropped = {rank for rank in late if _is_cancellation(errors.get(rank))}
    ran |= {rank for rank, epoch in own.items() if epoch is None} - dropped
    epoch = max([sent.epoch, *(one for one in own.values() if one is not None)])
    with contextlib.suppress(WorkerGroupError, PlacementError):  # the next call raises it
        core.renew(epoch)
    refused = tuple(rank for rank in ranks if rank not in ran)
    reason = f"{method!r} was planned for epoch {sent.epoch}, and the epoch of the group has changed: "
    if ran:
        reason += (
            f"rank(s) {format_ranks(sorted(ran))} have run it or begun to, and rank(s) {format_ranks(refused)} have "
            "not. The rest of the call was cancelled. Make the call again if these ranks may run it twice."
        )
    else:
        reason += "none of its workers has run it. Make the call again."
    return StaleGroupError(reason, epoch, tuple(sorted(ran)), refused)


def _is_cancellation(error: BaseException | None) -> bool:
    """Return whether a worker has dropped a call that was cancelled before it started."""
    return isinstance(error, TaskCancelledError) or isinstance(getattr(error, "cause", None), TaskCancelledError)


def _find_errors(sent: Sent) -> dict[int, BaseException | None]:
    """Return the error of each rank that has finished; None if it has none, or had items before.

    Errors are here as soon as a worker has finished. The values of others stay where they are.
    """
    pending = set(replies.wait(list(map(end_of, sent.replies)))[1])
    errors: dict[int, BaseException | None] = {}
    for rank, reply in zip(sent.call.called, sent.replies, strict=True):
        if end_of(reply) in pending:
            continue
        items = wait.taken(reply)
        if is_stream(reply) and not items:
            wait.take(reply, 1)
        # An item may still be on its way.
        error = replies.error_of(items[0], REFUSED_S) if items else None
        errors[rank] = error or replies.error_of(end_of(reply))
    return errors

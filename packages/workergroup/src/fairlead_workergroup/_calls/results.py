# SPDX-License-Identifier: Apache-2.0
"""What comes back of calls: values, outcomes and failures; who is late; and what becomes of the rest of a call."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import RayError, TaskCancelledError

from fairlead_placement import PlacementError

from .. import _replies as replies
from .. import _world
from .._membership.core import Core, Sent
from .._membership.losses import diagnose
from .._observe.query import cancel_calls, late_workers
from .._ray_private import end_of, is_stream
from .._replies import CheckLate, collect, ends_of, short_traceback, take, taken, values
from .._world import NEVER, Deadline
from ..exceptions import (
    CallCancelledError,
    CallTimeoutError,
    StaleGroupError,
    WorkerFailureError,
    WorkerGroupError,
    format_ranks,
)
from .plan import Recipients

logger = logging.getLogger(__name__)

# A request reaches a worker that is not busy within this time.
REFUSED_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one worker, or one item that the worker yielded.

    Attributes:
        rank: the number of the worker in the group.
        coords: its coordinates in the group, by axis.
        value: the value that it returned; None if it failed.
        error: the exception that it raised; None if it did not fail.
    """

    rank: int
    coords: Mapping[str, int] = field(hash=False)
    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class MultiWorkerFuture:
    """The futures of one call to several workers; compatible with NeMo RL.

    Attributes:
        futures: one future for each called worker. The future of a worker that does not return a result holds None.
        return_from_workers: the ranks whose results are wanted, in this order; None for all futures. Ranks that were
            not called have none, and are left out.
        called_workers: the rank of each future; None if future i belongs to rank i.

    Raises:
        ValueError: a rank is called twice, or the numbers of ranks and futures differ.

    >>> MultiWorkerFuture(["a", "b"], called_workers=[0, 0])
    Traceback (most recent call last):
    ValueError: called_workers names a rank twice: [0, 0]
    """

    futures: list[Any]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def __post_init__(self) -> None:
        if self.called_workers is not None and len(self.called_workers) != len(self.futures):
            raise ValueError(f"{len(self.futures)} futures, but {len(self.called_workers)} called_workers")
        if len(set(self.called_workers or ())) != len(self.called_workers or ()):
            raise ValueError(f"called_workers names a rank twice: {self.called_workers}")

    def get_results(self, worker_group: Any = None, return_generators_as_proxies: bool = False) -> list[Any]:
        """Wait for the workers and fetch the wanted results, and nothing else.

        Waits for every called worker, because the errors of a worker that returns no result count too.

        Args:
            worker_group: the group that was called; with it, errors name the ranks that failed.
            return_generators_as_proxies: return each generator as it is, an iterator of ObjectRefs.

        Returns:
            The results in the order of `return_from_workers`. The items of a generator stand at its place.

        Raises:
            CallTimeoutError: a worker has not finished within the `Timeouts.call_s` of `worker_group` from now.
            WorkerFailureError: a worker was lost.
            Exception: a worker's own exception, with its type and notes that name the failing ranks.
        """
        if worker_group is not None:
            results: list[Any] = worker_group.get_all_worker_results(self, return_generators_as_proxies)
            return results
        wanted, others = recipients_of(self).positions
        in_order = [self.futures[position] for position in (*wanted, *others)]
        if return_generators_as_proxies and any(map(is_stream, in_order)):
            return in_order[: len(wanted)]
        with short_traceback():
            return flatten(in_order, collect(in_order, NEVER)[: len(wanted)])


def recipients_of(bundle: MultiWorkerFuture) -> Recipients:
    """Return the workers that were called, and those whose results are wanted."""
    for future in bundle.futures:
        if not isinstance(future, (ObjectRef, ObjectRefGenerator)):
            raise TypeError(f"expected an ObjectRef or a generator of them, got {type(future).__name__}")
    called = list(range(len(bundle.futures)) if bundle.called_workers is None else bundle.called_workers)
    return Recipients(called, called if bundle.return_from_workers is None else bundle.return_from_workers, None)


def flatten(replies: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the values of the first replies in a flat list, in which the items of a generator stand at its place."""
    pairs = zip(replies, values, strict=False)
    return [item for reply, value in pairs for item in (value if is_stream(reply) else [value])]


def cancelled_error(method: str, ranks: Iterable[int]) -> CallCancelledError:
    return CallCancelledError(method, tuple(sorted(ranks)))


def cancel(core: Core, sent: Sequence[Any], method: str, *, force: bool) -> list[int]:
    """Drop requests of a method that have not started, given by their replies; return the ranks that run it.

    With `force`, kill these; not their successors, if they have been replaced in the meantime.
    """
    calls = [(core.member_of(reply), reply) for reply in sent]
    running = cancel_calls(calls, in_order=not core.worker_class.concurrent)
    if killed := [worker for worker in running if force and core.is_present(worker)]:
        for worker in killed:
            ray.kill(worker.handle)
        cause = f"its call of {method!r} was cancelled with force"
        core.note([(worker, worker.failure("cancelled", cause)) for worker in killed])
    return [worker.rank for worker in running]


class Arrivals:
    """What has come back of a call that has been sent. A position is an index of its replies."""

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
        positions = {end_of(reply): position for position, reply in enumerate(self.sent.replies)}
        return [positions[ref] for ref in replies.wait(list(positions))[1]]

    def wait(self, deadline: Deadline) -> bool:
        """Wait until all called workers have finished, and log those that have not; return whether it is in time."""
        ends = list(map(end_of, self.sent.replies))
        while True:
            self._core.connection.check()
            if not replies.wait(ends, deadline.left(at_most=replies.REPORT_EVERY_S))[1]:
                return True
            if deadline.passed:
                return False
            self.check_late(NEVER)

    def check_late(self, deadline: Deadline) -> Deadline:
        """Log the workers that have not finished; return the deadline of the rest of the wait.

        When all have finished, only their values are on the way, which does not count against the deadline.
        """
        if not (pending := self.pending()):
            return NEVER
        late = self.late_error(pending)
        if deadline.passed:
            raise late
        logger.warning("%s", late)
        return deadline

    def late_error(self, pending: Sequence[int]) -> CallTimeoutError:
        """Return the error that says what the workers at these positions are doing."""
        workers = [self._core.find(replies.actor_of(self.sent.replies[position])) for position in pending]
        late = late_workers([worker for worker in workers if worker is not None])
        return CallTimeoutError(self._method, _world.current.now() - self.sent.call.began, len(self._ranks), late)

    def result(self, deadline: Deadline, check_late: CheckLate | None) -> Any:
        """Return what `Call.result` does, once all called workers have finished; the first error ends the wait."""
        call = self.sent.call
        wanted, others = call.recipients.positions
        in_order = [self.sent.replies[position] for position in (*wanted, *others)]
        fetch = values if call.method.result == "value" else collect
        results = fetch(in_order, deadline, check_late)[: len(wanted)]
        if call.options.discard:
            return None
        return results[0] if call.options.collect == () else results

    def value(self, ref: Any, deadline: Deadline) -> Any:
        """Return the value of a reference that is here or will be soon, or raise the failure of the call."""
        try:
            (value,) = values([ref], deadline, self.check_late)
        except RayError as error:
            raise self.failure(error, deadline)  # noqa: B904  chained there
        return value

    def outcome(self, position: int) -> Outcome:
        """Return the outcome of a called worker that has finished."""
        reply = self.sent.replies[position]
        try:
            (value,) = collect([reply], NEVER, self.check_late)
        except (RayError, WorkerGroupError) as error:
            if self._ranks[position] in self._cancelled:
                return self.make_outcome(position, error=cancelled_error(self._method, [self._ranks[position]]))
            # A call of the owner is never refused; an argument of it may be.
            if not self._core.is_owner and _refused_epoch(error) is not None:
                raise self._refused_error() from None
            return self.make_outcome(position, error=diagnose(ends_of([reply]), error, self._core, self._method))
        return self.make_outcome(position, value)

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each worker; of those that return no result, only the errors."""
        late: BaseException | None = None
        if pending := dict.fromkeys(self.pending()):
            ranks = [self._ranks[position] for position in pending]
            late = cancelled_error(self._method, ranks) if self._cancelled else self.late_error(list(pending))
        wanted, others = self.sent.call.recipients.positions
        outcomes = [
            self.make_outcome(position, error=late) if position in pending else self.outcome(position)
            for position in (*wanted, *others)
        ]
        return outcomes[: len(wanted)] + [outcome for outcome in outcomes[len(wanted) :] if outcome.error is not None]

    def make_outcome(self, position: int, value: Any = None, error: BaseException | None = None) -> Outcome:
        """Return the outcome of the worker at a position."""
        member = self._core.member_of(self.sent.replies[position])
        return Outcome(member.rank, dict(member.coords), value, error)

    def failure(self, error: BaseException, deadline: Deadline) -> BaseException:
        """Return the exception to raise for an error of Ray, with all ranks that have failed so far."""
        self._core.connection.check()
        if self._cancelled:
            return cancelled_error(self._method, self._cancelled)
        failure = diagnose(ends_of(self.sent.replies), error, self._core, self._method, deadline)
        if self._core.is_owner or isinstance(failure, WorkerFailureError):
            return failure
        # The error of an item may be here before its generator has ended.
        errors = (error, *_find_errors(self.sent).values())
        return failure if all(_refused_epoch(other) is None for other in errors) else self._refused_error()

    def cancel(self, *, force: bool) -> list[int]:
        """Cancel the rest of the call, as `cancel` does."""
        unfinished = self.pending()
        self._cancelled.update(self._ranks[position] for position in unfinished)
        return cancel(self._core, [self.sent.replies[position] for position in unfinished], self._method, force=force)

    def _refused_error(self) -> StaleGroupError:
        """Return the error of a call of a handle that workers have refused, and cancel the rest of the call once."""
        self._refused = self._refused or _cancel_refused(self._core, self.sent)
        return replace(self._refused)


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
    running = cancel(core, list(late.values()), method, force=False)
    errors = _find_errors(sent)
    epochs = {rank: epoch for rank, error in errors.items() if (epoch := _refused_epoch(error)) is not None}
    # Workers that have dropped the call because it was cancelled before it started.
    causes = {rank: getattr(errors.get(rank), "cause", None) or errors.get(rank) for rank in late}
    dropped = {rank for rank, cause in causes.items() if isinstance(cause, TaskCancelledError)}
    ran = sorted({*running, *(errors.keys() - epochs.keys() - dropped)})
    epoch = max([sent.epoch, *epochs.values()])
    with contextlib.suppress(WorkerGroupError, PlacementError):  # the next call raises it
        core.renew(epoch)
    refused = tuple(rank for rank in ranks if rank not in ran)
    reason = f"{method!r} was planned for epoch {sent.epoch}, and the epoch of the group has changed: "
    if ran:
        reason += (
            f"rank(s) {format_ranks(ran)} have run it or begun to, and rank(s) {format_ranks(refused)} have not. The "
            "rest of the call was cancelled. Make the call again if these ranks may run it twice."
        )
    else:
        reason += "none of its workers has run it. Make the call again."
    return StaleGroupError(reason, epoch, tuple(ran), refused)


def _find_errors(sent: Sent) -> dict[int, BaseException | None]:
    """Return the error of each rank that has finished; None if it has none, or had items before.

    Errors are here as soon as a worker has finished. The values of others stay where they are.
    """
    pending = set(replies.wait(list(map(end_of, sent.replies)))[1])
    errors: dict[int, BaseException | None] = {}
    for rank, reply in zip(sent.call.called, sent.replies, strict=True):
        if end_of(reply) in pending:
            continue
        items = taken(reply)
        if is_stream(reply) and not items:
            take(reply)
        # An item may still be on its way.
        error = replies.error_of(items[0], REFUSED_S) if items else None
        errors[rank] = error or replies.error_of(end_of(reply))
    return errors

# SPDX-License-Identifier: Apache-2.0
"""What comes back of calls: values, outcomes and failures; who is late; and what becomes of the rest of a call."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from .._replies import collect, ends_of, find_news, short_traceback, take, taken
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
        with short_traceback():
            return fetch(self, core=None, proxies=return_generators_as_proxies)


def fetch(bundle: MultiWorkerFuture, *, core: Core | None, proxies: bool) -> list[Any]:
    """Return the wanted values in order; a generator gives one value for each item, or with `proxies` itself.

    The other futures are waited for and not fetched. With a core, its timeout holds, and errors name ranks.
    """
    if core is not None:
        core.connection.check()
    called = range(len(bundle.futures)) if bundle.called_workers is None else bundle.called_workers
    wanted, others = Recipients(
        list(called), list(called if bundle.return_from_workers is None else bundle.return_from_workers), None
    ).positions
    futures, silent = ([bundle.futures[position] for position in positions] for positions in (wanted, others))
    for future in futures:
        if not isinstance(future, (ObjectRef, ObjectRefGenerator)):
            raise TypeError(f"expected an ObjectRef or a generator of them, got {type(future).__name__}")
    # The silent ones hold None: fetching them moves nothing, and raises their errors.
    waited_for = [future for future in futures if not (proxies and is_stream(future))]
    waited_for += [future for future in silent if not is_stream(future)]
    deadline, check = NEVER, None
    if core is not None:
        deadline = Deadline.after(core.call_timeout_s)
        check = partial(check_late, core, "a method", _world.current.now(), waited_for)
    try:
        values = iter(collect(waited_for, deadline, check))
    except RayError as error:  # every exception of a worker
        raise diagnose(ends_of(waited_for), error, core)  # noqa: B904  chained there
    results: list[Any] = []
    for future in futures:
        if is_stream(future):
            results += [future] if proxies else next(values)
        else:
            results.append(next(values))
    return results


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
    workers = [core.find(replies.actor_of(reply)) for reply in pending]
    members = {worker.rank: worker for worker in workers if worker is not None}
    return CallTimeoutError(method, _world.current.now() - began, called, late_workers(list(members.values())))


def cancel(core: Core, sent: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
    """Drop the requests of a call that have not started, given by rank; return the ranks that run it.

    With `force`, kill these; not their successors, if they have been replaced in the meantime.
    """
    workers = {rank: core.member_of(reply) for rank, reply in sent.items()}
    calls = [(workers[rank], reply) for rank, reply in sent.items()]
    running = cancel_calls(calls, in_order=not core.worker_class.concurrent)
    if force:  # a shutdown kills them anyway
        killed = [workers[rank] for rank in running if core.is_present(workers[rank])]
        for worker in killed:
            ray.kill(worker.handle)
        cause = f"its call of {method!r} was cancelled with force"
        core.note([(worker, worker.failure("cancelled", cause)) for worker in killed])
    return running


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
        waiting = list(map(end_of, self.sent.replies))
        while waiting:
            self._core.connection.check()
            news = find_news(waiting, deadline.left(at_most=replies.REPORT_EVERY_S))
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
        late = [self.sent.replies[position] for position in pending]
        return late_error(self._core, self._method, self.sent.call.began, late, len(self._ranks))

    def outcome(self, position: int) -> Outcome:
        """Return the outcome of a called worker that has finished."""
        reply = self.sent.replies[position]
        try:
            (value,) = collect([reply], NEVER, self.check_late)
        except (RayError, WorkerGroupError) as error:
            if self._ranks[position] in self._cancelled:
                return self.make_outcome(position, error=self._cancelled_error(self._ranks[position]))
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
            late = self._cancelled_error(*ranks) if self._cancelled else self.late_error(list(pending))
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
            return self._cancelled_error(*self._cancelled)
        failure = diagnose(ends_of(self.sent.replies), error, self._core, self._method, deadline)
        if self._core.is_owner or isinstance(failure, WorkerFailureError):
            return failure
        # The error of an item may be here before its generator has ended.
        errors = (error, *_find_errors(self.sent).values())
        return failure if all(_refused_epoch(other) is None for other in errors) else self._refused_error()

    def cancel(self, *, force: bool) -> list[int]:
        """Cancel the rest of the call, as `cancel` does."""
        unfinished = {self._ranks[position]: self.sent.replies[position] for position in self.pending()}
        self._cancelled.update(unfinished)
        return cancel(self._core, unfinished, self._method, force=force) if unfinished else []

    def _cancelled_error(self, *ranks: int) -> CallCancelledError:
        return CallCancelledError(self._method, tuple(sorted(ranks)))

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
    running = cancel(core, late, method, force=False) if late else []
    errors = _find_errors(sent)
    epochs = {rank: epoch for rank, error in errors.items() if (epoch := _refused_epoch(error)) is not None}
    dropped = {rank for rank in late if _is_cancellation(errors.get(rank))}
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
        items = taken(reply)
        if is_stream(reply) and not items:
            take(reply, 1)
        # An item may still be on its way.
        error = replies.error_of(items[0], REFUSED_S) if items else None
        errors[rank] = error or replies.error_of(end_of(reply))
    return errors

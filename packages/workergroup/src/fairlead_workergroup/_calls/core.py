# SPDX-License-Identifier: Apache-2.0
"""A group without its public face: it sends calls in turn, after a restart that is due, and keeps those that wait."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import ray

from fairlead_sharding import NamedSharding

from .. import _world
from .._membership.judge import Evidence, Verdict
from .._membership.machine import FixedMembership
from .._membership.model import Snapshot
from .._membership.operations import RestartPolicy
from .._membership.roster import Roster
from .._observe.query import cancel_calls, late_workers
from .._start.worker_class import Described, Method
from .._transport import replies
from .._transport.replies import Request
from .._world import Deadline, Event, wait_for_event
from ..exceptions import (
    BrokenEpochError,
    CallTimeoutError,
    EpochError,
    LateWorker,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
)
from .plan import CallOptions, Recipients, extend_request


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """A call that is ready to be sent, now or later.

    Attributes:
        method: the method, or the function in its place.
        recipients: the workers that it reaches.
        requests: the request to each of them.
        began: when its caller made it.
        deadline: of its results.
        options: as its caller gave them.
        sharding: the axes that it was planned on; None if its ranks were given by number.
        is_hook: whether it belongs to the change of membership that is under way, and does not wait for it.
        replan: plans the same call on the present axes; None if its values fit one size of the group only.
    """

    method: Method
    recipients: Recipients
    requests: Sequence[Request]
    began: float
    deadline: Deadline
    options: CallOptions = field(default_factory=CallOptions)
    sharding: NamedSharding | None = None
    is_hook: bool = False
    replan: "Callable[[], PlannedCall] | None" = None


@dataclass(frozen=True, eq=False)
class Sent:
    """A call that has been sent, with a reply from each of its ranks."""

    call: PlannedCall
    replies: list[Any]
    epoch: int


@dataclass(eq=False, repr=False)
class Core:
    """Sends the calls of a group. `turn` protects the order of calls, and those that wait for the end of a change.

    Whoever holds `turn` submits one call to all of its workers. It never waits, makes no other request, and runs no
    code of the user. A signal handler's own thread may hold it, so the end of the group does not take it.
    """

    roster: Roster
    described: Described
    changes: FixedMembership
    call_timeout_s: float | None
    checks: list[Callable[[str, Sequence[int]], None]] = field(default_factory=list)  # of packages; see `extension`
    is_owner: ClassVar[bool] = True  # whether this process has made the group

    def __post_init__(self) -> None:
        self._turn = _world.current.lock()
        self._sending: int | None = None  # the thread that submits a call
        self._change_ends: Event | None = None  # while calls wait for a change
        # Calls of event loops that wait for the end of a change, in order.
        self._queued: deque[tuple[PlannedCall, Future[Sent]]] = deque()
        self.changes.turns = self

    @property
    def policy(self) -> RestartPolicy:
        """The restart policy of the group."""
        return self.changes.policy

    def renew(self, at_least: int = 0) -> None:
        """Bring the roster of another process up to date, to an epoch if one is given."""

    def check_retries(self, retries: int) -> None:
        """Refuse retries in a group that does not restart workers."""
        if retries and not self.policy.on_failure:
            raise ValueError(f"retries={retries} needs a group with restart=Restart(on_failure=True)")

    def send(self, call: PlannedCall, until: Deadline | None = None) -> Sent:
        """Restart lost workers if that is due, and send a call in its turn; the thread waits for both.

        It waits until the deadline of the call, if no other moment is given.
        """
        until = call.deadline if until is None else until
        while True:
            outcome = self._try(call)
            if isinstance(outcome, Sent):
                return outcome
            # A restart may take longer than this call may wait, and runs to its end.
            if isinstance(outcome, list) and not self.changes.restart_lost(until):
                raise self.unsent_error(call)
            if not isinstance(outcome, list) and not wait_for_event(outcome, until):
                raise self.unsent_error(call)

    def send_or_queue(self, call: PlannedCall) -> "Sent | Future[Sent]":
        """Send a call of an event loop; if it has to wait, return a future, and send it when the change has ended."""
        later: Future[Sent] = Future()
        with self._turn:
            outcome = None if self._queued else self._try(call)
            if isinstance(outcome, Sent):
                return outcome
            self._queued.append((call, later))
        if isinstance(outcome, list):
            try:
                self.changes.begin_restart()
            except BaseException:
                later.cancel()
                raise
        return later

    def begin_change(self) -> None:
        """Let no further call pass; one that is being submitted is submitted to its end."""
        with self._turn:
            self._change_ends = self._change_ends or _world.current.event()

    def end_change(self, error: BaseException | None = None) -> bool:
        """Send the calls that event loops have made in the meantime, and let others pass.

        Args:
            error: why the change has failed, for the calls that cannot be sent without it.

        Returns:
            Whether calls still wait, because they need a restart of lost workers.
        """
        settled: list[Callable[[], None]] = []
        with self._turn:
            ends, self._change_ends = self._change_ends, None
            while self._queued:
                call, later = self._queued.popleft()
                if not later.running() and not later.set_running_or_notify_cancel():
                    continue
                try:
                    if call.deadline.passed:
                        raise self.unsent_error(call)
                    outcome = self._submit(call)
                except Exception as failure:  # noqa: BLE001  raised to the caller
                    settled.append(partial(later.set_exception, failure))
                    continue
                if isinstance(outcome, Sent):
                    settled.append(partial(later.set_result, outcome))
                elif error is not None or self.roster.ending:
                    settled.append(partial(later.set_exception, error or self.roster.ended_error()))
                else:
                    self._queued.appendleft((call, later))
                    break
            waits = bool(self._queued)
        if ends is not None:
            ends.set()
        for settle in settled:  # without the lock, because what waits for them may act
            settle()
        return waits

    def refuse_waiting(self) -> None:
        """Wake all that wait, because the group ends; without the lock, which a handler's own thread may hold."""
        ends, self._change_ends = self._change_ends, None
        if ends is not None:
            ends.set()
        while self._queued:
            _, later = self._queued.popleft()
            if later.running() or later.set_running_or_notify_cancel():
                later.set_exception(self.roster.ended_error())

    def wait_for_turn(self, deadline: Deadline) -> bool:
        """Wait until every call that has begun to be sent is sent, and no change is under way; return if in time."""
        while True:
            with self._turn:
                ends = self._change_ends
            if ends is None:
                return True
            if not wait_for_event(ends, deadline):
                return False

    def _try(self, call: PlannedCall) -> "Sent | list[WorkerFailure] | Event":
        """Send a call in its turn, or return the lost workers that it needs, or the event of the end of the change."""
        me = _world.current.thread()
        if self._sending == me or (self._change_ends is not None and not call.is_hook and self.changes.runs_here()):
            raise WorkerGroupError(
                "A signal handler or a finalizer made a call while its thread was sending another call of the same "
                "group, or was changing the group. Set a flag in the handler, and make the call in the thread's own "
                "code."
            )
        with self._turn:
            if self._change_ends is not None and not call.is_hook:
                return self._change_ends
            try:
                self._sending = me
                return self._submit(call)
            finally:
                self._sending = None

    def admit(self, call: PlannedCall) -> Snapshot | list[WorkerFailure]:
        """Return the members for a call that may be sent; or the lost workers that it has to wait for."""
        now = self.roster.now
        if now.ended:
            raise self.roster.ended_error()
        self.roster.connection.check()
        if call.sharding is not now.sharding:
            check_ranks(call, now)
        for check in () if call.is_hook else list(self.checks):
            check(call.method.name, call.recipients.called)
        if now.lost:
            lost = self.policy.blocking(now, call.recipients.called)
            # The methods that a change runs wait for their own workers only.
            if blocking := [failure for failure in lost if not call.is_hook or failure.rank in call.recipients.called]:
                if call.is_hook or not self.policy.on_failure:
                    raise self._lost_error(blocking)
                return blocking
        return now

    def _submit(self, call: PlannedCall) -> Sent | list[WorkerFailure]:
        """Send a call, planned again if the size of the group has changed since; the caller holds `turn`."""
        try:
            now = self.admit(call)
        except EpochError:
            if call.replan is None:
                raise
            call = call.replan()
            now = self.admit(call)
        if isinstance(now, list):
            return now
        requests = call.requests
        if not self.is_owner:
            requests = [extend_request(request, call.method, {"epoch": now.epoch}) for request in requests]
        handles = [now.members[rank].handle for rank in call.recipients.called]
        return Sent(call, replies.submit(handles, requests), now.epoch)

    def _lost_error(self, lost: Sequence[WorkerFailure]) -> WorkerFailureError:
        now = self.roster.now
        if now.is_broken and not self.policy.on_failure:
            return BrokenEpochError(tuple(lost), epoch=now.epoch)
        return WorkerFailureError(tuple(lost), self.changes.remedy(lost))

    def unsent_error(self, call: PlannedCall) -> CallTimeoutError:
        """Return the error of a call that could not be sent by its deadline."""
        waited_s, reason = _world.current.now() - call.began, self.changes.describe_wait()
        return CallTimeoutError(call.method.name, waited_s, len(call.recipients.called), (), reason)

    def failure_error(self, verdicts: Iterable[Verdict]) -> WorkerFailureError:
        """Record losses, and return the error that reports them."""
        lost = self.roster.note(verdicts)
        return WorkerFailureError(tuple(lost), self.changes.remedy(lost))

    def is_lost(self, reply: Any) -> bool:
        """Return whether the worker that makes a reply is dead or has been replaced."""
        return self.roster.is_lost(replies.actor_of(reply))

    def late_workers(self, ranks: Iterable[int]) -> tuple[LateWorker, ...]:
        """Return what these ranks are doing now."""
        now = self.roster.now
        return late_workers([now[rank].process for rank in ranks])

    def cancel(self, sent: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
        """Drop the requests of a call that have not started; return the ranks that run it, which `force` kills.

        Args:
            sent: the reply of each rank.
            method: the name of the method, for the report of the losses.
            force: kill the workers that run it; not their successors, if they have been replaced in the meantime.
        """
        now = self.roster.now
        workers = {rank: self.roster.find(replies.actor_of(reply)) or now[rank].process for rank, reply in sent.items()}
        calls = [(workers[rank], reply) for rank, reply in sent.items()]
        running = cancel_calls(calls, in_order=not self.described.worker_class.concurrent)
        if force:  # a shutdown kills them anyway
            handles = {rank: self.roster.find_handle(workers[rank]) for rank in running}
            for handle in handles.values():
                if handle is not None:
                    ray.kill(handle)
            cause = f"its call of {method!r} was cancelled with force"
            killed = Evidence("user", "gone", "cancelled", cause)
            self.roster.note([self.roster.judge.tell(workers[one], killed) for one in running if handles[one]])
        return running


_cores: weakref.WeakKeyDictionary[object, Core] = weakref.WeakKeyDictionary()


def set_core(group: object, core: Core) -> None:
    """Note the core of a group, which must not refer to the group."""
    _cores[group] = core


def find_core(group: object) -> Core:
    """Return the core of a group."""
    try:
        return _cores[group]
    except KeyError:
        raise TypeError(f"This needs a RayWorkerGroup, got {group!r}") from None


def check_ranks(call: PlannedCall, now: Snapshot) -> None:
    """Refuse to send a call that was not planned on these members, unless its ranks were given by number."""
    if call.sharding is None and now.has(call.recipients.called):
        return
    raise EpochError(
        f"{call.method.name!r} was not sent: the group was resized {now.resizes[-1]}, after the call was made. Make "
        "the call again.",
        now.resizes[-1].epoch,
    )

# SPDX-License-Identifier: Apache-2.0
"""The one owner of change: operations run one after another, on one thread while there are any."""

import contextvars
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import head_deadline

from .. import _world
from .._model import Member
from .._observe.query import alive_nodes, late_workers
from .._ray_private import end_of
from .._remote.setup import apply_facts, do_nothing
from .._start.worker_class import pickle_function
from .._world import NEVER, Deadline, wait_for, wait_for_event
from ..exceptions import (
    FailureKind,
    LateWorker,
    ResizeTimeoutError,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
)
from .core import BROKEN, Core
from .losses import find_losses
from .operations import Operation, Plan, restart_lost
from .provision import Provisioner, Staged, store_layout

logger = logging.getLogger(__name__)

NOT_STARTED = "They could not be started again: "
_pickle = cache(pickle_function)
# Sends a method of the user's class to ranks with a deadline, and returns the call.
RunHook = Callable[[str, Sequence[int], Deadline], Any]


class Change:
    """An operation on its way; calls wait for one that `is_shared`, and any of them may have requested it.

    It runs to its end or its deadline, even if whoever has requested it does not wait any more, as after Ctrl-C.
    """

    def __init__(self, operation: Operation, until: Deadline, *, is_shared: bool) -> None:
        self.operation = operation
        self.until = until
        self.is_shared = is_shared
        self.asked_at: float = _world.current.now()
        self.ranks: tuple[int, ...] = ()  # those that it has started
        self.error: BaseException | None = None
        self.context = contextvars.copy_context()
        self.done = _world.current.event()

    def wait(self, deadline: Deadline = NEVER) -> bool:
        """Wait until the change is over, and raise what it has raised; return whether it is over."""
        if not wait_for_event(self.done, deadline):
            return False
        if self.error is not None:
            raise self.error.with_traceback(None)
        return True

    def late_error(self, reason: str, late: tuple[LateWorker, ...] = ()) -> ResizeTimeoutError:
        return ResizeTimeoutError(self.operation.name, _world.current.now() - self.asked_at, late, reason)


class Changes:
    """The changes of one group. The lock protects the queue: there is a thread while there is work, and only one."""

    def __init__(self, core: Core, provisioner: Provisioner, run_hook: RunHook) -> None:
        self._core = core
        self._provisioner = provisioner
        self._run_hook = run_hook
        self._lock = _world.current.lock()
        self._queue: deque[Change] = deque()
        self._running: Change | None = None
        self._thread: int | None = None
        self._idle = _world.current.event()

    def run(self, operation: Operation, until: Deadline) -> list[int]:
        """Run an operation, and wait until it is over; return the ranks that it has started."""
        change = self.request(operation, until)
        if not change.wait(until):
            with self._lock:
                if waits := change in self._queue:
                    self._queue.remove(change)
            if waits:
                raise change.late_error(
                    "Another thread resizes the group or restarts workers. Make it again with a longer timeout."
                )
            change.wait()
        return sorted(change.ranks)

    def restart_lost(self) -> Change:
        """Request the restart of lost workers for a call, which all callers that need it share."""
        return self.request(restart_lost(), self._provisioner.deadline(None), is_shared=True)

    def request(self, operation: Operation, until: Deadline, *, is_shared: bool = False) -> Change:
        """Queue an operation, and return what it will become; with `is_shared` perhaps one that is on its way."""
        if self.runs_here():
            raise WorkerGroupError(
                f"{operation.name} cannot be requested by what the present change of the group waits for. Request it "
                "when that has ended."
            )
        try:
            with self._lock:
                if self._core.ending:
                    raise self._core.ended_error()
                under_way = [other for other in (self._running, *self._queue) if other is not None and other.is_shared]
                if is_shared and under_way:
                    change = under_way[0]
                else:
                    change = Change(operation, until, is_shared=is_shared)
                    self._queue.append(change)
        finally:  # also after Ctrl-C: what is in the queue runs, and others may wait for it already
            if self._queue and self._thread is None:
                _world.current.spawn("fairlead-change", self._serve)
        return change

    def runs_here(self) -> bool:
        """Return whether the calling thread is the one that changes the group."""
        return self._thread == _world.current.thread()

    def join(self, deadline: Deadline) -> bool:
        """Wait until no change runs; return whether that was before the deadline."""
        with self._lock:
            if self._thread is None or self.runs_here():
                return True
            idle = self._idle
        return wait_for_event(idle, deadline)

    def _serve(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            self._thread, self._idle = _world.current.thread(), _world.current.event()
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    self._idle.set()
                    return
                change = self._running = self._queue.popleft()
            try:
                change.context.run(self._carry_out, change)
            except BaseException as error:  # noqa: BLE001  raised by those who wait
                change.error = error
            # Calls of event loops that have waited may need a worker that is lost now.
            needs_restart = self._core.end_change(change.error)
            with self._lock:  # before those who wait may request the next one
                self._running = None
                if needs_restart:
                    self._queue.append(Change(restart_lost(), self._provisioner.deadline(None), is_shared=True))
            change.done.set()
            del change  # what it raised must not live until the next one

    def _carry_out(self, change: Change) -> None:
        core, goes_on = self._core, True
        core.check_goes_on()
        with head_deadline(change.until.left()):
            while goes_on and (plan := change.operation.plan(core.now, core, change.until)) is not None:
                change.ranks += self._run(_Run(plan, change, core, self._provisioner))
                goes_on = plan.again

    def _run(self, run: "_Run") -> tuple[int, ...]:
        """Do all steps of a plan, and return the ranks that were started."""
        core, plan, failure = self._core, run.plan, None
        try:
            if plan.replaced:
                core.begin_change()
                core.advance(restarting=plan.replaced)
            run.switch()
            self._follow(run)
        except Exception as error:
            failure = error
            core.check_goes_on()
            if (failure := run.note_failure(error)) is error:
                raise
            raise failure from error
        finally:
            core.advance(restarting=())
            core.end_change(failure)
            run.settle()
        return tuple(run.started)

    def _follow(self, run: "_Run") -> None:
        """Bring everybody into the epoch that has begun: the facts of survivors, the publication, the user's methods.

        A late or failed one breaks a group all of which has to follow; in a restart it is lost.
        """
        plan, core, after = run.plan, self._core, self._core.now
        try:
            run.deliver()
        finally:
            # Later than the facts: a worker without them refuses the calls of handles in the new epoch.
            self._provisioner.publish()
        again = sorted({*plan.replaced} | (run.started.keys() & run.before.lost.keys()))
        everybody = range(len(after.members)) if plan.follows else ()
        on_resize, ends = self._provisioner.spec.on_resize, {}
        for hook, method, ranks in (("Restart.method", core.policy.method, again), ("on_resize", on_resize, everybody)):
            if method is not None and ranks:
                call = self._run_hook(method, ranks, run.until)
                for rank, future in zip(call.called_workers, call.futures, strict=True):
                    ends[rank, f"{hook} failed: "] = end_of(future)
        run.wait_for(ends)
        if after.phase == "broken":
            core.advance(phase="serving")
        if plan.sharding is not run.before.sharding:
            logger.info("Resized %r to %s.", core.name_prefix, dict(plan.sharding.shape))
        if plan.replaced:
            logger.warning("Restarted rank(s) %s of %r.", ", ".join(map(str, plan.replaced)), core.name_prefix)


class _Run:
    """One plan that is being carried out."""

    def __init__(self, plan: Plan, change: Change, core: Core, provisioner: Provisioner) -> None:
        self.plan = plan
        self.until = change.until  # of the steps that can be undone, then of the others
        self.before = core.now
        self.started: dict[int, Member] = {}
        self._change = change
        self._core = core
        self._provisioner = provisioner
        self._has_begun = False  # whether the epoch has

    def switch(self) -> None:
        plan, core, provisioner = self.plan, self._core, self._provisioner
        staged = provisioner.acquire(self.before, plan, self.until)
        if plan.new:
            self._end([rank for rank in plan.new if rank in self.before.lost])
            self.started |= provisioner.start(staged, plan.new, self.until)
        core.begin_change()
        self._drain()
        core.check_goes_on()
        if plan.replaced:
            alive_nodes()  # the head has to answer, or nothing could start
            # The old epoch cannot continue as it was from here, so the rest has its own time.
            if (end := self.until.at) is not None:
                self.until = Deadline.after(end - self._change.asked_at)
            # Handles of other processes see that these workers are replaced, and do not take that for a loss.
            provisioner.publish({rank: staged.state.members[rank] for rank in plan.replaced})
            self._replace(staged)
        state = staged.state
        core.commit(
            dataclasses.replace(
                state,
                members=tuple(self._member(member) for member in state.members),
                phase="broken" if core.now.phase == "broken" else "serving",
                restarting=core.now.restarting,
                variables=staged.variables(),
                master=(staged.lease.address, staged.lease.port) if staged.lease is not None else ("", 0),
                restarts=self._restarts,
            )
        )
        self._has_begun = True
        provisioner.commit(staged)

    def _replace(self, staged: Staged) -> None:
        """End the old processes of ranks, and start the new ones; if that fails, these ranks are lost."""
        try:
            self._end(self.plan.replaced)
            with head_deadline(self.until.left()):
                self.started |= self._provisioner.start(staged, self.plan.replaced, self.until)
        except Exception as error:
            cause, failed, text = str(error), -1, f"{NOT_STARTED}{error}"
            if isinstance(error, WorkerStartError):
                cause, failed, text = error.reason, error.rank, str(error)
            reports = []
            for rank in self.plan.replaced:
                counts = staged.state.members[rank]
                member = dataclasses.replace(
                    self.before.members[rank], incarnation=counts.incarnation, restarts=counts.restarts
                )
                kind: FailureKind = "start-failed" if failed in (rank, -1) else "killed"
                reports.append((member, member.failure(kind, f"in a restart: {cause}")))
            self._core.advance(restarts=self._restarts)
            lost = tuple(self._core.note(reports, override=True))
            self._core.check_goes_on()  # at the end of the group these ranks have no cleanup
            raise WorkerFailureError(lost, text) from error

    @property
    def _restarts(self) -> int:
        return self.before.restarts + (self._core.restarts_all and self.plan.counts)

    def _member(self, staged: Member) -> Member:
        """Return a member of the next epoch: one that has started, or a survivor, which may have been lost since."""
        if (member := self.started.get(staged.rank)) is not None:
            return member
        return dataclasses.replace(staged, lost=self._core.now.members[staged.rank].lost)

    def _drain(self) -> None:
        ranks = self._find_late([self.before.members[rank] for rank in self.plan.quiet])
        late = late_workers([self._core.now.members[rank] for rank in ranks]) if ranks else ()
        if late and self.plan.follows:
            raise self._change.late_error(
                "It waited for calls that were made before. Make it again with a longer timeout, or cancel these "
                "calls:",
                late,
            )
        if late:
            logger.warning("Rank(s) %s are restarted while they are busy.", sorted(ranks))

    def _find_late(self, members: Sequence[Member]) -> list[int]:
        """Wait until everything that was sent to workers has ended; return the late ranks."""
        core = self._core
        sent = {
            member.rank: send_function(member, do_nothing, alone=core.worker_class.concurrent, until=self.until)
            for member in members
        }
        errors, late = wait_for(sent, self.until, core.check_goes_on, patient=True)
        # A worker that is lost now is found when the facts are sent to it.
        return late + [
            rank for rank, error in errors.items() if isinstance(getattr(error, "cause", None), TimeoutError)
        ]

    def _end(self, ranks: Sequence[int]) -> None:
        """End the old processes of ranks, or raise: their slots cannot be used again while they are there."""
        if left := self._provisioner.owned.end([self.before.members[rank] for rank in ranks], self.until):
            raise WorkerGroupError(
                f"Nothing was restarted, because processes of the old workers are still there: {'; '.join(left)}. "
                "They do not react to SIGKILL, or their node does not answer; look at them there. When they are gone, "
                "call `restart_failed_workers()` again, or create a new group on other nodes.",
            )

    def deliver(self) -> None:
        """Send the facts of the epoch to those who keep running; wait for them if all have to follow."""
        plan, now = self.plan, self._core.now
        self._core.check_goes_on()
        alone = plan.follows and self._core.worker_class.concurrent
        layout = store_layout(now.sharding) if len(now.members) != len(self.before.members) else None
        sent = {
            (member.rank, ""): send_function(
                member, apply_facts, now.facts(member.rank), layout, alone=alone, until=self.until
            )
            for member in now.members
            if member.rank not in self.started and member.lost is None
        }
        if plan.follows:
            self.wait_for(sent)

    def wait_for(self, futures: Mapping[tuple[int, str], Any]) -> None:
        """Wait for what workers do, by rank and a text about it; raise if they fail or are late, and then lost."""
        errors, late = wait_for(futures, self.until, self._core.check_goes_on)
        self._core.check_goes_on()
        if not errors and not late:
            return
        kind: FailureKind = "resize-failed" if self.plan.follows else "start-failed"
        members = self._core.now.members
        unfinished = "it had not finished when the resize had to end"
        failures = {members[rank]: members[rank].failure(kind, what + unfinished) for rank, what in late}
        for (rank, what), error in errors.items():
            cause = getattr(error, "cause", None) or error
            text = f"{what}it raised {type(cause).__name__}: {cause}"
            failures[members[rank]] = members[rank].failure(kind, text)
        failures |= find_losses(self._core, {members[rank]: error for (rank, _), error in errors.items()})
        raise self._lose(failures) from next(iter(errors.values()), None)

    def _lose(self, failures: Mapping[Member, WorkerFailure]) -> WorkerFailureError:
        """Record what has failed in the epoch that has begun, and return the error that reports it."""
        by_rank = sorted(failures.items(), key=lambda item: item[0].rank)
        lost = tuple(self._core.note(by_rank, breaks=self.plan.follows))
        if self.plan.follows:
            return WorkerFailureError(lost, BROKEN)
        self._provisioner.owned.end(list(failures), self.until)
        return WorkerFailureError(lost, f"{NOT_STARTED}{lost[0].cause}")

    def note_failure(self, error: Exception) -> Exception:
        """Record that this change has broken the group, if it has, and return the error to raise."""
        plan, core = self.plan, self._core
        if self._has_begun and plan.follows:
            if isinstance(error, WorkerFailureError):  # also if another thread has met the loss of a worker
                core.advance(phase="broken")
                return WorkerFailureError(error.failures, BROKEN)
            cause = f"the change was interrupted: {error!r}"  # not by a worker: it is unknown who has followed
            return self._lose({member: member.failure("resize-failed", cause) for member in core.now.members})
        is_told = self._has_begun or isinstance(error, (WorkerFailureError, HeadTimeoutError))
        if is_told or not (plan.replaced and plan.counts):
            return error
        return WorkerFailureError(tuple(self.before.lost.values()), f"{NOT_STARTED}{error}")

    def settle(self) -> None:
        """Let workers that leave finish their calls until the deadline; end them, and return what is not needed."""
        if self._core.ending:
            return
        leaving = [member for member in self.before.members[self.plan.sharding.size :] if member.lost is None]
        if not self._has_begun:
            self._provisioner.publish()
        elif leaving and (late := self._find_late(leaving)):
            logger.warning("Rank(s) %s were ended before they had finished.", ", ".join(map(str, late)))
        self._provisioner.settle(self.until)


def send_function(member: Member, function: Callable[..., Any], *args: Any, alone: bool, until: Deadline) -> Any:
    """Send a function that runs between two calls of a worker; `alone`, it waits for overlapping ones."""
    name, pickled = function.__name__, _pickle(function)
    if alone:
        how = {"method": name, "function": True, "alone": until.left(at_most=3600.0)}
        return member.handle._fairlead_call.remote(how, pickled, *args)
    return member.handle._fairlead_apply.remote(name, pickled, *args)

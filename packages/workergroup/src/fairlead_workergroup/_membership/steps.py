# SPDX-License-Identifier: Apache-2.0
"""The steps of every change: acquire, prepare, quiesce, end, construct, commit, deliver."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from fairlead_placement import HeadTimeoutError

from .._ray_private import end_of
from .._world import Deadline
from ..exceptions import BrokenEpochError, WorkerFailureError, WorkerStartError
from .change import Change
from .model import Snapshot, Started
from .operations import Plan
from .ports import Crew, HookCall, Hooks, Transport, Turns
from .roster import Roster

logger = logging.getLogger(__name__)

# Of a rank whose old process was told to end, and may still be there.
MAY_RUN = "its old process was told to end, and no other one has started"


class Steps:
    """One plan that is being carried out."""

    def __init__(
        self,
        plan: Plan,
        change: Change,
        roster: Roster,
        ports: tuple[Crew[Any], Transport, Hooks],
        turns: Turns,
    ) -> None:
        self._plan = plan
        self._change = change
        self._roster = roster
        self._crew, self._transport, self._hooks = ports
        self._turns = turns
        self._failure: BaseException | None = None  # why it could not be carried out
        # The end of the steps that can be undone, then of the others; those who have to follow have one for all.
        self._deadline = change.deadline
        self._before = roster.now
        self._is_first = not roster.handles
        self._started: list[Started] = []
        # The ranks that are shown as restarting, and those whose old processes have been ended.
        self._marked: Sequence[int] = ()
        self._ended: Sequence[int] = ()
        self._has_begun = False
        self._has_relaunched = False  # then ranks have been published as starting

    def run(self) -> tuple[int, ...]:
        """Do all steps, and return the ranks that were started.

        Whatever happens, the group is left usable, and nothing is kept that it does not need.
        """
        plan = self._plan
        try:
            if plan.closes:
                self._turns.begin_change()
                self._mark(plan.replace)
            with ExitStack() as undo:
                staged = self._switch(undo)
                undo.pop_all()
            self._crew.commit(staged)
            try:
                self._deliver_facts()
            finally:
                # Later than the facts: a worker without them refuses the calls of handles in the new epoch.
                self._crew.publish(wait=self._is_first)
            self._run_hooks()
            self._report()
        except BaseException as error:
            self._failure = error
            if isinstance(error, Exception):
                if self._roster.ending:
                    raise self._roster.ended_error() from error
                self._roster.connection.check()
            if (failure := self._note_failure(error)) is error:
                raise
            self._failure = failure
            raise failure from error
        finally:
            self._roster.mark_restarting(self._marked, running=False)
            self._turns.end_change(self._failure)
            if self._has_begun:
                self._end_leaving()
            elif self._has_relaunched and not self._roster.is_over:
                self._crew.publish(wait=False)
            self._crew.settle()
        return tuple(one.place.rank for one in self._started)

    def _mark(self, ranks: Sequence[int]) -> None:
        self._marked = ranks
        self._roster.mark_restarting(ranks)

    def _switch(self, undo: ExitStack) -> Any:
        """Do the steps until the epoch has begun; return what was staged for it."""
        plan, before, crew = self._plan, self._before, self._crew
        staged = crew.acquire(before, plan, undo, self._deadline)
        if plan.start:
            self._end_old([rank for rank in plan.start if rank in before.lost])
            self._relaunch(plan.start)
            self._started += crew.start(staged, plan.start, undo, self._deadline, self._change.check)
        if not self._is_first:
            self._turns.begin_change()
            self._quiesce()
            if plan.replace:
                crew.check_head()
            self._change.check()
        if plan.replace:
            # The old epoch cannot continue as it was from here, so the rest has its own time.
            self._deadline = Deadline.after(self._change.time_s)
            self._mark(plan.replace)
            self._ended = plan.replace
            self._end_old(plan.replace)
            self._relaunch(plan.replace)
            self._started += crew.start(staged, plan.replace, undo, self._deadline, self._change.check)
        self._roster.commit(
            epoch=0 if self._is_first else before.epoch + 1,
            sharding=plan.sharding,
            places=staged.places,
            facts=crew.facts(staged),
            started=self._started,
            resize=plan.resize,
        )
        self._has_begun = True
        return staged

    def _end_old(self, ranks: Sequence[int]) -> None:
        """End the old processes of ranks, or raise: their slots cannot be used again while they are there."""
        before = self._before
        if left := self._crew.end(ranks):
            raise WorkerFailureError(
                tuple(
                    before.lost.get(rank) or before.processes[rank].failure("start-failed", MAY_RUN) for rank in ranks
                ),
                f"Nothing was restarted, because processes of the old workers are still there: {'; '.join(left)}. "
                "They do not react to SIGKILL, or their node does not answer; look at them there. When they are gone, "
                "call `restart_failed_workers()` again, or create a new group on other nodes.",
            )

    def _relaunch(self, ranks: Sequence[int]) -> None:
        """Count the next incarnations of ranks that have had one."""
        again = [rank for rank in ranks if rank < len(self._before.members) and not self._is_first]
        self._has_relaunched |= bool(again)
        together = self._crew.policy.restarts_all
        self._roster.record_relaunch(again, counted=self._plan.counted, together=together)

    def _quiesce(self) -> None:
        """Wait until calls have ended."""
        plan = self._plan
        living = [self._before[rank] for rank in plan.quiet]
        late = self._transport.quiesce(living, self._deadline, self._change.check)
        if late and plan.follow:
            reason = (
                "It waited for calls that were made before. Make it again with a longer timeout, or cancel these calls:"
            )
            raise self._change.late_error(reason, late)
        busy = sorted(worker.rank for worker in late)
        if busy:
            logger.warning("Rank(s) %s are restarted while they are busy.", busy)

    def _deliver_facts(self) -> None:
        """Send the facts of the epoch to those who keep running; wait for them if all have to follow."""
        plan, before, now = self._plan, self._before, self._roster.now
        if self._is_first:
            return
        self._change.check()
        new, deadline = {one.place.rank for one in self._started}, self._deadline
        sent = {
            one.rank: self._transport.send_facts(
                one, now.facts[one.rank].since(before.facts[one.rank]), deadline, alone=plan.follow
            )
            for one in now.members
            if one.rank not in new and one.failure is None
        }
        what = f"{plan.what} of {self._roster.name_prefix}: facts"
        if plan.follow:
            self._check_followed(now, *self._transport.wait_for(sent, deadline, what, self._change.check))

    def _run_hooks(self) -> None:
        """Run the user's methods of a change on all workers at once."""
        plan, now, deadline = self._plan, self._roster.now, self._deadline
        if self._is_first:
            return
        new = {one.place.rank for one in self._started}
        calls: list[tuple[str, HookCall]] = []
        try:
            if restarted := [rank for rank in plan.on_restart if rank in new]:
                calls += [("Restart.method", one) for one in self._hooks.on_restart(restarted, deadline)]
            if plan.follow:
                everybody = [one.rank for one in now.members]
                calls += [("on_resize", one) for one in self._hooks.on_resize(everybody, deadline)]
        except WorkerFailureError as error:  # another thread has met the loss of a worker
            if plan.follow:
                raise BrokenEpochError(self._roster.mark_broken(error.failures), epoch=now.epoch) from error
            raise
        self._wait_for_hooks(calls, now)
        if plan.follow:
            self._roster.mark_repaired()

    def _wait_for_hooks(self, calls: Sequence[tuple[str, HookCall]], now: Snapshot) -> None:
        if not calls:
            return
        ends = {
            (at, rank): end
            for at, (_, call) in enumerate(calls)
            for rank, end in zip(call.called_workers or (), map(end_of, call.futures), strict=True)
        }
        deadline = self._deadline.sooner(Deadline.after(self._hooks.timeout_s))
        what = f"{self._plan.what} of {self._roster.name_prefix}: {', '.join(dict(calls))}"
        errors, late = self._transport.wait_for(ends, deadline, what, self._change.check)
        if self._plan.follow:
            named = {rank: f"{calls[at][0]} failed: " for at, rank in [*errors, *late]}
            failed = {rank: error for (_, rank), error in errors.items()}
            self._check_followed(now, failed, [rank for _, rank in late], named)
            return
        for at in dict.fromkeys(at for at, _ in [*errors, *late]):
            # It raises what has failed, or who is late.
            calls[at][1].result(None if any(one == at for one, _ in errors) else 0.0)

    def _check_followed(
        self,
        now: Snapshot,
        errors: Mapping[int, Exception],
        late: Sequence[int],
        named: Mapping[int, str] = MappingProxyType({}),  # what they did, for the report, by rank
    ) -> None:
        """Raise if workers have failed or are late in an epoch that needs all of them."""
        self._change.check()
        if not errors and not late:
            return
        failures = [self._transport.explain(now[rank], error, named.get(rank, "")) for rank, error in errors.items()]
        unfinished = "it had not finished when the resize had to end"
        failures += [
            now[rank].process.failure("resize-failed", named.get(rank, "") + unfinished)
            for rank in late
            if rank not in errors
        ]
        lost = self._roster.mark_broken(sorted(failures, key=lambda failure: failure.rank))
        raise BrokenEpochError(lost, epoch=now.epoch) from next(iter(errors.values()), None)

    def _note_failure(self, error: BaseException) -> BaseException:
        """Note the ranks that this change has ended and not started, and return the error to raise."""
        ended = self._ended
        if self._has_begun:
            if isinstance(error, BrokenEpochError):
                return error
            if self._plan.follow:  # not by a worker, so that it is unknown who has followed
                cause = f"the change was interrupted: {error!r}"
                now = self._roster.now
                lost = [process.failure("resize-failed", cause) for process in now.processes]
                return BrokenEpochError(self._roster.mark_broken(lost), epoch=now.epoch)
            self._crew.end(ended)
        elif not ended and self._plan.closes and not isinstance(error, HeadTimeoutError):
            # Lost ranks could not be started again.
            ended = [rank for rank in self._plan.replace if rank in self._before.lost]
        if not ended:
            return error
        cause, failed, text = str(error), -1, f"They could not be started again: {error}"
        if isinstance(error, WorkerStartError):
            cause, failed, text = error.reason, error.rank, str(error)
        processes = self._roster.now.processes
        failures = tuple(
            processes[rank].failure("start-failed" if failed in (rank, -1) else "killed", f"in a restart: {cause}")
            for rank in ended
        )
        is_report = isinstance(error, WorkerFailureError)
        self._roster.record_failed_restart(failures, override=not is_report)
        return error if is_report or not isinstance(error, Exception) else WorkerFailureError(failures, text)

    def _report(self) -> None:
        """Tell the log what has changed."""
        plan, roster = self._plan, self._roster
        if plan.resize is not None:
            logger.info("Resized %r %s.", roster.name_prefix, plan.resize)
        if self._ended:
            logger.warning("Restarted rank(s) %s of %r.", ", ".join(map(str, self._ended)), roster.name_prefix)

    def _end_leaving(self) -> None:
        """Let workers that leave finish their calls until the deadline, then end them."""
        leaving = [self._before[rank] for rank in self._plan.leave]
        if not leaving:
            return
        try:
            living = [one for one in leaving if one.failure is None]
            late = self._transport.drain(living, self._deadline, self._change.check)
            if late:
                logger.warning("Rank(s) %s were ended before they had finished.", ", ".join(map(str, late)))
        finally:
            self._crew.discard(self._plan.leave)

# SPDX-License-Identifier: Apache-2.0
"""The one owner of change: operations on a group run one after another, on one thread, through the same steps."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from fairlead_placement.extension import head_deadline

from .. import _world
from .._world import NEVER, Deadline, wait_for_event
from ..exceptions import WorkerFailure, WorkerGroupError
from .change import Change
from .operations import CLUSTER_GONE, Operation, RestartLost, RestartPolicy, Start
from .ports import Crew, Hooks, Transport, Turns
from .roster import Roster
from .steps import Steps

_NEVER_RESTART = RestartPolicy(on_failure=False, max_restarts=0, scope="worker")


class FixedMembership:
    """The turns of calls in a group whose members this process does not change."""

    def __init__(self, policy: RestartPolicy = _NEVER_RESTART, remedy: str = "") -> None:
        self.turns: Turns  # set by the calls of the group
        self.policy = policy
        self._remedy = remedy

    def restart_lost(self, deadline: Deadline) -> bool:
        """Restart lost workers for a call; return whether that was over by the deadline. It continues after that."""
        return False

    def begin_restart(self) -> None:
        """Begin to restart lost workers for a call that waits for that."""

    def runs_here(self) -> bool:
        """Return whether the calling thread is the one that changes the group."""
        return False

    def describe_wait(self) -> str:
        """Return why a call could not be sent in time, and what its caller can do."""
        return "Other calls of this process were being sent. Make the call again."

    def remedy(self, lost: Sequence[WorkerFailure]) -> str:
        """Return what a user can do about lost workers; an empty text for the default advice."""
        return self._remedy


class Membership(FixedMembership):
    """The only place that changes who is in a group."""

    def __init__(self, roster: Roster, crew: Crew[Any], transport: Transport, hooks: Hooks) -> None:
        super().__init__(crew.policy)
        self._roster = roster
        self._ports = crew, transport, hooks
        # It protects the queue: there is a thread while there is work, and only one.
        self._lock = _world.current.lock()
        self._queue: deque[Change] = deque()
        self._running: Change | None = None
        self._began = 0.0
        self._thread: int | None = None
        self._idle = _world.current.event()

    def change(self, operation: Operation, deadline: Deadline = NEVER) -> Change:
        """Run an operation, and wait until it is over."""
        change = self.begin(operation, deadline)
        if not change.wait(deadline):
            with self._lock:
                # If nothing is before it, its thread is about to take it, and will see the deadline.
                waits = change in self._queue and (self._running is not None or self._queue[0] is not change)
                if waits:
                    self._queue.remove(change)
            if waits:
                raise change.late_error(
                    "Another thread resizes the group or restarts workers. Make it again with a longer timeout."
                )
            change.wait()
        return change

    def begin(self, operation: Operation, deadline: Deadline = NEVER, *, is_shared: bool = False) -> Change:
        """Queue an operation, and return what it will become; with `is_shared` perhaps one that is on its way."""
        if self.runs_here():
            raise WorkerGroupError(
                f"{operation.name} cannot be requested by what the present change of the group waits for. Request it "
                "when that has ended."
            )
        try:
            with self._lock:
                if self._roster.ending:
                    raise self._roster.ended_error()
                under_way = [one for one in (self._running, *self._queue) if one is not None and one.is_shared]
                if is_shared and under_way:
                    change = under_way[0]
                else:
                    change = Change(operation, deadline, self._roster, is_shared=is_shared)
                    self._queue.append(change)
        finally:  # also after Ctrl-C: what is in the queue runs, and others may wait for it already
            if self._queue and self._thread is None:
                _world.current.spawn("fairlead-change", self._serve)
        return change

    def restart_lost(self, deadline: Deadline) -> bool:
        return self.begin(RestartLost(), is_shared=True).wait(deadline)

    def begin_restart(self) -> None:
        self.begin(RestartLost(), is_shared=True)

    def runs_here(self) -> bool:
        return self._thread == _world.current.thread()

    def describe_wait(self) -> str:
        running, ranks = self._running, self._roster.now.restarting
        if running is None:
            return "Other calls were being sent, or a restart was about to begin. Make the call again."
        what = f"restart of rank(s) {', '.join(map(str, ranks))}" if ranks else "restart or resize"
        return (
            f"A {what} has been under way for {_world.current.now() - self._began:.1f} s and goes on; it may take "
            f"start_s={self._ports[2].timeout_s:g} s. Make the call again, with a longer timeout."
        )

    def remedy(self, lost: Sequence[WorkerFailure]) -> str:
        if self._roster.ending:
            return "The group has been shut down. Create a new group."
        if any(failure.kind == "shut-down" for failure in lost):
            return CLUSTER_GONE
        return self.policy.remedy(self._roster.now, [failure.rank for failure in lost])

    def join(self, deadline: Deadline) -> bool:
        """Wait until no operation runs; return whether that was before the deadline."""
        with self._lock:
            if self._thread is None or self._thread == _world.current.thread():
                return True
            idle = self._idle
        return wait_for_event(idle, deadline)

    def _serve(self) -> None:
        """Run operations as long as there are any; the work of a thread."""
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
                self._began = _world.current.now()
            change.run(self._run)
            with self._lock:  # before those who wait may request the next one
                self._running = None
            change.finish()
            del change  # what it raised must not live until the next one

    def _run(self, change: Change) -> None:
        """Plan an operation, and carry the plan out."""
        change.check()
        if isinstance(change.operation, Start):
            self._carry_out(change)
            return
        goes_on, failure = True, None
        with head_deadline(change.deadline.left()):
            while goes_on:
                self._roster.check_alive()
                try:
                    goes_on = self._carry_out(change)
                except BaseException as error:
                    failure = error
                    raise
                finally:
                    # Calls of event loops that have waited may need a worker that is lost now.
                    if self.turns.end_change(failure):
                        self._queue.append(Change(RestartLost(), NEVER, self._roster, is_shared=True))

    def _carry_out(self, change: Change) -> bool:
        """Carry out the next plan of an operation; return whether there is another one after it."""
        plan = change.operation.plan(self._roster.now, self._ports[0])
        if plan is None:
            return False
        steps = Steps(plan, change, self._roster, self._ports, self.turns)
        change.ranks += steps.run()
        return plan.again

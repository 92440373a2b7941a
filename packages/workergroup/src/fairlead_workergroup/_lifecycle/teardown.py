# SPDX-License-Identifier: Apache-2.0
"""The end of a group, which several threads may ask for at once."""

import threading
from collections import deque

from .. import _world
from .._membership.machine import Membership
from .._observe.head import REQUEST_S
from .._world import Deadline, wait_for_event
from .launcher import Launcher
from .shutdown import wait_for_cleanup

# After Ctrl-C in a shutdown, the rest has this time.
INTERRUPTED_S = 10.0
# When the workers have ended, the change that is under way has nothing to wait for.
JOIN_S = 20.0


class Teardown:
    """End a group once, on a thread of its own, which goes on if a caller is interrupted."""

    def __init__(self, launcher: Launcher, membership: Membership) -> None:
        self._launcher = launcher
        self._resources = launcher.resources
        self._roster = launcher.resources.roster
        self._membership = membership
        self._turn = deque([True])  # of the one thread that ends the group
        # Set when no cleanup is waited for any more, and when everything has ended.
        self._is_forced = threading.Event()
        self._ended = _world.current.event()
        self._succeeded = False

    def run(self, cleanup_method: str | None, timeout: float | None, *, force: bool) -> bool:
        """End the group; see `RayWorkerGroup.shutdown`."""
        if self._ended.is_set():
            return self._succeeded
        deadline = Deadline.after(timeout)
        try:
            # No lock: a signal handler may call this while its thread holds any of them.
            self._roster.begin_end()
            if force:
                self._is_forced.set()
            self._begin(cleanup_method, deadline, force=force)
            if not wait_for_event(self._ended, deadline):  # its cleanup is over, or that of another thread takes longer
                self._is_forced.set()
            self._ended.wait()
        except BaseException:
            self._is_forced.set()
            self._begin(None, deadline, force=True)
            self._ended.wait(INTERRUPTED_S)
            raise
        return self._succeeded

    def _begin(self, cleanup_method: str | None, deadline: Deadline, *, force: bool) -> None:
        if self._turn:
            _world.current.spawn("fairlead-change", lambda: self._end(None if force else cleanup_method, deadline))

    def _end(self, cleanup_method: str | None, deadline: Deadline) -> None:
        try:
            self._turn.pop()
        except IndexError:
            return
        self._membership.turns.refuse_waiting()
        clean = False
        try:
            clean = self._clean_up(cleanup_method, deadline)
        finally:
            try:
                self._roster.end()
                self._membership.turns.refuse_waiting()
                self._launcher.release()
                self._resources.give_back()
                is_idle = self._membership.join(Deadline.after(JOIN_S))
                self._succeeded = clean and is_idle and self._resources.gave_all_back
            finally:
                self._ended.set()

    def _clean_up(self, cleanup_method: str | None, deadline: Deadline) -> bool:
        """Run the user's method on the living workers; return whether all went well."""
        if cleanup_method is None or not self._roster.handles or not self._roster.connected:
            return True
        # A change that is under way gives up at its next step. Until then it may end a worker under its cleanup.
        self._membership.join(deadline.sooner(Deadline.after(JOIN_S)))
        now = self._roster.now
        # The cleanup has half of the time if the head is silent.
        within_s = (deadline.left(REQUEST_S) or 0.0) / 2
        verdicts = self._roster.judge.ask(now.processes, look="head", within_s=within_s)
        living = {
            member.rank: member.handle
            for member in now.members
            if member.failure is None and not verdicts[member.process].is_lost
        }
        ranks = {one._fairlead_cleanup.remote(cleanup_method): rank for rank, one in living.items()}
        return wait_for_cleanup(ranks, cleanup_method, deadline, self._is_forced.is_set)

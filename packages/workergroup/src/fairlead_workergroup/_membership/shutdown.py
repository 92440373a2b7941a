# SPDX-License-Identifier: Apache-2.0
"""The end of a group, which several threads may ask for at once."""

import logging
import threading
from collections import deque

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import head_deadline

from .. import _world
from .._world import Deadline, wait_for_event
from .change import Changes
from .core import Core
from .delivery import wait_for
from .losses import look_at_head
from .provision import Provisioner

logger = logging.getLogger(__name__)

# When the workers have ended, the change that is under way has nothing to wait for.
JOIN_S = 20.0
# Ray's head says within this time which workers are dead, before the others run their cleanup.
HEAD_S = 10.0


class Shutdown:
    """End a group once, on the thread of the first caller; the others wait for that."""

    def __init__(self, core: Core, changes: Changes, provisioner: Provisioner) -> None:
        self._core = core
        self._changes = changes
        self._provisioner = provisioner
        self._turn = deque([True])  # of the one thread that ends the group
        self._thread: int | None = None
        # Set when no cleanup is waited for any more, and when everything has ended.
        self._is_forced = threading.Event()
        self._ended = _world.current.event()
        self._succeeded = False

    def run(self, cleanup_method: str | None, timeout: float | None, *, force: bool) -> bool:
        """End the group; see `RayWorkerGroup.shutdown`. It takes no lock that a signal handler's thread may hold."""
        until, me = Deadline.after(timeout), _world.current.thread()
        self._core.ending = True
        if force:
            self._is_forced.set()
        try:
            self._turn.pop()
        except IndexError:
            if self._thread != me:  # otherwise a signal handler came into the end of the group
                if not wait_for_event(self._ended, until):
                    self._is_forced.set()
                self._ended.wait()
            return self._succeeded
        self._thread, clean = me, False
        try:
            self._core.refuse_waiting()
            clean = cleanup_method is None or force or self._clean_up(cleanup_method, until)
        finally:
            try:
                self._end(until, clean=clean)
            finally:
                self._ended.set()
        return self._succeeded

    def _end(self, until: Deadline, *, clean: bool) -> None:
        is_idle = is_returned = False
        try:
            self._core.end()
            self._core.refuse_waiting()
            self._provisioner.release_arguments()
        finally:
            try:
                is_returned = self._provisioner.owned.close(until)
            except BaseException:  # Ctrl-C, perhaps before anything was taken out of the tables
                self._provisioner.owned.close(until)
                raise
            finally:
                is_idle = self._changes.join(Deadline.after(JOIN_S))
                self._succeeded = clean and is_idle and is_returned

    def _clean_up(self, cleanup_method: str, until: Deadline) -> bool:
        """Run the user's method on the living workers; return whether all went well."""
        core = self._core
        if not core.handles or not core.connected:
            return True
        # A change that is under way gives up at its next step. Until then it may end a worker under its cleanup.
        self._changes.join(until.sooner(Deadline.after(JOIN_S)))
        living = {member for member in core.now.members if member.lost is None}
        try:
            # The cleanup has half of the time if the head is silent.
            with head_deadline((until.left(at_most=2 * HEAD_S) or 0.0) / 2):
                living -= look_at_head(living).keys()
        except HeadTimeoutError:
            pass
        began = _world.current.now()
        how = {"method": cleanup_method, "silent": True}
        calls = {member.rank: member.handle._fairlead_call.remote(how) for member in living}
        errors, late = wait_for(calls, until, self._is_forced.is_set, patient=True)
        for rank, error in errors.items():
            logger.warning("The cleanup %r of rank %d failed: %s", cleanup_method, rank, error)
        if late:
            took = _world.current.now() - began
            logger.warning("The cleanup %r did not end within %.3g s on ranks %s.", cleanup_method, took, late)
        return not errors and not late

# SPDX-License-Identifier: Apache-2.0
"""The end of a group, which several threads may ask for at once."""

import contextlib
import threading
from collections.abc import Iterable

from fairlead_placement import HeadTimeoutError
from fairlead_placement.spi import head_deadline

from .._deadline import Deadline
from .._head import REQUEST_S
from .._observe.query import find_dead
from .._observe.watch import CLOSE_S, Watch
from .launcher import Launcher
from .shutdown import wait_for_cleanup

# The time that the shutdown of another thread may take once its workers are gone, when it has nothing to wait for.
CLEANED_S = 10.0
# A look of a watch that is under way has at least this time to end.
WATCHED_S = 2.0


class Teardown:
    """End a group once, its watches first."""

    def __init__(self, launcher: Launcher, watches: Iterable[Watch]) -> None:
        self._launcher = launcher
        self._resources = launcher.resources
        self._roster = launcher.resources.roster
        self._watches = watches
        # Held by the thread that runs the cleanup. It is reentrant because a signal handler may shut down meanwhile.
        self._cleaning = threading.RLock()
        self._succeeded: bool | None = None

    def run(self, cleanup_method: str | None, timeout: float | None, *, force: bool) -> bool:
        """End the group; see `RayWorkerGroup.shutdown`."""
        if self._succeeded is not None:
            return self._succeeded
        deadline = Deadline.after(timeout)
        # A restart of another thread sees it, and releases what it has started.
        self._roster.begin_end()
        for watch in list(self._watches):
            watch.close(max(WATCHED_S, deadline.left(at_most=CLOSE_S) or 0.0))
        limit = 0.0 if force else -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if self._cleaning.acquire(timeout=limit):
            try:
                if self._succeeded is None:
                    self._succeeded = self._clean_up_and_end(None if force else cleanup_method, deadline)
            finally:
                self._cleaning.release()
            return self._succeeded
        # Another thread is in its cleanup, which fails as soon as its workers are gone.
        self._end_workers()
        if self._cleaning.acquire(timeout=CLEANED_S):
            self._cleaning.release()
        return bool(self._succeeded)

    def _clean_up_and_end(self, cleanup_method: str | None, deadline: Deadline) -> bool:
        clean = True
        try:
            now = self._roster.snapshot()
            if cleanup_method is not None and self._roster.handles and self._roster.connected:
                dead = set(now.lost)
                # The cleanup has half of the time if the head is silent.
                with contextlib.suppress(HeadTimeoutError), head_deadline((deadline.left(REQUEST_S) or 0.0) / 2):
                    dead |= find_dead(now)
                living = {member.rank: member.handle for member in now.members if member.rank not in dead}
                with self._roster.direct(living):
                    ranks = {one._fairlead_cleanup.remote(cleanup_method): rank for rank, one in living.items()}
                clean = wait_for_cleanup(ranks, cleanup_method, deadline.left())
        finally:
            self._end_workers()
        return clean and self._resources.gave_all_back

    def _end_workers(self) -> None:
        self._roster.end()
        self._launcher.release()
        self._resources.give_back()
        self._resources.join_threads()

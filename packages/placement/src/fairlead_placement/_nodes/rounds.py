# SPDX-License-Identifier: Apache-2.0
"""Work that a process does at intervals: one thread, the monitor, knows when, and other threads do it."""

import atexit
import contextlib
import heapq
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable

from .background import OneTimeEvent, run_in_thread

logger = logging.getLogger(__name__)


class Rounds:
    """Do some work at intervals, one round at a time, as long as there is some.

    Args:
        every_s: the seconds between the end of a round and the next one.
        work: one round, during which Ray may be shut down. An error of it is logged.
        is_left: whether there is work for another round.
        first_s: the seconds before the first round; None for `every_s`.
        exit_s: how long the exit of the interpreter waits for a round, before Ray ends.

    Attributes:
        closed: whether no other round begins.
    """

    def __init__(
        self,
        every_s: float,
        work: Callable[[], object],
        is_left: Callable[[], bool],
        *,
        first_s: float | None = None,
        exit_s: float,
    ) -> None:
        self._every_s = every_s
        self._first_s = every_s if first_s is None else first_s
        self._exit_s = exit_s
        self.closed: bool = False
        self._work = work
        self._is_left = is_left
        self._thread = 0  # that is in a round
        self._over = OneTimeEvent()  # the end of the latest round
        self._over.set()

    def start(self) -> None:
        """Have the work done that has been added, unless that is under way already."""
        start_monitor()
        self.note()

    def note(self) -> None:
        """Do the same in a callback of the garbage collector, which must not start a thread: `start_monitor` does."""
        monitor = _monitors.get(os.getpid())
        if monitor is None or monitor.exiting or self.closed:
            return
        if monitor.active.setdefault(self, (mine := [self._exit_s])) is mine:
            monitor.inbox.put((self._first_s, self._run))

    def close(self, timeout_s: float = math.inf) -> bool:
        """Begin no more rounds, and wait for one that is under way on another thread; return whether it is over."""
        self.closed = True
        return self.is_here() or self._over.wait(min(timeout_s, threading.TIMEOUT_MAX))

    def is_here(self) -> bool:
        """Return whether this thread is in a round."""
        return self._thread == threading.get_ident()

    def _run(self) -> None:
        # Whoever closes this sees the new event, or this sees that it is closed.
        over = self._over = OneTimeEvent()
        self._thread = threading.get_ident()
        try:
            if not self.closed:
                self._work()
        except SystemExit:  # which Ray's waits raise when Ray is shut down
            pass
        except Exception:
            logger.exception("a round of %r failed", self._work)
        finally:
            self._thread = 0
            over.set()
        monitor = _monitors[os.getpid()]
        if not self.closed and self._is_left():
            monitor.inbox.put((self._every_s, self._run))
            return
        del monitor.active[self]
        if not self.closed and self._is_left():  # it has been added in the meantime
            self.note()


class _Monitor:
    """The thread that begins the rounds of this process.

    Attributes:
        inbox: rounds to begin, each with the seconds until then. Callbacks of the garbage collector put some in, which
            Python allows for this class of queue only.
        active: the rounds that are to begin or under way, each with the seconds that the exit waits for them.
        exiting: whether the interpreter is ending.
        thread: the thread itself.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self.active: dict[Rounds, list[float]] = {}
        self.exiting: bool = False
        self.thread = threading.Thread(target=self._serve, name="fairlead-monitor", daemon=True)

    def _serve(self) -> None:
        numbers = itertools.count()
        due: list[tuple[float, int, Callable[[], None]]] = []
        while True:
            left = max(0.0, due[0][0] - time.monotonic()) if due else None
            with contextlib.suppress(queue.Empty):
                seconds, run = self.inbox.get(timeout=left)
                heapq.heappush(due, (time.monotonic() + seconds, next(numbers), run))
                del run
            while due and due[0][0] <= time.monotonic():
                run_in_thread(heapq.heappop(due)[2])

    def stop(self) -> None:
        """Begin no more rounds, and wait a moment for those that are under way."""
        self.exiting = True
        for rounds in [*self.active]:
            rounds.closed = True
        began = time.monotonic()
        for rounds, (exit_s,) in [*self.active.items()]:
            rounds.close(max(0.0, began + exit_s - time.monotonic()))


def start_monitor() -> None:
    """Start the thread that begins the rounds of this process, unless it runs or the interpreter is ending."""
    here = os.getpid()
    monitor = _monitors.get(here) or _monitors.setdefault(here, _Monitor())
    if monitor.thread.ident is None:
        with contextlib.suppress(RuntimeError):  # another caller has started it
            monitor.thread.start()
            # After Ray's own hook, so that it runs before it.
            atexit.register(monitor.stop)


_monitors: dict[int, _Monitor] = {}  # by process: a fork has none at first

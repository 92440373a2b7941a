# SPDX-License-Identifier: Apache-2.0
"""Work that a process does at intervals on a background thread, as long as there is some."""

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from .background import OneTimeEvent, run_in_thread

logger = logging.getLogger(__name__)
# The rounds that are to begin or under way.
_active: dict["Rounds", object] = {}


class Rounds:
    """Do some work at intervals, one round at a time, as long as there is some.

    Args:
        every_s: the seconds before the first round, and between the end of a round and the next one.
        work: one round, during which Ray may be shut down. An error of it is logged.
        is_left: whether there is work for another round.
        exit_s: how long the exit of the interpreter waits for a round, before Ray ends.

    Attributes:
        closed: whether no other round begins.
        exit_s: as above.
    """

    def __init__(
        self,
        every_s: float,
        work: Callable[[], object],
        is_left: Callable[[], bool],
        *,
        exit_s: float,
    ) -> None:
        self._every_s = every_s
        self.exit_s = exit_s
        self.closed: bool = False
        self._work = work
        self._is_left = is_left
        self._thread = 0  # that is in a round
        self._over = OneTimeEvent()  # the end of the latest round
        self._over.set()
        self._closing = OneTimeEvent()

    def start(self) -> None:
        """Have the work done that has been added, unless that is under way already."""
        if not self.closed and _active.setdefault(self, mine := object()) is mine:
            run_in_thread(self._serve)

    def close(self, timeout_s: float = math.inf) -> bool:
        """Begin no more rounds, and wait for one that is under way on another thread; return whether it is over."""
        self.closed = True
        self._closing.set()
        return self._thread == threading.get_ident() or self._over.wait(min(timeout_s, threading.TIMEOUT_MAX))

    def _serve(self) -> None:
        while not self._closing.wait(self._every_s) and not self.closed:
            self._do_round()
            if not self._is_left():
                break
        del _active[self]
        if self._is_left():  # it has been added in the meantime
            self.start()

    def _do_round(self) -> None:
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


def _stop() -> None:
    """Begin no more rounds, and wait a moment for those that are under way."""
    began, active = time.monotonic(), [*_active]
    for rounds in active:
        rounds.closed = True
    for rounds in active:
        rounds.close(max(0.0, began + rounds.exit_s - time.monotonic()))


# After Ray's own hook, so that it runs before it. A fork has no thread that does the rounds of its parent.
atexit.register(_stop)
os.register_at_fork(after_in_child=_active.clear)

# SPDX-License-Identifier: Apache-2.0
"""Work that a process does at intervals on a thread of its own, as long as there is some."""

import atexit
import collections
import contextlib
import threading
from collections.abc import Callable

from .._ray_private import never_connect


class Rounds:
    """Do some work at intervals, on a thread that exists only while there is work.

    Args:
        name: the name of the thread.
        every_s: the seconds before the first round and between two of them.
        work: one round, during which Ray may be shut down. It must not raise an exception.
        is_left: whether there is work for another round.
        exit_s: how long the exit of the interpreter waits for a round, before Ray ends.
    """

    def __init__(
        self, name: str, every_s: float, work: Callable[[], None], is_left: Callable[[], bool], *, exit_s: float
    ) -> None:
        self._name = name
        self._every_s = every_s
        self._work = work
        self._is_left = is_left
        self._exit_s = exit_s
        # The place of the one thread, which takes it while it runs.
        self._place = collections.deque([True])
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    def start(self) -> None:
        """Have the work done that has been added, unless the thread runs already."""
        with contextlib.suppress(IndexError):
            self._place.pop()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Begin no more rounds, and wait for one that is under way."""
        self._end.set()
        if (thread := self._thread) is not None:
            thread.join(timeout=self._exit_s)

    def _run(self) -> None:
        never_connect()
        while not self._end.wait(self._every_s):
            with contextlib.suppress(SystemExit):  # which Ray's waits raise when Ray is shut down
                self._work()
            if not self._is_left():
                self._place.append(True)
                if self._is_left():  # it has been added while this thread still had the place
                    self.start()
                return

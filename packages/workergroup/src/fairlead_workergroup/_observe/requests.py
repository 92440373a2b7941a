# SPDX-License-Identifier: Apache-2.0
"""The latest calls that this process has made of a group, in memory that the agent of its node can read.

So the timeline of a job shows them also while this process is stopped.
"""

import contextlib
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from .._futures import task_of_future
from .._remote.process import make_memory_file
from .._remote.ring import KEPT, REQUEST, REQUESTS_FILE, TASK_BYTES, TASKS

NAME_BYTES = 64


class RequestLog:
    """Write the ring of the calls of one group, given by its id."""

    def __init__(self, group: str) -> None:
        size = struct.calcsize(REQUEST)
        file, page = make_memory_file(REQUESTS_FILE + group, KEPT * size)
        weakref.finalize(self, os.close, file)
        # The same memory three times. A write of one word takes less time than one of a whole entry.
        self._bytes = memoryview(page)
        self._words, self._times = self._bytes.cast("q"), self._bytes.cast("d")
        self._size = size // 8
        self._lock = threading.Lock()
        self._written = 0
        _logs[group] = self

    def begin(self, method: str, began: float, futures: Sequence[Any]) -> int:
        """Note a call made at a moment of `time.monotonic`; return its entry's number, 0 for a call without workers."""
        if not futures:
            return 0
        tasks = [task_of_future(future)[:TASK_BYTES] for future in futures[:TASKS]]
        return self._add(began, len(futures), method, b"".join(tasks))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note something that this process does with the group and that is no call, such as a transfer, in a block."""
        entry = self._add(time.monotonic(), 0, name)
        failed = True
        try:
            yield
            failed = False
        finally:
            self.end([entry], failed=failed)

    def mark(self, name: str) -> None:
        """Note something that has gone wrong, at this moment."""
        now = time.monotonic()
        self.end([self._add(now, 0, name)], failed=True, ended=now)

    def end(self, entries: Sequence[int], *, failed: bool = False, ended: float | None = None) -> None:
        """Note that the caller has the results of the call of these entries, or its error. The first note holds."""
        moment = time.monotonic() if ended is None else ended
        with self._lock:
            for number in entries:
                at = number % KEPT * self._size
                # A later entry may have taken its place.
                if number and self._words[at] == number and not self._times[at + 2]:
                    self._words[at + 3] = failed
                    self._times[at + 2] = moment

    def _add(self, began: float, workers: int, name: str, tasks: bytes = b"") -> int:
        """Write an entry that has no end yet, and return its number."""
        text = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0") + tasks
        with self._lock:
            self._written = number = self._written + 1
            at, last = number % KEPT * self._size, (number % KEPT + 1) * self._size - 1
            self._words[at] = number
            self._times[at + 1] = began
            self._times[at + 2] = 0.0
            self._words[at + 3] = False
            self._words[at + 4] = workers
            self._bytes[8 * (at + 5) : 8 * (at + 5) + len(text)] = text
            self._words[last] = number
        return number


_logs: weakref.WeakValueDictionary[str, "RequestLog"] = weakref.WeakValueDictionary()


def find_log(group: str) -> "RequestLog | None":
    """Return the log of a group that this process has made, by the id of the group."""
    return _logs.get(group)

# SPDX-License-Identifier: Apache-2.0
"""The latest calls of this process, in memory that the agent of its node can read even while it is stopped."""

import contextlib
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from .._remote.process import make_memory_file
from .._remote.ring import KEPT, REQUEST, REQUESTS_FILE, TASK_BYTES, TASKS
from .._transport.futures import task_of_future


class RequestLog:
    """Write the ring of the calls of one group, given by its id."""

    def __init__(self, group: str) -> None:
        self._layout = struct.Struct(REQUEST)
        file, self._page = make_memory_file(REQUESTS_FILE + group, KEPT * self._layout.size)
        weakref.finalize(self, os.close, file)
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
                at = number % KEPT * self._layout.size
                kept, _, ended_before = struct.unpack_from("=qdd", self._page, at)
                # A later entry may have taken its place.
                if number and kept == number and not ended_before:
                    struct.pack_into("=dq", self._page, at + struct.calcsize("=qd"), moment, failed)

    def _add(self, began: float, workers: int, name: str, tasks: bytes = b"") -> int:
        """Write an entry that has no end yet, and return its number."""
        with self._lock:
            self._written = number = self._written + 1
            at, text = number % KEPT * self._layout.size, name.encode()
            self._layout.pack_into(self._page, at, number, began, 0.0, False, workers, text, tasks, number)
        return number


_logs: weakref.WeakValueDictionary[str, "RequestLog"] = weakref.WeakValueDictionary()


def find_log(group: str) -> "RequestLog | None":
    """Return the log of a group that this process has made, by the id of the group."""
    return _logs.get(group)

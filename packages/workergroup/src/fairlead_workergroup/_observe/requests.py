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
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from .._futures import task_of_future
from .._remote.process import make_memory_file
from .._remote.ring import KEPT, REQUEST, REQUESTS_FILE, TASK_BYTES, TASKS

# The number in the ring, when it began, the number of workers, the name, the first tasks.
_Entry = tuple[int, float, int, bytes, bytes]


class RequestLog:
    """Write the ring of the calls of one group.

    Args:
        group: the id of the group.
    """

    def __init__(self, group: str) -> None:
        self._layout = struct.Struct(REQUEST)
        file, self._page = make_memory_file(REQUESTS_FILE + group, KEPT * self._layout.size)
        weakref.finalize(self, os.close, file)
        self._lock = threading.Lock()
        self._written = 0
        # The entries of calls that have not ended, by the first task of each.
        self._open: OrderedDict[bytes, _Entry] = OrderedDict()
        _logs[group] = self

    def begin(self, method: str, began: float, futures: Sequence[Any]) -> None:
        """Note a call that has been sent.

        Args:
            method: the name of the method.
            began: when the call was made, by `time.monotonic`.
            futures: the future of each worker.
        """
        if not futures:
            return
        tasks = [task_of_future(future)[:TASK_BYTES] for future in futures[:TASKS]]
        with self._lock:
            self._open[tasks[0]] = self._add(began, len(futures), method, b"".join(tasks))
            if len(self._open) > KEPT:
                self._open.popitem(last=False)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note something that this process does with the group and that is no call, such as a transfer, in a block."""
        with self._lock:
            entry = self._add(time.monotonic(), 0, name)
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._lock:
                self._write(entry, time.monotonic(), failed)

    def mark(self, name: str) -> None:
        """Note something that has gone wrong, at this moment."""
        now = time.monotonic()
        with self._lock:
            self._write(self._add(now, 0, name), now, failed=True)

    def end(self, futures: Sequence[Any], *, failed: bool = False) -> None:
        """Note that the caller has the results of a call, or its error; what was noted first holds."""
        with self._lock:
            # A repetition, which is an entry of its own, begins with the first worker that was lost.
            for future in futures:
                if not self._open:
                    break
                if (task := task_of_future(future)[:TASK_BYTES]) in self._open:
                    self._write(self._open.pop(task), time.monotonic(), failed)

    def _add(self, began: float, workers: int, name: str, tasks: bytes = b"") -> _Entry:
        """Write an entry that has no end yet, and return it."""
        self._written += 1
        entry = self._written, began, workers, name.encode()[:64], tasks
        self._write(entry)
        return entry

    def _write(self, entry: _Entry, ended: float = 0.0, failed: bool = False) -> None:
        """Write an entry, unless a later one has taken its place."""
        number, began, *values = entry
        if number > self._written - KEPT:
            at, version = number % KEPT * self._layout.size, 2 * number + bool(ended)
            self._layout.pack_into(self._page, at, version, began, ended, failed, *values, version)


_logs: weakref.WeakValueDictionary[str, "RequestLog"] = weakref.WeakValueDictionary()


def find_log(group: str) -> "RequestLog | None":
    """Return the log of a group that this process has made, by the id of the group."""
    return _logs.get(group)

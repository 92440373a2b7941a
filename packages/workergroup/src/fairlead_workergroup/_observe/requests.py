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

from .._futures import task_of_future, tasks_of_call
from .._remote.process import make_memory_file
from .._remote.ring import KEPT, REQUEST, REQUESTS_FILE, TASKS


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
        # By the first task of a call that has not ended: its number in the ring, and the values of its entry.
        self._open: OrderedDict[bytes, tuple[int, tuple[Any, ...]]] = OrderedDict()
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
        tasks = [task[:8] for task in tasks_of_call(futures[:TASKS])]
        values = (len(futures), method.encode()[:64], b"".join(tasks))
        with self._lock:
            self._written += 1
            self._open[tasks[0]] = (self._written, (began, *values))
            if len(self._open) > KEPT:
                self._open.popitem(last=False)
            self._write(self._written, began, 0.0, False, values)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note something that this process does with the group and that is no call, such as a transfer, in a block."""
        began = time.monotonic()
        values = (0, name.encode()[:64], b"")
        with self._lock:
            self._written += 1
            number = self._written
            self._write(number, began, 0.0, False, values)
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._lock:
                if number > self._written - KEPT:
                    self._write(number, began, time.monotonic(), failed, values)

    def mark(self, name: str) -> None:
        """Note something that has gone wrong, at this moment."""
        now = time.monotonic()
        with self._lock:
            self._written += 1
            self._write(self._written, now, now, True, (0, name.encode()[:64], b""))

    def end(self, futures: Sequence[Any], *, failed: bool = False) -> None:
        """Note that the caller has the results of a call, or its error; what was noted first holds."""
        with self._lock:
            # A repetition, which is an entry of its own, begins with the first worker that was lost.
            for future in futures:
                if not self._open:
                    break
                if (task := task_of_future(future)[:8]) in self._open:
                    number, (began, *values) = self._open.pop(task)
                    if number > self._written - KEPT:
                        self._write(number, began, time.monotonic(), failed, values)

    def _write(self, number: int, began: float, ended: float, failed: bool, values: Sequence[Any]) -> None:
        at, version = number % KEPT * self._layout.size, 2 * number + bool(ended)
        self._layout.pack_into(self._page, at, version, began, ended, failed, *values, version)


_logs: weakref.WeakValueDictionary[str, "RequestLog"] = weakref.WeakValueDictionary()


def find_log(group: str) -> "RequestLog | None":
    """Return the log of a group that this process has made, by the id of the group."""
    return _logs.get(group)

# SPDX-License-Identifier: Apache-2.0
"""The latest calls of this process, in memory that the agent of its node can read even while it is stopped."""

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fairlead_workergroup.spi import make_memory_file, task_of_future

from ._remote.ring import KEPT, REQUEST, REQUESTS_FILE, TASK_BYTES, TASKS
from ._timeline import Timeline
from ._trace import TraceSaver

# The parts of a request: its number, start and end; and, from its end on, the end and whether it failed.
BEGINNING, END, END_AT = struct.Struct("=qdd"), struct.Struct("=dq"), struct.calcsize("=qd")


class RequestLog(TraceSaver):
    """Write the ring of the calls of one group, given by its id, and save its timeline with errors."""

    def __init__(self, group: str, read: Callable[[], Timeline]) -> None:
        super().__init__(read)
        self._layout = struct.Struct(REQUEST)
        file, self._page = make_memory_file(REQUESTS_FILE + group, KEPT * self._layout.size)
        weakref.finalize(self, os.close, file)
        self._writing = threading.Lock()
        self._written = 0

    def begin(self, name: str, began: float, futures: Sequence[Any]) -> int:
        """Note a call made at a moment of `time.monotonic`, or another span without futures; return its number."""
        tasks = bytearray()
        for future in futures[:TASKS]:
            tasks += task_of_future(future)[:TASK_BYTES]
        with self._writing:
            self._written = number = self._written + 1
            at = number % KEPT * self._layout.size
            self._layout.pack_into(
                self._page, at, number, began, 0.0, False, len(futures), name.encode(), tasks, number
            )
        return number

    def mark(self, name: str) -> None:
        """Note something that has gone wrong, at this moment."""
        now = time.monotonic()
        self.end([self.begin(name, now, ())], failed=True, ended=now)

    def end(self, entries: Sequence[int], *, failed: bool = False, ended: float | None = None) -> None:
        """Note that the caller has the results of the call of these entries, or its error. The first note holds."""
        moment = time.monotonic() if ended is None else ended
        with self._writing:
            for number in entries:
                at = number % KEPT * self._layout.size
                kept, _, ended_before = BEGINNING.unpack_from(self._page, at)
                # A later entry may have taken its place.
                if number and kept == number and not ended_before:
                    END.pack_into(self._page, at + END_AT, moment, failed)

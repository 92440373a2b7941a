# SPDX-License-Identifier: Apache-2.0
"""The latest finished calls and reported steps of a worker, in an anonymous file that processes of its node can read.

Each entry has its sequence number at both ends, so a reader leaves out one that is being written.
"""

import itertools
import os
import struct
from collections.abc import Callable
from typing import Any

from fairlead_workergroup.spi import make_memory_file, open_memory_file

KEPT = 512
# Sequence, call number, method (an index), start, end, seconds spent waiting, whether it failed, task, version of the
# weights or -1, sequence again.
CALL = "<QQidddB8sqQ"
# Sequence, time, step, sequence again.
STEP = "<QdqQ"
# Words of 8 bytes: sequence, start, end (0: not yet), whether it failed, number of workers, method, the task of each,
# sequence again.
REQUEST = "=qddqq64s512sq"
# Of a task's id the first bytes, which tell the tasks of one worker apart.
TASK_BYTES, TASKS = 8, 64
CALLS_FILE = "fairlead-calls"
STEPS_FILE = "fairlead-steps"
REQUESTS_FILE = "fairlead-requests-"


def start_rings(on_call: list[Callable[..., None]], on_step: list[Callable[..., None]]) -> None:
    """Keep the calls and steps of this worker in rings from now on."""
    on_call.append(make_ring(CALLS_FILE, CALL))
    on_step.append(make_ring(STEPS_FILE, STEP))


def make_ring(file_name: str, form: str) -> Callable[..., None]:
    """Create a ring that lives as long as this process, and return the function that adds the values of an entry."""
    layout = struct.Struct(form)
    # The file stays open: readers find it among the open files of the process.
    _, page = make_memory_file(file_name, KEPT * layout.size)
    pack, size = layout.pack_into, layout.size
    next_number = itertools.count(1).__next__

    def add(*values: Any) -> None:
        number = next_number()
        pack(page, number % KEPT * size, number, *values, number)

    return add


def read_ring(pid: int, file_name: str, form: str) -> list[tuple[Any, ...]]:
    """Return the complete entries of a ring of a process of this machine, oldest first; none if it has no ring."""
    file = open_memory_file(pid, file_name)
    if file is None:
        return []
    try:
        content = os.pread(file, KEPT * struct.calcsize(form), 0)
    finally:
        os.close(file)
    entries = [entry for entry in struct.iter_unpack(form, content) if entry[0] and entry[0] == entry[-1]]
    return [entry[1:-1] for entry in sorted(entries)]

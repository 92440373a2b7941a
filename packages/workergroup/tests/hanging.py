# SPDX-License-Identifier: Apache-2.0
"""Workers that hang, are stopped or take memory, for the length of a block."""

import contextlib
import ctypes
import os
import select
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fairlead_workergroup import Call, RayWorkerGroup
from fairlead_workergroup.testing import resume, stop

Way = Literal["sleep", "native", "native-gil"]


@contextlib.contextmanager
def hanging(group: RayWorkerGroup, rank: int, how: Way = "sleep") -> Iterator[Call[Any]]:
    """Make a worker hang in a call of a function, and yield the call.

    Args:
        group: the group of the worker.
        rank: the worker's number in the group.
        how: "sleep" hangs in Python, "native" in a system call that does not return, "native-gil" in such a call that
            holds the GIL.
    """
    view = group.at(**group.sharding_annotations.get_worker_coords(rank))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "fifo")
        call = view.call(hang, how, folder)
        deadline = time.monotonic() + 60
        while not (folder / "begun").exists():
            assert time.monotonic() < deadline, f"rank {rank} does not begin to hang"
            time.sleep(0.01)
        try:
            yield call
        finally:
            # To open a pipe for reading waits until it is open for writing.
            write = os.open(folder / "fifo", os.O_RDWR)
            os.write(write, b".")
            call.outcomes(60)
            os.close(write)


def hang(worker: Any, how: Way, folder: Path) -> None:
    """Hang until `hanging` ends it."""
    (folder / "begun").touch()
    if how == "sleep":
        pipe = os.open(folder / "fifo", os.O_RDWR)
        select.select([pipe], [], [])  # its innermost frame is always this one
    else:
        library: Any = ctypes.PyDLL(None) if how == "native-gil" else ctypes.CDLL(None)
        pipe = library.open(bytes(folder / "fifo"), os.O_RDONLY)
    os.close(pipe)


@contextlib.contextmanager
def stopped(group: RayWorkerGroup, rank: int) -> Iterator[None]:
    """Stop the process of a worker."""
    stop(group, rank)
    try:
        yield
    finally:
        resume(group, rank)


def take_memory(worker: Any, size: int) -> None:
    """Hold this many bytes, with every page written, in place of the bytes held before."""
    worker.taken = None
    worker.taken = b"\x01" * size

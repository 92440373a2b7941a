# SPDX-License-Identifier: Apache-2.0
"""The file of a ledger beside the checkpoints, which a thread writes at most once a second."""

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._snapshot import Snapshot, write_snapshot
from .exceptions import SnapshotError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["SnapshotFile"]

INTERVAL_S = 1.0
SHARE = 0.05  # of the time of a processor that writing may take

logger = logging.getLogger(__name__)


class SnapshotFile:
    """Keep the state of a ledger in a file that is at most a second old.

    One process uses a file at a time: it locks a file of its own beside it, whose name ends in `.lock`. A crash costs
    the samples that finished since the file was written last: those of one second, or of 20 times the processor time
    that a snapshot takes if that is longer.

    Args:
        path: the file, in a folder that exists.

    Attributes:
        changed: whether the ledger has changed since the last snapshot; then the next turn writes one.
        taken: the number of the last snapshot that was begun.
        written: the number of the last snapshot that is in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed = self._closed = False
        self.taken = self.written = 0
        self._descriptor = self._lock()
        self._take: Callable[[], Snapshot] | None = None
        self._ledger_lock: Any = None
        self._turn, self._urgent = threading.Lock(), threading.Event()
        files.add(self)

    def _lock(self) -> int:
        path = self.path.with_name(f"{self.path.name}.lock")
        if fcntl is None:
            raise SnapshotError(str(self.path), "this system has no flock()", "Make the ledger without a file.")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            remedy = "Use a folder that exists and that this user may write."
            raise SnapshotError(str(path), f"it cannot be opened: {error.strerror}", remedy) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                holder = f"an unknown process ({error.strerror})"
            remedy = "Stop that process, or use another file."
            raise SnapshotError(str(self.path), f"it is in use by {holder}", remedy) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return descriptor

    def begin(self, take: Callable[[], Snapshot], ledger_lock: Any) -> None:
        """Write the first snapshot, and one after each change from now on.

        Args:
            take: returns a snapshot.
            ledger_lock: is held while it does.
        """
        self._take, self._ledger_lock = take, ledger_lock
        self.save()
        threading.Thread(target=self._run, name=f"writer of {self.path.name}", daemon=True).start()

    def hurry(self) -> None:
        """Write a snapshot in the background without waiting for the second to pass."""
        self.changed = True
        self._urgent.set()

    def save(self) -> None:
        """Write a snapshot, and return when it is on the disk.

        Raises:
            SnapshotError: The disk is full, for example. The next turn tries again.
        """
        with self._turn:
            if self._closed or self._take is None:
                remedy = "Use the ledger in the process that made it, and close it after its last use."
                raise SnapshotError(str(self.path), "it is closed in this process", remedy)
            with self._ledger_lock:
                self.changed = False
                snapshot, number = self._take(), self.taken + 1
                self.taken = number
            try:
                write_snapshot(self.path, snapshot)
            except BaseException:
                self.changed = True
                raise
            self.written = number

    def _run(self) -> None:
        rest = 0.0
        while not self._closed:
            time.sleep(rest)
            self._urgent.wait(max(0.0, INTERVAL_S - rest))
            self._urgent.clear()
            began = time.thread_time()
            try:
                if self.changed:
                    self.save()
            except SnapshotError as error:
                if not self._closed:
                    logger.warning("%s It is tried again.", error)
            rest = (time.thread_time() - began) / SHARE

    def close(self) -> None:
        """Write the last changes and unlock the file. It can be repeated, and does nothing in a forked process."""
        try:
            if self.changed and self._take is not None and not self._closed:
                self.save()
        finally:
            with self._turn:
                if not self._closed:
                    os.close(self._descriptor)
                self._closed = True
            self._urgent.set()


def _leave_to_parent() -> None:
    """Close the files in a forked process, so that their locks end with the process that made them."""
    for file in list(files):
        if not file._closed:  # noqa: SLF001  of this module
            os.close(file._descriptor)  # noqa: SLF001
            file._closed, file._turn = True, threading.Lock()  # noqa: SLF001


files: "weakref.WeakSet[SnapshotFile]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

# SPDX-License-Identifier: Apache-2.0
"""The file of a ledger beside the checkpoints, which a thread writes at most once a second."""

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..exceptions import SnapshotError
from .snapshot import Snapshot, write_snapshot

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
        taken: the number of the last snapshot that was begun.
        written: the number of the last snapshot that is in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = self.written = 0
        self._pid = os.getpid()
        self._descriptor = self._lock()
        self._take: Callable[[], Snapshot] | None = None
        self._ledger_lock: Any = None
        self._turn = threading.Lock()
        self._changed, self._urgent, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
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
        self._thread = threading.Thread(target=self._run, name=f"writer of {self.path.name}", daemon=True)
        self._thread.start()

    def note_change(self) -> None:
        """Write a snapshot at the next turn."""
        if not self._changed.is_set():
            self._changed.set()

    def hurry(self) -> None:
        """Write a snapshot in the background without waiting for the second to pass."""
        self._urgent.set()
        self._changed.set()

    def save(self) -> None:
        """Write a snapshot, and return when it is on the disk.

        Raises:
            SnapshotError: The disk is full, for example. The next turn tries again.
        """
        if self._pid != os.getpid():
            found = f"process {self._pid}, which has forked this one, uses it"
            raise SnapshotError(str(self.path), found, "Use the ledger in the process that made it.")
        if self._closing.is_set() or self._take is None:
            raise SnapshotError(str(self.path), "it is closed", "Close the ledger after its last use.")
        with self._turn:
            with self._ledger_lock:
                self._changed.clear()
                snapshot, number = self._take(), self.taken + 1
                self.taken = number
            try:
                write_snapshot(self.path, snapshot)
            except BaseException:
                self._changed.set()
                raise
            self.written = number

    def _run(self) -> None:
        rest = 0.0
        while True:
            self._changed.wait()
            self._closing.wait(rest)
            self._urgent.wait(max(0.0, INTERVAL_S - rest))
            self._urgent.clear()
            if self._closing.is_set():
                return
            began = time.thread_time()
            try:
                self.save()
            except SnapshotError as error:
                if not self._closing.is_set():
                    logger.warning("%s It is tried again.", error)
            rest = (time.thread_time() - began) / SHARE

    def close(self) -> None:
        """Write the last changes and unlock the file. It can be repeated, and does nothing in a forked process."""
        if self._closing.is_set() or self._pid != os.getpid():
            return
        try:
            if self._take is not None and self._changed.is_set():
                self.save()
        finally:
            self._closing.set()
            self.hurry()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(INTERVAL_S)
            os.close(self._descriptor)


def _leave_to_parent() -> None:
    """Close the locks in a forked process, so that they end with the process that made them."""
    for file in list(files):
        with contextlib.suppress(OSError):
            os.close(file._descriptor)  # noqa: SLF001  of this module


files: "weakref.WeakSet[SnapshotFile]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

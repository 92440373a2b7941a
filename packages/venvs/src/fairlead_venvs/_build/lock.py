# SPDX-License-Identifier: Apache-2.0
"""One process at a time: a kernel lock that ends with its owner, and how something is made once under it."""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..exceptions import VenvBuildError, VenvError, VenvTimeoutError
from .hosts import share, share_folder
from .publish import ABANDONED_S, BUILDING, leftover_name, leftovers, remove_leftovers
from .store import lock_path
from .uv import Deadline

TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
UNKNOWN = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# The time between two looks of a waiting process: in seconds at first, then as a share of the time it has waited, as
# all nodes of a cluster may wait on one shared folder; and the longest one, in seconds.
POLL_S, POLL_SHARE, POLL_AT_MOST_S = 0.02, 0.05, 1.0

Made = TypeVar("Made")


class KernelLock:
    """An exclusive lock on a file. The file is created for the lock and stays.

    The package filelock is not used: on a file system without kernel locks it raises, or takes a lock that outlives
    its owner, depending on the version that a node has.

    Args:
        path: the file. Its folder is created, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting.

        Returns:
            False if another process or thread holds it. On a file system without locks, always True.
        """
        share_folder(self._path.parent)
        file = self._open()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno not in UNKNOWN and error.errno not in TAKEN:
                raise
            return error.errno in UNKNOWN
        self._file = file
        return True

    def _open(self) -> int:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            try:
                return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:  # another user has created it
                return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        share(self._path)
        return file

    def release(self) -> None:
        """Release the lock. Can be repeated."""
        if self._file is not None:
            # Closing alone does not release a lock whose file a forked process still has open.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def hold_lock(place: Path, deadline: Deadline, done: Callable[[], bool], *, doing: str = "builds") -> Iterator[None]:
    """Hold the lock of a place, or continue without it as soon as another process has done the work.

    Raises:
        VenvTimeoutError: another process held the lock until the deadline.
    """
    lock = KernelLock(lock_path(place))
    began = time.monotonic()
    while not done() and not lock.acquire():
        if not deadline.left():
            raise VenvTimeoutError(f"waiting for another process that {doing} {place}", deadline.timeout_s)
        pause = min(max(POLL_S, POLL_SHARE * (time.monotonic() - began)), POLL_AT_MOST_S)
        time.sleep(min(pause, deadline.left()))
    try:
        yield
    finally:
        lock.release()


def make_once(
    root: Path,
    place: Path,
    find: Callable[[], Made | None],
    make: Callable[[Path], Made],
    deadline: Deadline,
    *,
    doing: str = "builds",
) -> Made:
    """Return the content of a place, and make it first if it is missing.

    The lock only saves work: on a file system without locks several processes may make the same, so `make` has to
    publish it in one step.

    Args:
        root: the folder of all environments.
        place: a file or folder in `root`, or in a folder of `root`.
        find: returns what is there, or None if it has to be made.
        make: is called with an unused name beside the place. A folder of this name is removed afterwards.
        deadline: for waiting.
        doing: a verb for the error of a process that waits.

    Raises:
        VenvTimeoutError: another process was still at it at the deadline.
        VenvBuildError: the file system refuses it.
    """
    if (ready := find()) is not None:
        return ready
    try:
        root.mkdir(parents=True, exist_ok=True)
        share_folder(place.parent)
        with hold_lock(place, deadline, lambda: find() is not None, doing=doing):
            if (ready := find()) is not None:
                return ready
            # Beside an environment are the folders of other environments, each swept by its own next build.
            remove_leftovers(leftovers(place.parent, place.name if place.parent == root else ""), ABANDONED_S)
            aside = leftover_name(place, BUILDING)
            try:
                return make(aside)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except VenvError:  # VenvTimeoutError is an OSError, too
        raise
    except OSError as error:
        raise VenvBuildError(
            f"{error}. The folder of all environments, {root} (FAIRLEAD_VENV_DIR), must be writable and have room."
        ) from None

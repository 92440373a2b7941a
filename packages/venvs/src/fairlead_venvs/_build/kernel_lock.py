# SPDX-License-Identifier: Apache-2.0
"""A lock that ends with its owner, however that ends.

Not filelock's: where a file system has no such locks that one raises, or takes one that outlives its owner, depending
on its version, which is each node's own.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from .store import share, share_folder

__all__ = ["KernelLock"]

TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
UNKNOWN = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class KernelLock:
    """An exclusive lock on a file, which is made for it and stays.

    Args:
        path: of the file; its folder is made, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self) -> bool:
        """Take it; False if somebody else has it, be it a thread. Where there are no locks it is had by everybody."""
        share_folder(self._path.parent)
        file = self._opened()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno not in UNKNOWN and error.errno not in TAKEN:
                raise
            return error.errno in UNKNOWN
        self._file = file
        return True

    def _opened(self) -> int:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            try:
                return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:  # another user has made it
                return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        share(self._path)
        return file

    def release(self) -> None:
        """Give it back; can be repeated."""
        if self._file is not None:
            # Closing alone gives back nothing that a process forked meanwhile still has open.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None

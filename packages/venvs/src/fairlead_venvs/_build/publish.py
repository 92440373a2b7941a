# SPDX-License-Identifier: Apache-2.0
"""How something is made once: under a lock that ends with its owner, beside its place, and published in one step."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..exceptions import VenvBuildError, VenvError, VenvTimeoutError
from .permissions import check_trusted, is_shared_by_group, make_folder, make_root, open_trusted, share
from .store import lock_path
from .users import TAKEN, UNKNOWN, locks_decide
from .uv import Deadline

BUILDING = ".building-"
TRASH = ".trash-"

# The age in seconds from which the folder of a build is removed where locks do not show whether its builder lives.
ABANDONED_S = 24 * 3600.0
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def leftover_name(folder: str | Path, kind: str) -> Path:
    """Return an unused name beside a folder."""
    return Path(f"{folder}{kind}{secrets.token_hex(8)}")


def publish(new: Path, folder: Path, keep: Callable[[], bool]) -> bool:
    """Put `new` in the place of `folder` in one step, or swap the two; return False if `keep` lets the latter stay."""
    for _ in range(100):  # other processes may put or take something away in between, but not for ever
        try:
            os.rename(new, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return True
        if keep():
            return False
        if _exchange(new, folder):
            return True
        # This file system cannot swap: for a moment there is nothing.
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, leftover_name(folder, TRASH))
    raise OSError(errno.EBUSY, "other processes keep putting something in its place", str(folder))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, and return whether the system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return int(rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)) == 0


def discard(old: Path, folder: Path) -> None:
    """Remove what was replaced. A process that runs from it continues, and finds later imports in the new folder."""
    # A shared file system would remove open files of other hosts, so a later sweep removes them.
    if not locks_decide(folder.parent):
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, leftover_name(folder, TRASH))
    elif old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def leftovers(root: Path, name: str = "") -> list[Path]:
    """Return the folders of builds and of replaced content, of all processes: of one name, or of all by default."""
    pattern = rf"{re.escape(name) or '.+'}({re.escape(BUILDING)}|{re.escape(TRASH)}).+"
    return [path for path in root.iterdir() if re.fullmatch(pattern, path.name)] if root.is_dir() else []


def remove_leftovers(root: Path, paths: list[Path], older_than_s: float) -> None:
    """Remove the leftovers that no process needs."""
    for path in paths:
        with contextlib.suppress(OSError, VenvBuildError):  # another process removes it, or it is another user's
            if not _is_needed(root, path, older_than_s):
                shutil.rmtree(path, ignore_errors=True)


def _is_needed(root: Path, path: Path, older_than_s: float) -> bool:
    """Return whether a builder may be at work in a leftover, or another host may still run from it."""
    building = TRASH not in path.name
    place = path.with_name(re.split(f"{re.escape(BUILDING)}|{re.escape(TRASH)}", path.name)[0])
    # A builder holds the lock of its place.
    locked = building and KernelLock(root, lock_path(place)).is_taken()
    if locked or locks_decide(root):
        return locked
    # Locks do not show who needs it, so its age decides.
    return time.time() - path.stat().st_mtime <= (max(older_than_s, ABANDONED_S) if building else older_than_s)


# The time between two looks of a waiting process: in seconds at first, then as a share of the time it has waited, as
# all nodes of a cluster may wait on one shared folder; and the longest one, in seconds.
POLL_S, POLL_SHARE, POLL_AT_MOST_S = 0.02, 0.05, 1.0

# Only in annotations that are texts: a type variable is pickled by reference.
Made = TypeVar("Made")


class KernelLock:
    """An exclusive lock on a file, which is created for the lock and stays. Without `create`, a missing file is free.

    The package filelock is not used: on a file system without kernel locks it raises, or takes a lock that outlives
    its owner, depending on the version that a node has.
    """

    def __init__(self, root: Path, path: Path, *, create: bool = True) -> None:
        self._root = root
        self._path = path
        self._create = create
        self._file: int | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting; return False if another process or thread holds it, where there are locks."""
        if self._create:
            make_folder(self._path.parent, self._root)
        try:
            file = self._open()
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno not in UNKNOWN and error.errno not in TAKEN:
                raise
            return error.errno in UNKNOWN
        self._file = file
        return True

    def is_taken(self) -> bool:
        """Return whether another process or thread holds the lock."""
        taken = not self.acquire()
        self.release()
        return taken

    def _open(self) -> int:
        if self._create:
            # Whoever can read the file can lock it.
            mode = 0o660 if is_shared_by_group(os.stat(self._root)) else 0o600
            with contextlib.suppress(FileExistsError):
                file = os.open(self._path, os.O_CLOEXEC | os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
                share(file, self._root)
                return file
        try:
            return open_trusted(self._root, self._path, os.O_RDWR)
        except OSError:  # another user has created it, or the file system is read only
            return open_trusted(self._root, self._path, os.O_RDONLY)

    def release(self) -> None:
        """Release the lock. Can be repeated."""
        if self._file is not None:
            # Closing alone does not release a lock whose file a forked process still has open.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def hold_lock(
    root: Path, place: Path, deadline: Deadline, done: Callable[[], bool], *, doing: str = "builds"
) -> Iterator[None]:
    """Hold the lock of a place, or continue without it as soon as another process has done the work."""
    lock = KernelLock(root, lock_path(place))
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
    find: "Callable[[], Made | None]",
    make: "Callable[[Path], Made]",
    deadline: Deadline,
    *,
    doing: str = "builds",
) -> "Made":
    """Return what `find` finds in a place; else what `make` makes in a new folder beside it, and publishes in one step.

    The lock only saves work: on a file system without locks several processes may make the same.
    """
    if (ready := find()) is not None:
        return ready
    try:
        make_root(root)
        make_folder(place.parent, root)
        check_trusted(root, place)
        # Beside an environment are the folders of other environments, each swept by its own next build.
        left = leftovers(place.parent, place.name if place.parent == root else "")
        remove_leftovers(root, left, ABANDONED_S)
        with hold_lock(root, place, deadline, lambda: find() is not None, doing=doing):
            if (ready := find()) is not None:
                return ready
            aside = leftover_name(place, BUILDING)
            aside.mkdir(0o700)
            try:
                return make(aside)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except VenvError:  # VenvTimeoutError is an OSError, too
        raise
    except OSError as error:
        raise VenvBuildError(
            f"{error}. The folder of all environments, {root} (FAIRLEAD_VENV_DIR), and the one for temporary files "
            "(TMPDIR) must be writable and have room."
        ) from None

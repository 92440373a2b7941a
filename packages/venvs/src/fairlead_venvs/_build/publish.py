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
from .store import lock_path
from .users import host_tag, is_alive, on_shared_file_system, share, share_folder
from .uv import Deadline

BUILDING = ".building-"
TRASH = ".trash-"

# The age in seconds from which leftovers of other hosts are removed: whether their builder lives cannot be seen.
ABANDONED_S = 24 * 3600.0
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def leftover_name(folder: str | Path, kind: str) -> Path:
    """Return an unused name beside a folder that says which process made it."""
    return Path(f"{folder}{kind}{host_tag()}-{os.getpid()}-{secrets.token_hex(4)}")


def publish(new: Path, folder: Path, keep: Callable[[], bool]) -> bool:
    """Put `new` in the place of `folder` in one step, or swap the two; a reader sees the one or the other.

    Args:
        new: a finished folder on the same file system. The caller discards what is left there afterwards.
        folder: its place.
        keep: returns whether something that is there already stays.

    Returns:
        Whether `new` took the place.
    """
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
    """Remove what was replaced. On a shared folder it stays aside for a later sweep.

    A process that runs from it continues: its open and mapped files stay, and it finds later imports in the new folder.
    Only a shared file system removes open files of other hosts.
    """
    if on_shared_file_system(old):
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, leftover_name(folder, TRASH))
    elif old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def leftovers(root: Path, name: str = "") -> list[Path]:
    """Return the folders of builds and of replaced content, of all processes: of one name, or of all by default."""
    pattern = rf"{re.escape(name) or '.+'}({re.escape(BUILDING)}|{re.escape(TRASH)}).+-\d+-[0-9a-f]+"
    return [path for path in root.iterdir() if re.fullmatch(pattern, path.name)] if root.is_dir() else []


def remove_leftovers(paths: list[Path], older_than_s: float) -> None:
    """Remove the leftovers that no process needs.

    A folder that a live process of this host builds in stays at any age. A folder of another host stays for a day at
    least, as its processes cannot be seen.

    Args:
        paths: folders that `leftovers` returned.
        older_than_s: age in seconds from which a folder without a known builder is removed.
    """
    for path in [path for path in paths if _is_abandoned(path, older_than_s)]:
        shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, older_than_s: float) -> bool:
    tag, pid = path.name.rsplit("-", 2)[:2]
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:  # another process removes it
        return False
    age = time.time() - changed
    ours = tag.endswith(host_tag()) and pid.isdigit()
    if TRASH not in path.name:
        return not is_alive(int(pid), changed) if ours else age > max(older_than_s, ABANDONED_S)
    if on_shared_file_system(path):
        return age > older_than_s
    return age > older_than_s or (ours and not is_alive(int(pid), changed))


TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
UNKNOWN = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# The time between two looks of a waiting process: in seconds at first, then as a share of the time it has waited, as
# all nodes of a cluster may wait on one shared folder; and the longest one, in seconds.
POLL_S, POLL_SHARE, POLL_AT_MOST_S = 0.02, 0.05, 1.0

# Only in annotations that are texts: a type variable is pickled by reference.
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
    find: "Callable[[], Made | None]",
    make: "Callable[[Path], Made]",
    deadline: Deadline,
    *,
    doing: str = "builds",
) -> "Made":
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

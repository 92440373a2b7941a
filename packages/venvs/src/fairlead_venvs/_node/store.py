# SPDX-License-Identifier: Apache-2.0
"""Environments on disk: one folder each, complete when its manifest says so, built under a lock, renamed into place."""

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..exceptions import VenvBuildError, VenvTimeoutError
from .uv import Deadline

logger = logging.getLogger("fairlead_venvs")
# The first folder without locks: one warning is enough.
warned: list[Path] = []

# Part of every fingerprint: environments of another format are other environments.
FORMAT = 4
FACTS = frozenset({"built_at", "description", "fingerprint", "python", "ray"})
MANIFEST = ".fairlead-complete.json"
USED = ".fairlead-used"
LOCKS = ".locks"
BUILDING, TRASH = ".building-", ".trash-"
# How long a mark of use is fresh, in seconds. A fresh mark is not written again.
USED_S = 60.0
# The age in seconds from which a leftover is removed where locks do not show whether its builder lives.
ABANDONED_S = 24 * 3600.0
# The errors of a file system that has no locks, or has them only for files that are opened for writing.
NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# Seconds between two attempts to take a lock: at first, and at most, as all nodes may wait on one shared folder.
POLL_S, POLL_AT_MOST_S = 0.02, 1.0
AT_FDCWD, RENAME_EXCHANGE = -100, 2
# Each process of an environment's Python runs this when it starts. The kernel releases the lock when the process ends.
HOLD = f'''\
"""Hold a shared lock on the environment while this process runs, so that nothing removes the environment."""

import fcntl
import os
import sys
import time


def hold(patience_s=1.0):
    try:
        file = os.open(os.path.join(sys.prefix, "{MANIFEST}"), os.O_RDONLY)
    except OSError:
        return
    end = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # `prune` has it for a moment
            if time.monotonic() >= end:
                return
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return


hold()
'''


def prepare_root(root: Path, *, shared: bool) -> None:
    """Create the folder of all environments if it is missing, and refuse one that other users may change."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(0o770 if shared else 0o700, parents=True)
    check_root(root, shared=shared)


def check_root(root: Path, *, shared: bool) -> None:
    """Refuse a folder of environments that another user owns or may write to. A missing one passes."""
    try:
        seen = os.stat(root)
    except OSError:
        return
    fault = ""
    if seen.st_uid not in (0, os.geteuid()) and not shared:
        fault = f"belongs to another user (uid {seen.st_uid})"
    elif seen.st_mode & (stat.S_IWOTH if shared else stat.S_IWGRP | stat.S_IWOTH):
        fault = f"can be changed by other users (mode {stat.S_IMODE(seen.st_mode):o})"
    if fault:
        raise VenvBuildError(
            f"{root} {fault}, so it is not used. Choose another folder (FAIRLEAD_VENV_DIR), or take the write "
            f"permission away (`chmod go-w {root}`). Members of one group who trust each other share a folder with "
            "FAIRLEAD_VENV_SHARED=1."
        )


def python_of(folder: str | Path) -> str:
    return os.path.join(folder, "bin", "python")


def read_manifest(folder: str | Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """Read the manifest of a complete environment; None if it is missing, damaged, or that of another one."""
    facts = read_facts(Path(folder, MANIFEST))
    if not facts.keys() >= FACTS or fingerprint not in (None, facts["fingerprint"]):
        return None
    # A link: it may point to a base interpreter that has been removed.
    return facts if os.path.exists(python_of(folder)) else None


def read_facts(path: Path) -> dict[str, Any]:
    """Read a file of facts; empty if there is none, or it is damaged or in another format."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # the last for endless brackets
        return {}
    return facts if isinstance(facts, dict) and facts.get("format") == FORMAT else {}


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**facts, "format": FORMAT}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def complete(env: Path, facts: Mapping[str, Any]) -> None:
    """Write the code that locks an environment and, as the last file, its manifest."""
    for packages in env.glob("lib/python*/site-packages"):
        (packages / "_fairlead_hold.py").write_text(HOLD, encoding="utf-8")
        (packages / "fairlead_hold.pth").write_text("import _fairlead_hold\n", encoding="utf-8")
    (env / USED).touch()
    write_facts(env / MANIFEST, facts)


def mark_used(path: Path) -> None:
    """Mark an environment or a note as used, at most once a minute. One that is read only gets no mark."""
    mark = path / USED
    with contextlib.suppress(OSError):
        if abs(time.time() - mark.stat().st_mtime) > USED_S:
            os.utime(mark)


class FileLock:
    """A lock of the kernel on a file: exclusive, never waited for, and released when its owner ends."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._path = path
        self._create = create
        self._file: int | None = None
        # Whether the file system refused to lock.
        self.refused = False

    def acquire(self) -> bool:
        """Take the lock; return False if another process holds it. A file system without locks counts as taken."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if not self._create:
                return True  # nothing can hold it
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:  # it is read only
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            self.refused = error.errno in NO_LOCKS
            if not self.refused and error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return self.refused
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock. Can be repeated."""
        if self._file is not None:
            # Closing alone does not release a lock whose file a forked process still has open.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


def lock_of(place: Path) -> FileLock:
    """Return the lock of a folder. Its file is not in the folder, which may be replaced."""
    locks = place.parent / LOCKS
    locks.mkdir(exist_ok=True)
    return FileLock(locks / f"{place.name}.lock")


@contextlib.contextmanager
def build_folder(place: Path, done: Callable[[], bool], deadline: Deadline) -> Iterator[Path | None]:
    """Hold the lock of a place and yield a new folder to build in; None as soon as another process has done the work.

    Where the file system refuses to lock, several processes may build the same; the first rename wins.
    """
    lock, pause = lock_of(place), POLL_S
    while not done() and not lock.acquire():
        if not deadline.left():
            raise VenvTimeoutError(f"waiting for another process that builds {place}", deadline.timeout_s)
        time.sleep(min(pause, deadline.left()))
        pause = min(pause * 1.2, POLL_AT_MOST_S)
    if lock.refused and not warned:
        warned.append(place.parent)
        logger.warning(
            "The file system of %s has no locks, so several processes may build one environment at the same time. "
            "Only the first one is used. Choose a folder on a local disk (FAIRLEAD_VENV_DIR).",
            place.parent,
        )
    aside = Path(f"{place}{BUILDING}{secrets.token_hex(8)}")
    try:
        if done():
            yield None
        else:
            remove_leftovers(place, is_locked=not lock.refused)
            aside.mkdir(0o700)
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        lock.release()


def remove_leftovers(place: Path, *, is_locked: bool) -> None:
    """Remove what killed builds of a place have left. Without its lock, their age decides."""
    for kind in (BUILDING, TRASH):
        for path in place.parent.glob(f"{place.name}{kind}*"):
            with contextlib.suppress(FileNotFoundError):
                if is_locked or time.time() - path.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)


def publish(new: Path, place: Path, keep: Callable[[], bool]) -> None:
    """Rename `new` to `place`, or swap the two in one step; `keep` lets what another process put there stay."""
    for _ in range(100):  # other processes may put or take something away in between, but not for ever
        try:
            os.rename(new, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return
        if keep() or _exchange(new, place):
            return
        # This file system cannot swap: for a moment there is nothing.
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, new.with_name(f"old-{secrets.token_hex(4)}"))
    raise OSError(errno.EBUSY, "other processes keep putting something in its place", str(place))


def _exchange(new: Path, place: Path) -> bool:
    """Swap two folders in one step, and return whether the system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return int(rename(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(place), RENAME_EXCHANGE)) == 0

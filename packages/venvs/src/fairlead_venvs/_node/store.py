# SPDX-License-Identifier: Apache-2.0
"""Environments on disk: one folder each, complete when its manifest says so, built under a lock, renamed into place."""

import contextlib
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

from ..exceptions import VenvBuildError, VenvError, VenvTimeoutError
from .uv import Deadline

logger = logging.getLogger("fairlead_venvs")
# The first folder without locks: one warning is enough.
warned: list[Path] = []

# Part of every fingerprint: environments of another format are other environments.
FORMAT = 5
# The last file of an environment that is written. Its time of change is that of the last use.
MANIFEST = ".fairlead-complete.json"
FACTS = frozenset({"built_at", "description", "fingerprint", "ray", "version"})
LOCKS = ".locks"
# A part of the names of folders in which something is built, or from which it is removed.
ASIDE = ".aside-"
# The age in seconds from which a leftover is removed where locks do not show whether its builder lives.
ABANDONED_S = 24 * 3600.0
# The errors of a file system that has no locks, or has them only for files that are opened for writing.
NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# Seconds between two attempts to take a lock: at first, and at most, as all nodes may wait on one shared folder.
POLL_S, POLL_AT_MOST_S = 0.02, 1.0
# Each process of an environment's Python runs this when it starts. The kernel releases the lock when the process ends.
HOLD = f'''\
"""Hold a shared lock on the environment while this process runs, so that nothing removes the environment."""

import fcntl
import os
import sys
import time

try:
    file = os.open(os.path.join(sys.prefix, "{MANIFEST}"), os.O_RDONLY)
    for _ in range(100):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # `prune` has it for a moment
            time.sleep(0.01)
except OSError:  # a file system without locks
    pass
'''


def check_root(root: Path, *, shared: bool) -> None:
    """Refuse a folder of environments that another user owns or may write to. A missing one passes."""
    try:
        seen = os.stat(root)
    except OSError:
        return
    is_ours = shared or seen.st_uid in (0, os.geteuid())
    if not is_ours or seen.st_mode & (stat.S_IWOTH if shared else stat.S_IWGRP | stat.S_IWOTH):
        raise VenvBuildError(
            f"{root} is not used, because other users can change it: it belongs to the uid {seen.st_uid} and has the "
            f"mode {stat.S_IMODE(seen.st_mode):o}. Choose another folder (FAIRLEAD_VENV_DIR), or take the write "
            f"permission away (`chmod go-w {root}`). Members of one group who trust each other share a folder with "
            "FAIRLEAD_VENV_SHARED=1."
        )


def read_manifest(folder: str | Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """Read the manifest of a complete environment; None if it is missing, damaged, or that of another one."""
    facts = read_facts(folder)
    if not facts.keys() >= FACTS or fingerprint not in (None, facts["fingerprint"]):
        return None
    # A link: it may point to a base interpreter that has been removed.
    return facts if os.path.exists(f"{folder}/bin/python") else None


def read_facts(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a folder; empty if there is none, or it is damaged or in another format."""
    try:
        facts = json.loads(Path(folder, MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):  # the last for endless brackets
        return {}
    return facts if isinstance(facts, dict) and facts.get("format") == FORMAT else {}


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    text = json.dumps({**facts, "format": FORMAT}, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def mark_used(folder: str | Path) -> None:
    """Mark an environment or a note as used. One that is read only gets no mark."""
    with contextlib.suppress(OSError):
        os.utime(Path(folder, MANIFEST))


@contextlib.contextmanager
def try_lock(path: Path, flags: int = 0) -> Iterator[bool | None]:
    """Lock a file for the context, exclusively; the kernel releases it when this process ends.

    Yields True, False if another process has the lock, and None if the file system has no locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
    taken: bool | None = True
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = None if error.errno in NO_LOCKS else False
            if taken is False and not isinstance(error, BlockingIOError):
                raise
        yield taken
    finally:
        if taken:
            # Closing alone does not release a lock whose file a forked process still has open.
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def lock_place(place: Path) -> contextlib.AbstractContextManager[bool | None]:
    """Lock a folder as `try_lock` locks a file. The file is not in the folder, which may be replaced."""
    locks = place.parent / LOCKS
    locks.mkdir(exist_ok=True)
    return try_lock(locks / f"{place.name}.lock", os.O_CREAT)


def name_aside(place: Path) -> Path:
    """Return a new name beside a folder. `sweep` removes what has such a name and no living owner."""
    return Path(f"{place}{ASIDE}{secrets.token_hex(8)}")


@contextlib.contextmanager
def build_folder(place: Path, done: Callable[[], bool], deadline: Deadline, *, shared: bool) -> Iterator[Path | None]:
    """Hold the lock of a place and yield a new folder to build in; None as soon as another process has done the work.

    An OSError becomes a VenvBuildError that says which folders have to be writable.
    """
    root, aside, pause = place.parent, name_aside(place), POLL_S
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(0o770 if shared else 0o700, parents=True)
        check_root(root, shared=shared)
        sweep(root)
        while True:
            with lock_place(place) as taken:
                if done():
                    yield None
                    return
                if taken is None and not warned:
                    warned.append(root)
                    logger.warning(
                        "The file system of %s has no locks, so several processes may build one environment at the "
                        "same time. Only the first one is used. Choose a folder on a local disk (FAIRLEAD_VENV_DIR).",
                        root,
                    )
                if taken is not False:
                    try:
                        aside.mkdir(0o700)
                        yield aside
                    finally:
                        shutil.rmtree(aside, ignore_errors=True)
                    return
            if not deadline.left():
                raise VenvTimeoutError(f"waiting for another process that builds {place}", deadline.timeout_s)
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.2, POLL_AT_MOST_S)
    except VenvError:  # VenvTimeoutError is an OSError, too
        raise
    except OSError as error:
        raise VenvBuildError(
            f"{error}. The folder of all environments, {root} (FAIRLEAD_VENV_DIR), and the one for temporary files "
            "(TMPDIR) must be writable and have room."
        ) from None


def sweep(root: Path) -> None:
    """Remove what killed builds and removals have left. Where there are no locks, its age decides."""
    for path in root.glob(f"*{ASIDE}*"):
        place = path.with_name(path.name.partition(ASIDE)[0])
        with contextlib.suppress(OSError), lock_place(place) as taken:
            if taken or (taken is None and time.time() - path.stat().st_mtime > ABANDONED_S):
                shutil.rmtree(path, ignore_errors=True)


def publish(new: Path, place: Path, keep: Callable[[], bool]) -> None:
    """Rename `new` to `place`; `keep` lets what is there stay, else it is renamed away."""
    try:
        os.rename(new, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not keep():
            with contextlib.suppress(FileNotFoundError):  # without locks, another process may do the same
                os.rename(place, new.with_name(f"old-{secrets.token_hex(4)}"))
            os.rename(new, place)

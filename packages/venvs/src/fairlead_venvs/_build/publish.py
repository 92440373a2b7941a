# SPDX-License-Identifier: Apache-2.0
"""How a finished folder takes its place, and what happens to folders that never did or were replaced."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from .hosts import host_tag, on_shared_file_system
from .processes import is_alive

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

# SPDX-License-Identifier: Apache-2.0
"""How a finished folder takes its place, and what is left of those that never did or have been replaced."""

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

from .sharing import on_shared_file_system
from .store import BUILDING, TRASH, host_tag

__all__ = ["discard", "leftover_name", "leftovers", "publish", "remove_leftovers", "sweep"]

# Leftovers of hosts that cannot be asked whether their builder lives are removed when this old.
ABANDONED_S = 24 * 3600.0
# The kernel tells the time of its start in whole seconds.
CLOCK_S = 2.0
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def leftover_name(folder: str | Path, kind: str) -> Path:
    """A name beside the folder that says who made it."""
    return Path(f"{folder}{kind}{host_tag()}-{os.getpid()}-{secrets.token_hex(4)}")


def publish(new: Path, folder: Path, keep: Callable[[], bool]) -> bool:
    """Put `new` in the place of `folder` in one step, or swap the two; whoever looks sees the one or the other.

    Args:
        new: a finished folder on the same file system. What is left there afterwards is to be discarded.
        folder: its place.
        keep: asked when something stands there already: whether that is to stay.

    Returns:
        Whether `new` took the place.
    """
    for _ in range(100):  # somebody else may put or take something away in between, but not for ever
        try:
            os.rename(new, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return True
        if keep():
            return False
        if _exchanged(new, folder):
            return True
        # This file system cannot swap: for a moment there is nothing.
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, leftover_name(folder, TRASH))
    raise OSError(errno.EBUSY, "others keep putting something in its place", str(folder))


def _exchanged(one: Path, other: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return int(rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)) == 0


def discard(old: Path, folder: Path) -> None:
    """Remove what has been replaced. On a shared folder it waits beside, for a later sweep.

    What runs from it goes on: the files it has open or mapped stay with it, and what it imports later it finds in
    what took the place. Only a shared file system takes open files away from other hosts.
    """
    if on_shared_file_system(old):
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, leftover_name(folder, TRASH))
    elif old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what crashed builds of this environment left, and replaced ones that waited long enough."""
    remove_leftovers(leftovers(folder.parent, folder.name), older_than_s=ABANDONED_S)


def leftovers(root: Path, name: str = "") -> list[Path]:
    """What is no environment, or none any more, whoever made it; of one environment or of all."""
    pattern = rf"{re.escape(name) or '.+'}({re.escape(BUILDING)}|{re.escape(TRASH)}).+-\d+-[0-9a-f]+"
    return [path for path in root.iterdir() if re.fullmatch(pattern, path.name)] if root.is_dir() else []


def remove_leftovers(paths: list[Path], *, older_than_s: float) -> list[Path]:
    """Remove the leftovers that nobody needs any more, and return those that are gone.

    A folder that a live process of this host builds in stays, however old it is. Whether a process of another host
    lives cannot be seen, so its folder stays for a day at least.

    Args:
        paths: folders that `leftovers` returned.
        older_than_s: age in seconds from which a folder without a known builder is removed.
    """
    gone = [path for path in paths if _is_abandoned(path, older_than_s)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in gone if not path.exists()]


def _is_abandoned(path: Path, older_than_s: float) -> bool:
    tag, pid = path.name.rsplit("-", 2)[:2]
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return False  # somebody else removes it
    age = time.time() - changed
    ours = tag.endswith(host_tag()) and pid.isdigit()
    if TRASH not in path.name:
        return not _lives(int(pid), changed) if ours else age > max(older_than_s, ABANDONED_S)
    if on_shared_file_system(path):
        return age > older_than_s
    return age > older_than_s or (ours and not _lives(int(pid), changed))


def _lives(pid: int, since: float) -> bool:
    """Whether the process of this id lives, and lived at a time, in seconds since the epoch."""
    # Not by /proc alone, which may hide the processes of others.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return _started(pid) <= since + CLOCK_S


def _started(pid: int) -> float:
    """When a process started, in seconds since the epoch; 0 if that cannot be read."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
        (boot,) = re.findall(rb"^btime (\d+)$", Path("/proc/stat").read_bytes(), flags=re.MULTILINE)
    except (OSError, IndexError, ValueError):
        return 0.0
    return int(boot) + int(ticks) / os.sysconf("SC_CLK_TCK")

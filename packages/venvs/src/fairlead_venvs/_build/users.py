# SPDX-License-Identifier: Apache-2.0
"""Who uses a folder of environments: the hosts, their marks of use, and the processes of this host."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..exceptions import VenvBuildError
from .permissions import make_folder, share

# A folder with one file for each host, whose time is that of its last use.
USED = ".fairlead-used"
# How long a mark of use is fresh, in seconds. A fresh mark is not written again.
USED_S = 60.0
PID_NAMESPACE = "/proc/self/ns/pid"
# The inode of the machine's own namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h).
FIRST_PID_NAMESPACE = "pid:[4026531836]"
# The errors of a lock that somebody else holds, and those of a file system without locks (or with locks only for files
# that are opened for writing).
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
UNKNOWN = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
SHARED_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "9p", "fuse", "smb", "cifs", "virtiofs", "weka")


def host_id() -> str:
    """Return an id of this host that outlives a reboot. Two containers of one name have different ids."""
    known, namespace = _read_system("/etc/machine-id"), _read_system(PID_NAMESPACE)
    if not known or namespace != FIRST_PID_NAMESPACE:
        # A container has the id of its machine or of its image, or none, so its namespace of processes counts as well.
        known = _read_system("/proc/sys/kernel/random/boot_id") + namespace
    name = socket.gethostname()
    fit = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "host"
    return f"{fit}_{hashlib.sha256((name + known).encode()).hexdigest()[:6]}"


def _read_system(path: str) -> str:
    """Return the content of a system file or link; empty if there is none, or if it is another user's."""
    try:
        return os.readlink(path) if path == PID_NAMESPACE else Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def read_variables() -> Mapping[str, str]:
    """Return the variables that this process was started with, before Ray set others for a task (on Linux)."""
    entries = [entry.partition("=") for entry in _read_system("/proc/self/environ").split("\0") if "=" in entry]
    return {name: value for name, _, value in entries} or os.environ


def mark_used(folder: str | Path) -> None:
    """Mark an environment as used by this host, at most once a minute. A folder that is read only gets no mark."""
    mark, root = Path(folder, USED, host_id()), Path(folder).parent
    with contextlib.suppress(OSError, VenvBuildError):
        if not touch(mark):
            make_folder(mark.parent, root)
            mark.touch(0o644)
            share(mark, root)


def touch(path: str | Path) -> bool:
    """Set the time of a file to now, at most once a minute, unless it is read only; return whether the file exists."""
    with contextlib.suppress(OSError):
        # The time is that of the file server, whose clock may be ahead of this one.
        if abs(time.time() - os.stat(path).st_mtime) > USED_S:
            os.utime(path)
    return os.path.exists(path)


def read_marks(folder: str | Path) -> Mapping[str, float]:
    """Return the time of the last use of an environment by each host."""
    try:
        return {entry.name: entry.stat().st_mtime for entry in os.scandir(os.path.join(folder, USED))}
    except OSError:  # another process removes it, or it was never marked
        return {}


def locks_decide(root: str | Path) -> bool:
    """Return whether a lock in a folder shows every process that holds it; a shared file system may show one host's."""
    if on_shared_file_system(root):
        return False
    try:
        file = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it is not there
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in UNKNOWN
    finally:
        os.close(file)
    return True


def on_shared_file_system(path: str | Path) -> bool:
    """Return whether a path is on a network file system, by the table of mounts; False where there is no such table."""
    mounts = [line.split() for line in _read_system("/proc/self/mounts").splitlines()]
    real = os.path.realpath(path).replace(" ", "\\040")  # as the table spells it
    under = [(point, kind) for _, point, kind, *_ in mounts if os.path.commonpath([real, point]) == point]
    # The last one of a place hides the others, such as that of an automounter.
    _, kind = max(reversed(under), key=lambda one: len(one[0]), default=("", ""))
    return kind.startswith(SHARED_FILE_SYSTEMS)


PROC = "/proc"


def can_see_processes() -> bool:
    """Return whether this system shows which files a process uses."""
    return os.path.exists(f"{PROC}/self/maps")


def find_users(folders: Iterable[str | Path]) -> Mapping[str, tuple[int, ...]]:
    """Find the live processes that use each folder, in one pass over all processes."""
    # A variable may name a folder through links; a map never does.
    names = {os.path.realpath(folder): {os.path.realpath(folder), str(folder)} for folder in folders}
    users: dict[str, list[int]] = {real: [] for real in names}
    for pid in sorted(int(name) for name in os.listdir(PROC) if name.isdigit()) if can_see_processes() else ():
        texts = [_read_system(f"{PROC}/{pid}/{file}") for file in ("maps", "cmdline", "environ")]
        for real, spelled in names.items():
            if any(name in text for text in texts for name in spelled) and _uses(spelled, texts):
                users[real].append(pid)
    return {real: tuple(pids) for real, pids in users.items()}


def _uses(spelled: Iterable[str], texts: Iterable[str]) -> bool:
    maps, command, environ = texts
    paths = {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    # An interpreter is a link, so its map names the base interpreter. Ray workers rewrite their command line.
    paths.add(command.partition("\0")[0])
    paths |= {entry.partition("=")[2] for entry in environ.split("\0") if entry.startswith("VIRTUAL_ENV=")}
    return any(path == name or path.startswith(name + os.sep) for path in paths for name in spelled)

# SPDX-License-Identifier: Apache-2.0
"""Who uses a folder of environments: the hosts, their marks of use and permissions, and the processes of this host."""

import contextlib
import hashlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

# A folder with one file for each host, whose time is that of its last use.
USED = ".fairlead-used"
# How long a mark of use is fresh, in seconds. A fresh mark is not written again.
USED_S = 60.0
PID_NAMESPACE = "/proc/self/ns/pid"
# The inode of the machine's own namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h).
FIRST_PID_NAMESPACE = "pid:[4026531836]"
SHARED_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "9p", "fuse", "smb", "cifs", "virtiofs", "weka")

# Whether a folder is on a shared file system, by host, process and folder.
_file_systems: dict[tuple[str, int, str], bool] = {}


def host_tag() -> str:
    """Return an id of this host until it reboots: equal only for processes that see each other."""
    return _tag(_read_system("/proc/sys/kernel/random/boot_id"), _read_system(PID_NAMESPACE))


def host_id() -> str:
    """Return an id of this host that outlives a reboot. Two containers of one name have different ids.

    A container has the id of its machine or of its image, or none, so its namespace of processes counts as well.
    """
    machine, namespace = _read_system("/etc/machine-id"), _read_system(PID_NAMESPACE)
    if machine and namespace == FIRST_PID_NAMESPACE:
        return _tag(machine)
    return host_tag()


def _tag(*known: str) -> str:
    name = socket.gethostname()
    fit = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "host"
    return f"{fit}_{hashlib.sha256(''.join((name, *known)).encode()).hexdigest()[:6]}"


def _read_system(path: str) -> str:
    """Return the content of a system file or link.

    Returns:
        Empty if there is none, as outside Linux, or if it is about a process that has ended or is another user's.
    """
    try:
        return os.readlink(path) if path == PID_NAMESPACE else Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def read_variables() -> Mapping[str, str]:
    """Return the variables that this process was started with.

    Later, Ray sets others for a task, such as OMP_NUM_THREADS=1 if it needs no CPU. Outside Linux they are included.
    """
    entries = [entry.partition("=") for entry in _read_system("/proc/self/environ").split("\0") if "=" in entry]
    return {name: value for name, _, value in entries} or os.environ


def mark_used(folder: str | Path) -> None:
    """Mark an environment as used by this host, at most once a minute. A folder that is read only gets no mark."""
    mark = Path(folder, USED, host_id())
    with contextlib.suppress(OSError):
        if not touch(mark):
            share_folder(mark.parent)
            mark.touch()
            share(mark)


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


def share_folder(folder: Path) -> None:
    """Create a folder with the write permissions of the folder above it, unless it exists."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    share(folder)


def share(path: str | Path) -> None:
    """Give a file or folder of this user the write permissions of the folder above it.

    The umask of most users keeps a common group from writing. The folder of all environments decides who may write.
    """
    given = os.stat(os.path.dirname(path)).st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISGID)
    made = os.stat(path)
    if not stat.S_ISDIR(made.st_mode):
        given &= ~stat.S_ISGID
    if given & ~made.st_mode:
        os.chmod(path, stat.S_IMODE(made.st_mode) | given)


def is_shared(folder: str | Path) -> bool:
    """Return whether another host uses an environment, or could by its file system.

    The file system is looked up once in a process, because the look-up takes longer than finding an environment.
    """
    root = os.path.dirname(folder)
    # Not by functools: its caches are pickled by reference, and a node need not have this package. The keys name the
    # process, because the entries of the driver are sent to the nodes with this module.
    key = (socket.gethostname(), os.getpid(), root)
    if key not in _file_systems:
        _file_systems[key] = on_shared_file_system(root)
    return _file_systems[key] or not read_marks(folder).keys() <= {host_id()}


def on_shared_file_system(path: str | Path) -> bool:
    """Return whether a path is on a network file system, by the table of mounts; False where there is no such table."""
    mounts = [line.split() for line in _read_system("/proc/self/mounts").splitlines()]
    real = os.path.realpath(path)
    under = [(point, kind) for _, point, kind, *_ in mounts if os.path.commonpath([real, point]) == point]
    _, kind = max(under, key=lambda one: len(one[0]), default=("", ""))
    return kind.startswith(SHARED_FILE_SYSTEMS)


PROC = "/proc"
# The kernel reports the time of its start in whole seconds.
CLOCK_S = 2.0


def can_see_processes() -> bool:
    """Return whether this system shows which files a process uses."""
    return os.path.exists(f"{PROC}/self/maps")


def find_users(folders: Iterable[str | Path]) -> Mapping[str, tuple[int, ...]]:
    """Find the live processes that use each folder, in one pass over all processes.

    A process uses a folder if it maps a file below it, or was started as its interpreter (a link, so the mapped file is
    the base interpreter), or has it as VIRTUAL_ENV, as Ray workers do, which rewrite their command line.

    Returns:
        Ids of processes in ascending order, by the real path of each folder.
    """
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
    paths.add(command.partition("\0")[0])
    paths |= {entry.partition("=")[2] for entry in environ.split("\0") if entry.startswith("VIRTUAL_ENV=")}
    return any(path == name or path.startswith(name + os.sep) for path in paths for name in spelled)


def is_alive(pid: int, since: float) -> bool:
    """Return whether a process is alive and was alive at a time, in seconds since the epoch."""
    # Not by /proc alone, which may hide the processes of other users.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return _read_start(pid) <= since + CLOCK_S


def _read_start(pid: int) -> float:
    """Return when a process started, in seconds since the epoch; 0 if that cannot be read."""
    try:
        ticks = Path(f"{PROC}/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
        (boot,) = re.findall(rb"^btime (\d+)$", Path(f"{PROC}/stat").read_bytes(), flags=re.MULTILINE)
    except (OSError, IndexError, ValueError):
        return 0.0
    return int(boot) + int(ticks) / os.sysconf("SC_CLK_TCK")

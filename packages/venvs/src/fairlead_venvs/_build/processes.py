# SPDX-License-Identifier: Apache-2.0
"""Reads the table of processes: which ones of this machine are alive, and which ones use an environment."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

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
        texts = [_read(pid, file) for file in ("maps", "cmdline", "environ")]
        for real, spelled in names.items():
            if any(name in text for text in texts for name in spelled) and _uses(spelled, texts):
                users[real].append(pid)
    return {real: tuple(pids) for real, pids in users.items()}


def _read(pid: int, file: str) -> str:
    try:
        return Path(PROC, str(pid), file).read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or belongs to another user
        return ""


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

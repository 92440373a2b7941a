# SPDX-License-Identifier: Apache-2.0
"""Which processes of this machine run from an environment, read from the table of processes."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["is_known", "users_of"]

PROC = "/proc"


def is_known() -> bool:
    """Whether it can be found out on this system."""
    return os.path.exists(f"{PROC}/self/maps")


def users_of(folders: Iterable[str | Path]) -> Mapping[str, tuple[int, ...]]:
    """The ids of the live processes that use each folder, ascending; all are read in one pass.

    A process uses it if it maps a file below it, was started as its interpreter (a link: what it maps is the base's),
    or has it as VIRTUAL_ENV, as Ray workers do, which rewrite their command line.
    """
    # By a variable it may be named through links, by a map never.
    names = {os.path.realpath(folder): {os.path.realpath(folder), str(folder)} for folder in folders}
    users: dict[str, list[int]] = {real: [] for real in names}
    for pid in sorted(int(name) for name in os.listdir(PROC) if name.isdigit()) if is_known() else ():
        texts = _texts(pid)
        for real, spelled in names.items():
            if any(name in text for text in texts for name in spelled) and _uses(spelled, texts):
                users[real].append(pid)
    return {real: tuple(pids) for real, pids in users.items()}


def _texts(pid: int) -> tuple[str, str, str]:
    """Mapped files, command line and environment; empty of a process that has ended, or is another user's."""
    found = []
    for what in ("maps", "cmdline", "environ"):
        try:
            found.append(Path(PROC, str(pid), what).read_bytes().decode(errors="replace"))
        except OSError:
            found.append("")
    maps, command, environ = found
    return maps, command, environ


def _paths(texts: tuple[str, str, str]) -> Iterable[str]:
    maps, command, environ = texts
    yield from {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    yield command.partition("\0")[0]
    yield from (entry.partition("=")[2] for entry in environ.split("\0") if entry.startswith("VIRTUAL_ENV="))


def _uses(spelled: Iterable[str], texts: tuple[str, str, str]) -> bool:
    return any(path == name or path.startswith(name + os.sep) for path in _paths(texts) for name in spelled)

# SPDX-License-Identifier: Apache-2.0
"""Lists the environments of this machine, and removes those that are not used."""

import contextlib
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ._lock import NOTE, VenvSpec, is_shared, venv_root
from ._node.store import FACTS, MANIFEST, check_root, lock_place, name_aside, read_manifest, sweep, try_lock

# Seconds since the last use after which an environment may be removed: before, its process may be about to start.
RECENT_S = 300.0
# Seconds after the last use of a note in which nodes that join later get the same versions.
NOTES_S = 30 * 86_400.0
FOLDER = r"[^.].*-[0-9a-f]{12}"
# Seconds after which the command of a process that has been started is visible.
STARTING_S = 0.05
PROC = Path("/proc")


@dataclass(frozen=True)
class Venv:
    """An environment on this machine.

    Attributes:
        path: its folder.
        python: the path of its interpreter.
        description: a description of its content.
        version: the version of its Python.
        ray: the version of Ray in it; None if it has none.
        fingerprint: hash of its content.
        built_at, used_at: times of the build and of the last request, in seconds since the epoch.
        pids: ids of the processes of this machine that run from it and that this user can see.
    """

    path: Path
    python: str
    description: str
    version: str
    ray: str | None
    fingerprint: str
    built_at: float
    used_at: float
    pids: tuple[int, ...]


def list_venvs() -> list[Venv]:
    """Return the complete environments of this machine, sorted by name."""
    manifests = {path: manifest for path in _list_folders() if (manifest := read_manifest(path)) is not None}
    users = _find_users(manifests)
    return [
        Venv(
            path=path,
            python=f"{path}/bin/python",
            used_at=time.time() - _measure_age(path),
            pids=users[path],
            **{name: manifest[name] for name in FACTS},
        )
        for path, manifest in manifests.items()
    ]


def prune(keep: Iterable[str | VenvSpec | Venv] = (), older_than: float | None = None) -> list[Venv]:
    """Remove environments that are not used any more, the leftovers of crashed builds, and notes of 30 days.

    An environment that is in use or is being built is never removed. Every process of its Python holds a lock, which
    all containers of a machine see. Where the file system has no locks, or does not show those of other hosts, give an
    `older_than` that is longer than the longest job: without it, an environment without locks stays.

    Args:
        keep: environments that stay: as specs, or by the name or path of their folder. A spec need not be built.
        older_than: time in seconds since the last request after which something may be removed. By default five
            minutes, as a process may be about to start.

    Returns:
        The environments that were removed.

    Raises:
        ValueError: `older_than` is not a number of seconds, or a name in `keep` matches no environment. Nothing has
            been removed.
        OSError: the folder of an environment cannot be changed.
    """
    if older_than is not None and not older_than >= 0:
        raise ValueError(f"older_than must be a number of seconds, 0 or more, got {older_than!r}")
    limit = RECENT_S if older_than is None else older_than
    venvs, keep = list_venvs(), list(keep)
    known = {venv.path.name for venv in venvs}
    named = [item.path if isinstance(item, Venv) else item for item in keep if not isinstance(item, VenvSpec)]
    stays = {Path(item).name for item in named}
    if stays - known:
        present = ", ".join(sorted(known)) or "none"
        raise ValueError(f"keep names no environment: {', '.join(stays - known)}. There are: {present}.")
    stays |= {spec.fingerprint() for spec in keep if isinstance(spec, VenvSpec)}
    old = [venv for venv in venvs if not venv.pids and _measure_age(venv.path) >= limit]
    unused = [venv for venv in old if not {venv.path.name, venv.fingerprint} & stays]
    gone = [venv for venv in unused if _remove(venv.path, limit, without_locks=older_than is not None)]
    for path in _list_folders():
        # A damaged environment, and not a folder of the user that has such a name.
        if (path / "pyvenv.cfg").is_file() and read_manifest(path) is None and _measure_age(path) >= limit:
            _remove(path, limit, without_locks=older_than is not None)
    for note in venv_root().glob(f"{NOTE}*"):
        if _measure_age(note) >= NOTES_S:
            shutil.rmtree(note, ignore_errors=True)
    sweep(venv_root())
    return gone


def _list_folders() -> list[Path]:
    root = venv_root()
    check_root(root, shared=is_shared())
    return sorted(path for path in (root.iterdir() if root.is_dir() else ()) if re.fullmatch(FOLDER, path.name))


def _measure_age(path: Path) -> float:
    """Return the seconds since an environment or a note was used; 0 if another process removes it."""
    for file in (path / MANIFEST, path):  # a damaged one may have no manifest
        with contextlib.suppress(FileNotFoundError):
            return time.time() - file.stat().st_mtime
    return 0.0


def _find_users(folders: Iterable[Path]) -> Mapping[Path, tuple[int, ...]]:
    """Find the live processes that use each folder: on Linux, of this machine, and visible to this user."""
    # A variable may name a folder through links; a map never does.
    names = {path: {f"{name}{end}" for name in (path, path.resolve()) for end in "/\0"} for path in folders}
    users: dict[Path, tuple[int, ...]] = dict.fromkeys(names, ())
    for pid in sorted(int(path.name) for path in PROC.glob("[0-9]*")) if names else ():
        maps, command, variables = (_read_process(pid, file) for file in ("maps", "cmdline", "environ"))
        text = "\0".join([maps, command.partition("\0")[0], variables, ""])
        for path, spelled in names.items():
            if any(name in text for name in spelled):
                users[path] += (pid,)
    return users


def _read_process(pid: int, file: str) -> str:
    try:
        return (PROC / str(pid) / file).read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def _remove(path: Path, limit: float, *, without_locks: bool) -> bool:
    """Remove an environment, unless it is in use, is being built or was just used; return whether it was removed."""
    aside, python = name_aside(path), path / "bin" / "python"
    closed = python.with_name(".python")
    manifest = path / MANIFEST
    with (
        contextlib.suppress(FileNotFoundError),  # another process has removed the folder
        lock_place(path) as lock,
        # A damaged environment may have no manifest, nor an interpreter.
        try_lock(manifest) if manifest.exists() else contextlib.nullcontext(lock) as hold,
    ):
        if not (without_locks if lock is hold is None else lock and hold):
            return False
        # From here on, nothing can start. What has just started shows its command a moment later.
        with contextlib.suppress(FileNotFoundError):
            python.rename(closed)
        time.sleep(STARTING_S)
        if not _find_users([path])[path] and _measure_age(path) >= limit:
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            return True
        closed.rename(python)
    return False

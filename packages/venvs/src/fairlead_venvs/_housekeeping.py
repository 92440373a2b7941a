# SPDX-License-Identifier: Apache-2.0
"""Lists the environments of this machine, and removes those that are not used."""

import contextlib
import datetime
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._lock import NOTES, is_shared, venv_root
from ._node.store import (
    BUILDING,
    MANIFEST,
    TRASH,
    USED,
    FileLock,
    check_root,
    lock_of,
    python_of,
    read_manifest,
    remove_leftovers,
)
from ._spec import VenvSpec

logger = logging.getLogger(__name__)

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
        built_at: time of the build, in seconds since the epoch.
        used_at: time of the last request, in seconds since the epoch.
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
            python=python_of(path),
            version=manifest["python"],
            used_at=time.time() - _measure_age(path),
            pids=users[path],
            **{name: manifest[name] for name in ("description", "ray", "fingerprint", "built_at")},
        )
        for path, manifest in manifests.items()
    ]


def prune(
    keep: Iterable[str | VenvSpec | Venv] = (),
    older_than: float | datetime.timedelta | None = None,
    *,
    dry_run: bool = False,
) -> list[Venv]:
    """Remove environments that are not used any more, and the leftovers of crashed builds.

    An environment that is in use or is being built is never removed. Every process of its Python holds a lock, which
    all containers of a machine see. Each request for an environment marks it as used. Where the file system has no
    locks, or does not show those of other hosts, `older_than` must be longer than the longest job.

    Notes of resolutions are removed 30 days after their last use.

    Args:
        keep: environments that stay: as specs, or by the name or path of their folder.
        older_than: time in seconds since the last use after which something may be removed. By default five minutes, as
            a process may be about to start.
        dry_run: remove nothing.

    Returns:
        The environments that were removed, or that would be with `dry_run`.

    Raises:
        ValueError: `older_than` is missing although the file system has no locks, or is not a number of seconds; or a
            name in `keep` matches no environment. Nothing has been removed.
        TypeError: `keep` has something else than specs and names.

    >>> prune(older_than=7 * 86_400, dry_run=True)  # environments that were not used in a week
    []
    """
    age = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    if age is not None and (isinstance(age, bool) or not age >= 0):
        raise ValueError(f"older_than must be a number of seconds, 0 or more, got {older_than!r}")
    limit = RECENT_S if age is None else age
    venvs = list_venvs()
    stays = _select_kept(keep, venvs)
    unused = [venv for venv in venvs if not venv.pids and not {venv.path.name, venv.fingerprint} & stays]
    going = [venv for venv in unused if _is_free(venv.path, limit, is_age_given=age is not None)]
    if dry_run:
        return going
    gone = [venv for venv in going if _remove(venv.path, limit)]
    for path in _list_folders():
        # A damaged environment, and not a folder of the user that has such a name.
        if read_manifest(path) is None and (path / "pyvenv.cfg").is_file() and _measure_age(path) >= limit:
            _remove(path, limit)
    _sweep(venv_root())
    return gone


def _list_folders() -> list[Path]:
    root = venv_root()
    check_root(root, shared=is_shared())
    return sorted(path for path in (root.iterdir() if root.is_dir() else ()) if re.fullmatch(FOLDER, path.name))


def _measure_age(path: Path) -> float:
    """Return the seconds since an environment or a note was used; 0 if another process removes it."""
    for file in (path / USED, path):  # a damaged one may have no mark
        with contextlib.suppress(FileNotFoundError):
            return time.time() - file.stat().st_mtime
    return 0.0


def _find_users(folders: Iterable[Path]) -> Mapping[Path, tuple[int, ...]]:
    """Find the live processes that use each folder: on Linux, of this machine, and visible to this user."""
    # A variable may name a folder through links; a map never does.
    names = {
        folder: {f"{spelled}{end}" for spelled in (folder, folder.resolve()) for end in "/\0"} for folder in folders
    }
    users: dict[Path, list[int]] = {folder: [] for folder in names}
    pids = [int(path.name) for path in PROC.glob("[0-9]*")] if names else []
    for pid in sorted(pids):
        maps, command, variables = (_read_process(pid, file) for file in ("maps", "cmdline", "environ"))
        text = "\0".join([maps, command.partition("\0")[0], variables, ""])
        for folder, spelled in names.items():
            if any(name in text for name in spelled):
                users[folder].append(pid)
    return {folder: tuple(found) for folder, found in users.items()}


def _read_process(pid: int, file: str) -> str:
    try:
        return (PROC / str(pid) / file).read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def _select_kept(keep: Iterable[Any], venvs: Iterable[Venv]) -> set[str]:
    """Return names and fingerprints of the environments to keep. A spec may be one that was never built here."""
    known = {venv.path.name for venv in venvs}
    stays: set[str] = set()
    for item in keep:
        if isinstance(item, VenvSpec):
            stays.add(item.fingerprint())
            continue
        if not isinstance(item, (str, Venv)):
            raise TypeError(f"keep must hold specs and names, got {item!r}")
        name = item.path.name if isinstance(item, Venv) else os.path.basename(item.rstrip("/"))
        if name not in known:
            present = ", ".join(sorted(known)) or "none"
            raise ValueError(f"keep names no environment: {name}. There are: {present}. Nothing was removed.")
        stays.add(name)
    return stays


def _is_free(path: Path, limit: float, *, is_age_given: bool) -> bool:
    """Return whether an environment was not used lately, and no process holds its lock."""
    if _measure_age(path) < limit:
        return False
    lock = FileLock(path / MANIFEST, create=False)
    is_free = lock.acquire()
    lock.release()
    if lock.refused and not is_age_given:
        raise ValueError(
            f"the file system of {path} has no locks, so it does not show which environments are in use. Give the time "
            "since the last use after which an environment may be removed (older_than, in seconds)."
        )
    return is_free


def _remove(path: Path, limit: float) -> bool:
    """Remove an environment, unless it is being built or was just used; return whether it was removed."""
    lock, hold = lock_of(path), FileLock(path / MANIFEST, create=False)
    aside, python = Path(f"{path}{TRASH}{secrets.token_hex(8)}"), path / "bin" / "python"
    closed = python.with_name(".python")
    try:
        if not lock.acquire() or not hold.acquire():
            return False
        # From here on, nothing can start. What has just started shows its command a moment later.
        with contextlib.suppress(FileNotFoundError):  # it is damaged
            python.rename(closed)
        time.sleep(STARTING_S)
        if not _find_users([path])[path] and _measure_age(path) >= limit:
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            return True
        closed.rename(python)
    except FileNotFoundError:  # another process has removed it
        pass
    except OSError as error:  # the file system is read only, or another user's
        logger.warning("Kept %s, which cannot be removed: %s", path, error)
    finally:
        hold.release()
        lock.release()
    return False


def _sweep(root: Path) -> None:
    """Remove notes that were not used for long, and what killed builds have left."""
    for note in (root / NOTES).glob("[0-9a-f]*"):
        if BUILDING not in note.name and _measure_age(note) >= NOTES_S:
            shutil.rmtree(note, ignore_errors=True)
    for folder in (root, root / NOTES):
        for path in [*folder.glob(f"*{BUILDING}*"), *folder.glob(f"*{TRASH}*")]:
            place = path.with_name(re.split(f"{re.escape(BUILDING)}|{re.escape(TRASH)}", path.name)[0])
            with contextlib.suppress(OSError):  # read only
                lock = lock_of(place)
                if lock.acquire():
                    remove_leftovers(place, is_locked=not lock.refused)
                    lock.release()

# SPDX-License-Identifier: Apache-2.0
"""What environments there are on this machine, and which of them can go."""

import datetime
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._build.in_use import is_known, users_of
from ._build.kernel_lock import KernelLock
from ._build.publish import leftover_name, leftovers, remove_leftovers
from ._build.sharing import is_shared, on_shared_file_system
from ._build.store import TRASH, USED, host_id, lock_path, look, mark_used, python_of, venv_root
from ._planning.plan import read_request
from ._planning.resolution import RESOLVED
from ._planning.wheel import WHEELS
from ._spec import VenvSpec

__all__ = ["Venv", "list_venvs", "prune"]

logger = logging.getLogger(__name__)

# Nothing that was asked for so recently is removed unless that is said: its process may be about to start.
RECENT_S = 300.0
# A wheel is cheap to build again, but one that is so young may be about to be installed.
WHEELS_S = 3600.0
# What another host has marked so recently stays in any case: the mark of what is in use there is renewed three times
# within it.
OTHERS_S = 1800.0
# Nodes that join later get the same versions so long after the requirements were last asked for.
RESOLUTIONS_S = 30 * 86_400.0
FOLDER = r".+-[0-9a-f]{12}"


@dataclass(frozen=True)
class Venv:
    """An environment that is there.

    Attributes:
        path: its folder.
        python: its interpreter.
        about: what it was asked to hold.
        version: of its Python.
        ray: version of Ray in it; None without.
        fingerprint: of its content.
        request: hash of what was asked for, whatever its requirements were resolved to.
        built_at: when, in seconds since the epoch.
        used_at: when it was last asked for, on any host, likewise, or seen in use if several hosts share its folder.
        hosts: ids of those that have asked for it, `<name>_<six digits>`: several containers may have one name.
        size_bytes: size of its files; those that it shares with uv's cache are counted in full. None if not asked for.
        pids: processes of this machine that run from it, as far as this user can see.
    """

    path: Path
    python: str
    about: str
    version: str
    ray: str | None
    fingerprint: str
    request: str
    built_at: float
    used_at: float
    hosts: tuple[str, ...]
    size_bytes: int | None
    pids: tuple[int, ...]


def list_venvs(*, sizes: bool = True, seen: Callable[[int, int], None] | None = None) -> list[Venv]:
    """The complete environments of this machine, by name.

    Args:
        sizes: measure them (bytes), which takes about a second for every hundred thousand files.
        seen: is called with how many of how many are measured.
    """
    root = venv_root()
    manifests = {path: look(path) for path in _folders(root)}
    there = {path: manifest for path, manifest in manifests.items() if manifest is not None}
    users = users_of(there)
    found = []
    for path, manifest in there.items():
        pids = users[os.path.realpath(path)]
        if pids and is_shared(path):
            mark_used(path)
        marks = _marks(path)
        found.append(
            Venv(
                path=path,
                python=python_of(path),
                about=manifest["about"],
                version=manifest["python"],
                ray=manifest["ray"],
                fingerprint=manifest["fingerprint"],
                request=manifest["request"],
                built_at=manifest["built_at"],
                used_at=max([manifest["built_at"], *marks.values()]),
                hosts=tuple(sorted(marks)),
                size_bytes=_size(path) if sizes else None,
                pids=pids,
            )
        )
        if seen is not None:
            seen(len(found), len(there))
    return found


def prune(
    keep: Iterable[str | VenvSpec | Venv] = (),
    older_than: float | datetime.timedelta | None = None,
    *,
    dry_run: bool = False,
) -> list[Venv]:
    """Remove environments that nobody needs any more, with what crashed builds have left; which ones.

    One that is in use is never removed, nor one that is being built. On a folder that several hosts share, processes of
    the others are not seen, only their marks of use: there, only what has not been marked in a while may go, and what
    another host has marked in the last 30 minutes stays. A mark is made whenever an environment is asked for, and
    renewed every 10 minutes as long as the process that asked for it and those that run from it live, and by
    `list_venvs` and `prune` on the host where they run. Ages are measured by the clock of the folder's file system.

    Resolutions of requirements go when they have not been asked for in 30 days and no environment here has them.

    Args:
        keep: those that stay: as specs, whatever versions they were resolved to, or by folder name, path, interpreter
            or fingerprint.
        older_than: how long, in seconds, a thing must not have been asked for. By default five minutes, as a process
            may be about to start; on a shared folder it has to be given.
        dry_run: remove nothing.

    Raises:
        ValueError: the folder is shared, and `older_than` is not given; or it is no number of seconds; or a name in
            `keep` matches no environment. Nothing has been removed.
        TypeError: something in `keep` is neither.

    >>> prune(older_than=7 * 86_400, dry_run=True)  # what nobody has asked for in a week
    []
    """
    root = venv_root()
    age = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    if age is not None and (isinstance(age, bool) or not age >= 0):
        raise ValueError(f"older_than must be a number of seconds, 0 or more, got {older_than!r}")
    venvs = list_venvs(sizes=not dry_run)
    if age is None:
        _not_shared(root, venvs)
    limit = RECENT_S if age is None else age
    kept = _kept_names(keep, venvs)
    now = _now(root)
    going = [
        venv for venv in venvs if not _names(venv) & kept and not venv.pids and _is_due(venv.path, limit, now, venv)
    ]
    if dry_run:
        return going
    gone = [venv for venv in going if _removed(venv.path, limit, now)]
    for path in _folders(root):
        # Damaged ones; nothing that only has such a name.
        if look(path) is None and os.path.isfile(path / "pyvenv.cfg") and _age(path, now) >= limit:
            _removed(path, limit, now)
    half_built = leftovers(root / WHEELS)
    remove_leftovers([*leftovers(root), *half_built, *leftovers(root / RESOLVED)], older_than_s=max(limit, RECENT_S))
    for path in {*(root / WHEELS).glob("[!.]*")}.difference(half_built):
        if _age(path, now) >= max(limit, WHEELS_S):
            shutil.rmtree(path, ignore_errors=True)
    needed = kept | {manifest["request"] for path in _folders(root) if (manifest := look(path)) is not None}
    for path in (root / RESOLVED).glob("[0-9a-f]*"):
        if path.is_file() and path.name not in needed and _age(path, now) >= max(limit, RESOLUTIONS_S):
            path.unlink(missing_ok=True)
    return gone


def _now(root: Path) -> float:
    """Return the time by the clock that marks are made with: the file server's, where the folder is on one."""
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=".clock-") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # it cannot be written, so nothing is removed either
        return time.time()


def _is_due(path: Path, limit: float, now: float, venv: Venv | None = None) -> bool:
    """Return whether no host has marked an environment for so long; without marks, whether it was built so long ago."""
    marks = _marks(path)
    if not marks and venv is not None:
        return now - venv.built_at >= limit
    ours = host_id()
    return all(now - at >= (limit if host == ours else max(limit, OTHERS_S)) for host, at in marks.items())


def _age(path: Path, now: float) -> float:
    """Seconds since it was made or marked; none if it goes away."""
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if re.fullmatch(FOLDER, path.name) and not path.name.startswith("."))


def _marks(path: Path) -> Mapping[str, float]:
    """When each host last asked for it."""
    try:
        return {entry.name: entry.stat().st_mtime for entry in os.scandir(path / USED)}
    except OSError:  # it goes away, or was never marked
        return {}


def _size(path: Path) -> int:
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                one = os.lstat(os.path.join(folder, name))
            except OSError:  # it goes away
                continue
            seen[one.st_dev, one.st_ino] = one.st_size
    return sum(seen.values())


def _not_shared(root: Path, venvs: Iterable[Venv]) -> None:
    others = sorted({host for venv in venvs for host in venv.hosts} - {host_id()})
    if others or not is_known() or on_shared_file_system(root):
        by = f" (by {', '.join(others[:3])})" if others else ""
        raise ValueError(
            f"{root} is used from elsewhere, too{by}, or may be, and who runs there is not seen from here: say how "
            "long something must not have been asked for (older_than, in seconds)"
        )


def _kept_names(keep: Iterable[Any], venvs: Iterable[Venv]) -> set[str]:
    """Return names of the environments to keep.

    Raises:
        ValueError: a string names none of them. A spec may well be one that has not been built here.
    """
    wanted = [(one, _kept_name(one)) for one in keep]
    known = {name for venv in venvs for name in _names(venv)}
    if unknown := [name for one, name in wanted if isinstance(one, str) and name not in known]:
        there = ", ".join(sorted(venv.path.name for venv in venvs)) or "none"
        raise ValueError(f"keep names no environment: {', '.join(unknown)}. There are: {there}. Nothing was removed.")
    return {name for _, name in wanted}


def _kept_name(one: Any) -> str:
    if isinstance(one, Venv):
        return one.path.name
    if isinstance(one, VenvSpec):
        return read_request(one).key
    if not isinstance(one, str) or not one:
        raise TypeError(f"keep must hold specs and names, got {one!r}")
    return one.rstrip("/")


def _names(venv: Venv) -> set[str]:
    """Every name by which it may be kept."""
    return {venv.path.name, str(venv.path), venv.python, venv.fingerprint, venv.fingerprint[:12], venv.request}


def _removed(path: Path, limit: float, now: float) -> bool:
    """Take it away in one step, then remove it; not if it is being built, or has just been asked for."""
    lock = KernelLock(lock_path(path))
    try:
        if not lock.acquire():
            return False
        if not _is_due(path, limit, now) or users_of([path])[os.path.realpath(path)]:
            return False
        aside = leftover_name(path, TRASH)
        os.rename(path, aside)
    except FileNotFoundError:
        return False  # somebody else has removed it
    except PermissionError as error:
        logger.warning("Kept %s, which another user has made: %s", path, error)
        return False
    finally:
        lock.release()
    shutil.rmtree(aside, ignore_errors=True)
    return True

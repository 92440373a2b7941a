# SPDX-License-Identifier: Apache-2.0
"""Lists the environments of this machine, and removes those that are not used."""

import datetime
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._build.publish import TRASH, KernelLock, leftover_name, leftovers, remove_leftovers
from ._build.store import MANIFEST, lock_path, python_of, read_manifest, venv_root
from ._build.users import can_see_processes, find_users, host_id, locks_decide, read_marks
from ._planning.plan import read_draft
from ._planning.requirements import RESOLVED
from ._planning.wheel import WHEELS
from ._spec import VenvSpec
from .exceptions import VenvBuildError

logger = logging.getLogger(__name__)

# Seconds since the last use after which an environment may be removed: before, its process may be about to start.
RECENT_S = 300.0
# Seconds after the last use of a resolution in which nodes that join later get the same versions.
RESOLUTIONS_S = 30 * 86_400.0
FOLDER = r"[^.].*-[0-9a-f]{12}"


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
        request: hash of the request, which does not depend on the versions that requirements were resolved to.
        built_at: time of the build, in seconds since the epoch.
        used_at: time of the last request on any host, in seconds since the epoch.
        hosts: ids of the hosts that have requested it, `<name>_<six digits>`: several containers may have one name.
        size_bytes: size of its files, with those that it shares with uv's cache. None if sizes were not requested.
        pids: ids of the processes of this machine that run from it and that this user can see.
    """

    path: Path
    python: str
    description: str
    version: str
    ray: str | None
    fingerprint: str
    request: str
    built_at: float
    used_at: float
    hosts: tuple[str, ...]
    size_bytes: int | None
    pids: tuple[int, ...]


def list_venvs(*, sizes: bool = True) -> list[Venv]:
    """Return the complete environments of this machine, sorted by name.

    Args:
        sizes: measure their sizes, which takes about a second for every hundred thousand files.
    """
    root = venv_root()
    manifests = {path: manifest for path in _list_folders(root) if (manifest := read_manifest(path)) is not None}
    users = find_users(manifests)
    venvs: list[Venv] = []
    for path, manifest in manifests.items():
        marks = read_marks(path)
        venvs.append(
            Venv(
                path=path,
                python=python_of(path),
                version=manifest["python"],
                used_at=max(marks.values(), default=manifest["built_at"]),
                hosts=tuple(sorted(marks)),
                size_bytes=_measure(path) if sizes else None,
                pids=users[os.path.realpath(path)],
                **{name: manifest[name] for name in ("description", "ray", "fingerprint", "request", "built_at")},
            )
        )
    return venvs


def prune(
    keep: Iterable[str | VenvSpec | Venv] = (),
    older_than: float | datetime.timedelta | None = None,
    *,
    dry_run: bool = False,
) -> list[Venv]:
    """Remove environments that are not used any more, and the leftovers of crashed builds.

    An environment that is in use or is being built is never removed. Every process of its Python holds a lock, which
    all containers of a machine see. On a network file system, locks of other hosts may be invisible, so `older_than`
    must be longer than the longest job there. Each request for an environment marks it as used. Ages are measured by
    the clock of the folder's file system.

    Resolutions of requirements are removed if they were not used in 30 days and no environment here has them.

    Args:
        keep: environments that stay: as specs, whatever versions they were resolved to, or by the name or path of
            their folder.
        older_than: time in seconds since the last use after which something may be removed. By default five minutes, as
            a process may be about to start; required on a shared folder.
        dry_run: remove nothing.

    Returns:
        The environments that were removed, or that would be with `dry_run`.

    Raises:
        ValueError: the folder is shared and `older_than` is missing; `older_than` is not a number of seconds; or a name
            in `keep` matches no environment. Nothing has been removed.
        TypeError: `keep` has something else than specs and names.

    >>> prune(older_than=7 * 86_400, dry_run=True)  # environments that were not used in a week
    []
    """
    root = venv_root()
    age = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    if age is not None and (isinstance(age, bool) or not age >= 0):
        raise ValueError(f"older_than must be a number of seconds, 0 or more, got {older_than!r}")
    venvs = list_venvs(sizes=not dry_run)
    if age is None:
        _check_not_shared(root, venvs)
    limit = RECENT_S if age is None else age
    kept = _select_kept(keep, venvs)
    now = _read_clock(root)
    unused = [venv for venv in venvs if not venv.pids and not {venv.path.name, venv.request} & kept]
    going = [venv for venv in unused if now - venv.used_at >= limit and not _hold(venv.path).is_taken()]
    if dry_run:
        return going
    gone = [venv for venv in going if _remove(venv.path, limit, now)]
    for path in _list_folders(root):
        # A damaged environment, and not a folder of the user that has such a name.
        if read_manifest(path) is None and os.path.isfile(path / "pyvenv.cfg") and _measure_age(path, now) >= limit:
            _remove(path, limit, now)
    left = [*leftovers(root), *leftovers(root / WHEELS), *leftovers(root / RESOLVED)]
    remove_leftovers(root, left, max(limit, RECENT_S))
    for path in {*(root / WHEELS).glob("[!.]*")}.difference(left):
        # A build that runs installs its wheels last.
        if _measure_age(path, now) >= max(limit, RECENT_S) and not leftovers(root):
            shutil.rmtree(path, ignore_errors=True)
    manifests = [read_manifest(path) for path in _list_folders(root)]
    needed = kept | {manifest["request"] for manifest in manifests if manifest is not None}
    for path in (root / RESOLVED).glob("[0-9a-f]*"):
        if path.is_file() and path.name not in needed and _measure_age(path, now) >= max(limit, RESOLUTIONS_S):
            path.unlink(missing_ok=True)
    return gone


def _read_clock(root: Path) -> float:
    """Return the time by the clock of the folder's file system, which also sets the times of marks."""
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=".clock-") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # the folder cannot be written, so nothing is removed either
        return time.time()


def _measure_age(path: Path, now: float) -> float:
    """Return the seconds since a path was created or marked; 0 if another process removes it."""
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _list_folders(root: Path) -> list[Path]:
    there = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in there if re.fullmatch(FOLDER, path.name))


def _measure(path: Path) -> int:
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                one = os.lstat(os.path.join(folder, name))
            except OSError:  # another process removes it
                continue
            seen[one.st_dev, one.st_ino] = one.st_size
    return sum(seen.values())


def _check_not_shared(root: Path, venvs: Iterable[Venv]) -> None:
    others = sorted({host for venv in venvs for host in venv.hosts} - {host_id()})
    if others or not can_see_processes() or not locks_decide(root):
        by = f" (by {', '.join(others[:3])})" if others else ""
        raise ValueError(
            f"{root} is used by other hosts{by}, or may be, and their processes cannot be seen from here. Give the "
            "time since the last use after which an environment may be removed (older_than, in seconds)."
        )


def _select_kept(keep: Iterable[Any], venvs: Iterable[Venv]) -> set[str]:
    """Return the names of the environments to keep. A spec may be one that was never built here, a name not."""
    wanted = [(one, _key(one)) for one in keep]
    known = {venv.path.name for venv in venvs}
    if unknown := [name for one, name in wanted if isinstance(one, str) and name not in known]:
        there = ", ".join(sorted(venv.path.name for venv in venvs)) or "none"
        raise ValueError(f"keep names no environment: {', '.join(unknown)}. There are: {there}. Nothing was removed.")
    return {name for _, name in wanted}


def _key(one: Any) -> str:
    if isinstance(one, Venv):
        return one.path.name
    if isinstance(one, VenvSpec):
        return read_draft(one).recipe.request
    if not isinstance(one, str) or not one:
        raise TypeError(f"keep must hold specs and names, got {one!r}")
    return os.path.basename(one.rstrip("/"))


def _hold(path: Path) -> KernelLock:
    # Every process of an environment's Python holds it.
    return KernelLock(path.parent, path / MANIFEST, create=False)


def _remove(path: Path, limit: float, now: float) -> bool:
    """Remove an environment, unless it is being built or was just used; return whether it was removed."""
    lock, hold = KernelLock(path.parent, lock_path(path)), _hold(path)
    try:
        if not lock.acquire() or find_users([path])[os.path.realpath(path)]:
            return False
        # After the search, which takes long: a request may come meanwhile, and its process must find the manifest free.
        if not hold.acquire() or any(now - at < limit for at in read_marks(path).values()):
            return False
        aside = leftover_name(path, TRASH)
        os.rename(path, aside)
    except FileNotFoundError:
        return False  # another process has removed it
    except (OSError, VenvBuildError) as error:  # another user has created a part, or the file system is read only
        logger.warning("Kept %s, which cannot be removed: %s", path, error)
        return False
    finally:
        hold.release()
        lock.release()
    shutil.rmtree(aside, ignore_errors=True)
    return True

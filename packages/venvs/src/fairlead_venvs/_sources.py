# SPDX-License-Identifier: Apache-2.0
"""The code of a project and of the local folders that it depends on: one source distribution each, known by content."""

import hashlib
import os
import sys
import tarfile
from collections.abc import Collection
from pathlib import Path

from ._node.uv import Runner

# Caches of tools, and folders that tools write, which are never part of a distribution.
SKIPPED = frozenset({".git", ".hg", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"})
SKIPPED_AT_TOP = SKIPPED | {".eggs", ".nox", ".tox", "build", "dist", "node_modules"}
# Files of a repository, as a version may come from a tag.
OF_GIT = ("HEAD", "packed-refs", "logs/HEAD", "refs/tags")


def build_sdist(folder: Path, out: Path, runner: Runner) -> tuple[Path, str, list[str], str]:
    """Build the source distribution of a folder; return it, the hash of its content, its files, and the state before.

    The state is empty if files have changed meanwhile.
    """
    before = _scan(folder)
    runner.uv(
        *("build", "--sdist", "--python", sys.executable, "--out-dir", str(out), str(folder)),
        cwd=folder,
        failed=f"uv could not build the source distribution of {folder}",
    )
    (sdist,) = out.glob("*.tar.gz")
    hashes: dict[str, str] = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                hashes[member.name.partition("/")[2]] = hashlib.sha256(file.read()).hexdigest()
    members = sorted(hashes.keys() & before.keys())
    state = _hash_state(folder, before, members)
    content = hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()
    return sdist, content, members, state if state == read_state(folder, members) else ""


def read_state(folder: Path, members: Collection[str]) -> str:
    """Return a hash of a folder: of the files of its last source distribution, and of the names of all others."""
    return _hash_state(folder, _scan(folder), members)


def see(path: str | Path, *, links: bool = True) -> str:
    """Return the size and times of a file; empty if it is missing. No program can set the time of change back.

    Without `links`, the time of change is left out, because a further link to the file sets it.
    """
    try:
        seen = os.stat(path)
    except OSError:
        return ""
    return f"{seen.st_size} {seen.st_mtime_ns}" + (f" {seen.st_ctime_ns}" if links else "")


def _hash_state(folder: Path, files: dict[str, str], members: Collection[str]) -> str:
    inside = frozenset(members)
    lines = [f"{name}\0{seen if name in inside else ''}\n" for name, seen in sorted(files.items())]
    home = next((path for path in (folder, *folder.parents) if (path / ".git").is_dir()), folder)
    lines += [f"{name}\0{see(home / '.git' / name)}\n" for name in OF_GIT]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _scan(folder: Path) -> dict[str, str]:
    """Return the size and times of all files below a folder."""
    files: dict[str, str] = {}
    for base, folders, names in os.walk(folder):
        is_top = base == str(folder)
        if "pyvenv.cfg" in names and not is_top:
            folders.clear()  # an environment of any name
            continue
        skipped = SKIPPED_AT_TOP if is_top else SKIPPED
        folders[:] = [name for name in folders if name not in skipped and not name.endswith(".egg-info")]
        files |= {os.path.relpath(path, folder): see(path) for path in (os.path.join(base, name) for name in names)}
    return files

# SPDX-License-Identifier: Apache-2.0
"""Whether the source of a project has changed since its wheel was built, told without reading it."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["source_key"]

# Caches of tools, which change all the time and are never a part of a wheel, at whatever depth.
SKIPPED = frozenset({".git", ".hg", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"})
# What tools write beside the pyproject. Further down, a folder of such a name may be data of a package.
SKIPPED_AT_TOP = frozenset({".eggs", ".nox", ".tox", "build", "dist", "node_modules"})
# A version may come from a tag.
OF_GIT = ("HEAD", "packed-refs", "logs/HEAD", "refs/tags")


def source_key(folder: Path, *more: str) -> str:
    """Hash of names, sizes and times of all files below a folder, and of what else decides about its wheel.

    The time is the one that no program can set back: an edit is seen whatever it does to the rest.
    """
    hashed = hashlib.sha256(repr((str(folder), more)).encode())
    for name, seen in sorted(_files(str(folder), "", set())):
        hashed.update(
            f"{name}\0{seen.st_size}\0{seen.st_mtime_ns}\0{seen.st_ctime_ns}\0".encode(errors="surrogateescape")
        )
    for name in OF_GIT:
        try:
            hashed.update(f"{name}\0{(folder / '.git' / name).stat().st_mtime_ns}\0".encode())
        except OSError:  # no repository, or no such file in it
            continue
    return hashed.hexdigest()[:32]


def _files(folder: str, prefix: str, inside: set[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        listed = list(entries)
    if any(entry.name == "pyvenv.cfg" for entry in listed):
        return  # an environment, whatever it is called
    for entry in listed:
        if entry.name in SKIPPED or (not prefix and entry.name in SKIPPED_AT_TOP) or entry.name.endswith(".egg-info"):
            continue
        try:
            seen = entry.stat()
            is_folder = entry.is_dir()
        except OSError:  # a link to nowhere, or it goes away
            continue
        if not is_folder:
            yield prefix + entry.name, seen
        elif (seen.st_dev, seen.st_ino) not in inside:  # else a link back up
            here = inside | {(seen.st_dev, seen.st_ino)}
            yield from _files(entry.path, f"{prefix}{entry.name}/", here)

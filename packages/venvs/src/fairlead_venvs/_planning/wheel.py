# SPDX-License-Identifier: Apache-2.0
"""The wheel of a project's own code: built by uv when the source has changed, identified by its content."""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .._build.build import choose_interpreter
from .._build.permissions import check_trusted, share
from .._build.publish import make_once, publish
from .._build.users import touch
from .._build.uv import Runner
from ..exceptions import VenvBuildError

WHEELS = ".wheels"
# Caches of tools, which change all the time and are never part of a wheel, at any depth.
SKIPPED = frozenset({".git", ".hg", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"})
# Folders that tools write beside the pyproject. Further down, a folder of such a name may be data of a package.
SKIPPED_AT_TOP = frozenset({".eggs", ".nox", ".tox", "build", "dist", "node_modules"})
# Files of a repository, as a version may come from a tag.
OF_GIT = ("HEAD", "packed-refs", "logs/HEAD", "refs/tags")


def ensure_wheel(folder: Path, *, root: Path, python: str, runner: Runner, variables: str = "") -> tuple[Path, str]:
    """Return the wheel of a project and the hash of its content; build it first for a new source or other variables."""
    more = python, sys.implementation.name, variables
    try:
        store = root / WHEELS / hash_source(folder, *more)
    except OSError as error:
        raise VenvBuildError(f"the project in {folder} cannot be read: {error}") from None

    def build(aside: Path) -> tuple[Path, str]:
        # A build may write a file of the source, such as _version.py, again, and the same as before.
        same = root / WHEELS / hash_source(folder, *more, read=True)
        if (ready := _find_wheel(same, root)) is not None:
            return put(ready[0], store, aside)
        (aside / "out").mkdir()
        # By way of the source distribution, so that the wheel has nothing that an earlier build left in the source.
        runner.uv(
            *("build", "--python", choose_interpreter(python, sys.implementation.name)),
            *("--out-dir", str(aside / "out"), str(folder)),
            cwd=folder,
            failed=f"the wheel of the project in {folder} could not be built",
        )
        (wheel,) = (aside / "out").glob("*.whl")
        if same.name == hash_source(folder, *more, read=True):
            put(wheel, same, aside)
        return put(wheel, store, aside)

    def put(wheel: Path, place: Path, aside: Path) -> tuple[Path, str]:
        new, content = aside / place.name, _hash_content(wheel)
        (new / content).mkdir(parents=True)
        shutil.copyfile(wheel, new / content / wheel.name)
        for made in (new, new / content, new / content / wheel.name):
            share(made, root)
        # On a file system without locks, another process may have finished first, with other bytes.
        publish(new, place, lambda: _find_wheel(place, root) is not None)
        return _find_wheel(place, root) or (place / content / wheel.name, content)

    return make_once(root, store, lambda: _find_wheel(store, root), build, runner.deadline)


def _find_wheel(store: Path, root: Path) -> tuple[Path, str] | None:
    try:
        (content,) = os.listdir(store)
        (name,) = os.listdir(store / content)
        check_trusted(root, store / content / name)
    except (OSError, ValueError, VenvBuildError):
        return None
    touch(store)  # `prune` reads its time
    return store / content / name, content


def _hash_content(wheel: Path) -> str:
    """Return a hash of the files in a wheel and of their names, whenever and in whatever order they were packed."""
    with zipfile.ZipFile(wheel) as archive:
        lines = [f"{name}\0{hashlib.sha256(archive.read(name)).hexdigest()}\n" for name in sorted(archive.namelist())]
    # RECORD lists the others, in the order in which they were packed.
    return hashlib.sha256("".join(line for line in lines if ".dist-info/RECORD\0" not in line).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return a hash of a file's bytes, which are read again only when the file has changed."""
    seen = path.stat()
    return _hash_bytes(str(path), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def _hash_bytes(path: str, *_seen: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_source(folder: Path, *more: str, read: bool = False) -> str:
    """Return a hash of names, sizes and times of all files below a folder; with `read`, of the text of Python files."""
    hashed = hashlib.sha256(repr((str(folder), more)).encode())
    for name, seen in sorted(_list_files(str(folder), "", set())):
        # No program can set the time of change back, so every edit is seen.
        facts = f"{seen.st_size}\0{seen.st_mtime_ns}\0{seen.st_ctime_ns}"
        facts = f"{hash_file(folder / name)} {seen.st_mode}" if read and name.endswith(".py") else facts
        hashed.update(f"{name}\0{facts}\0".encode(errors="surrogateescape"))
    for name in OF_GIT:
        with contextlib.suppress(OSError):  # no repository, or no such file in it
            hashed.update(f"{name}\0{(folder / '.git' / name).stat().st_mtime_ns}\0".encode())
    return hashed.hexdigest()[:32]


def _list_files(folder: str, prefix: str, inside: set[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        listed = list(entries)
    if prefix and any(entry.name == "pyvenv.cfg" for entry in listed):
        return  # an environment of any name
    for entry in listed:
        if entry.name in SKIPPED or (not prefix and entry.name in SKIPPED_AT_TOP) or entry.name.endswith(".egg-info"):
            continue
        try:
            seen = entry.stat()
            is_folder = entry.is_dir()
        except OSError:  # a link to nowhere, or a file that is being removed
            continue
        if not is_folder:
            yield prefix + entry.name, seen
        elif (seen.st_dev, seen.st_ino) not in inside:  # else a link to a folder above
            here = inside | {(seen.st_dev, seen.st_ino)}
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                yield from _list_files(entry.path, f"{prefix}{entry.name}/", here)

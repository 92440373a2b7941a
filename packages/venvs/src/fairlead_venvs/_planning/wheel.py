# SPDX-License-Identifier: Apache-2.0
"""A project's own code as a wheel: built by uv when the source has changed, known by its content."""

import contextlib
import functools
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from .._build.build import locked
from .._build.install import interpreter_for
from .._build.publish import ABANDONED_S, leftover_name, leftovers, remove_leftovers
from .._build.store import BUILDING, share_folder
from .._build.uv import Deadline, Runner, find_uv
from .source import source_key

__all__ = ["WHEELS", "content_of", "file_hash", "wheel_of"]

WHEELS = ".wheels"


def wheel_of(
    folder: Path, *, root: Path, python: str, implementation: str, no_index: bool, runner: Runner, deadline: Deadline
) -> tuple[Path, str]:
    """The wheel of the project in a folder, and the hash of its content.

    Args:
        folder: of the project. It is only read, except that some build backends write into it.
        root: of all environments; wheels are kept there.
        python: for which version.
        implementation: of Python.
        no_index: find the build backend without an index.
        runner: runs uv, with the spec's variables.
        deadline: of the runner, too.

    Raises:
        VenvBuildError: the project cannot be built.
    """
    store = root / WHEELS / source_key(folder, python, implementation)
    if (ready := _kept(store)) is not None:
        return ready
    root.mkdir(parents=True, exist_ok=True)
    share_folder(store.parent)
    with locked(store, deadline, lambda: _kept(store) is not None):
        return _kept(store) or _built(folder, store, python, implementation, no_index, runner, deadline)


def _kept(store: Path) -> tuple[Path, str] | None:
    try:
        (content,) = os.listdir(store)
        (name,) = os.listdir(store / content)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):  # a folder that may be read only
        os.utime(store)  # `prune` looks at it
    return store / content / name, content


def _built(
    folder: Path, store: Path, python: str, implementation: str, no_index: bool, runner: Runner, deadline: Deadline
) -> tuple[Path, str]:
    remove_leftovers(leftovers(store.parent), older_than_s=ABANDONED_S)
    aside = leftover_name(store, BUILDING)
    try:
        out = aside / "out"
        out.mkdir(parents=True)
        # By way of the source distribution: what an earlier build left in the source is not in it.
        command = [find_uv(deadline), "build", "--python", interpreter_for(python, implementation)]
        runner.run(
            [*command, *(["--no-index"] if no_index else []), "--out-dir", str(out), str(folder)],
            cwd=folder,
            failed=f"the wheel of the project in {folder} could not be built",
        )
        (wheel,) = out.glob("*.whl")
        content = content_of(wheel)
        kept = aside / "kept"
        (kept / content).mkdir(parents=True)
        os.rename(wheel, kept / content / wheel.name)
        # Where the file system has no locks, another process may have finished first, with other bytes.
        if (ready := _kept(store)) is not None:
            return ready
        shutil.rmtree(store, ignore_errors=True)
        os.rename(kept, store)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return store / content / wheel.name, content


def content_of(wheel: Path) -> str:
    """Hash of the files in a wheel and their names, whenever and in whatever order they were packed."""
    with zipfile.ZipFile(wheel) as archive:
        lines = [f"{name}\0{hashlib.sha256(archive.read(name)).hexdigest()}\n" for name in sorted(archive.namelist())]
    # RECORD lists the others, in the order in which they were packed.
    return hashlib.sha256("".join(line for line in lines if ".dist-info/RECORD\0" not in line).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Hash of a file's bytes, read again only when the file has changed."""
    seen = path.stat()
    return _hashed(str(path), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def _hashed(path: str, *_seen: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

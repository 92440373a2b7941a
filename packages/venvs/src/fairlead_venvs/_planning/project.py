# SPDX-License-Identifier: Apache-2.0
"""A project as uv sees it: its pyproject, the lock that covers it, and what of both decides an environment."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lockfile import LocalFile, LocalFolder, local_parts

__all__ = ["Project", "read_project"]

# Of a pyproject: the rest configures tools that do not install.
DECIDING = ("build-system", "dependency-groups", "project")


@dataclass(frozen=True)
class Project:
    """A project, read once.

    Attributes:
        name: of its distribution; empty for a workspace that is none itself.
        folder: where it is.
        root: where its lock is: the same, or the workspace's.
        lock: the lock's bytes.
        settings: pyproject.toml and uv.toml of the root, by name, as bytes.
        deciding: what the pyprojects say that decides the content, without their comments.
        extras: those to install.
        groups: those to install, the default ones included.
        folders: local projects that it stands on, itself included.
        files: local distributions that the lock names.
    """

    name: str
    folder: Path
    root: Path
    lock: bytes
    settings: dict[str, bytes]
    deciding: list[Any]
    extras: tuple[str, ...]
    groups: tuple[str, ...]
    folders: tuple[LocalFolder, ...]
    files: tuple[LocalFile, ...]

    def sync_arguments(self) -> tuple[str, ...]:
        """For `uv sync`: nothing of the local folders, which go in as wheels."""
        chosen = [f"--extra={extra}" for extra in self.extras] + [f"--group={group}" for group in self.groups]
        if self.root != self.folder:
            chosen.append(f"--package={self.name}")
        left_out = [f"--no-install-package={folder.name}" for folder in self.folders if folder.installable]
        return ("--no-default-groups", "--no-install-project", *chosen, *left_out)


def read_project(
    folder: str | Path,
    *,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    default_groups: bool = False,
    no_groups: Sequence[str] = (),
    python: str,
) -> Project:
    """Read the project in a folder. Nothing is started.

    Raises:
        ValueError: there is no project, or no lock, or it has no such extra or group.
    """
    folder = Path(folder)
    own = _pyproject(folder)
    if own is None:
        raise ValueError(f"there is no pyproject.toml in {folder}")
    pyproject = _read(own, folder / "pyproject.toml")
    root = _root(folder)
    lock = (root / "uv.lock").read_bytes()
    name = pyproject.get("project", {}).get("name", "")
    _known("extra", extras, pyproject.get("project", {}).get("optional-dependencies", {}), folder)
    known_groups = _groups(pyproject)
    _known("group", groups, known_groups, folder)
    chosen = {*groups, *(_defaults(pyproject, known_groups) if default_groups else ())} - set(no_groups)
    ordered = tuple(sorted(chosen))
    try:
        folders, files = local_parts(lock, name, tuple(extras), ordered, python)
    except ValueError as error:
        raise ValueError(f"{root / 'uv.lock'} cannot be read: {error}") from None
    settings = {name: path.read_bytes() for name in ("pyproject.toml", "uv.toml") if (path := root / name).is_file()}
    parts = [pyproject]
    if root != folder:
        parts.append(_read(settings["pyproject.toml"], root / "pyproject.toml"))
    deciding = [_deciding(part) for part in parts]
    if "uv.toml" in settings:
        deciding.append(_read(settings["uv.toml"], root / "uv.toml"))
    return Project(name, folder, root, lock, settings, deciding, tuple(extras), ordered, folders, files)


def _pyproject(folder: Path) -> bytes | None:
    try:
        return (folder / "pyproject.toml").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _root(folder: Path) -> Path:
    """Where the lock of a project is: with it, or with the workspace above."""
    if (folder / "uv.lock").is_file():
        return folder
    for above in folder.parents:
        content = _pyproject(above)
        if content is None:
            continue
        if "workspace" in _read(content, above / "pyproject.toml").get("tool", {}).get("uv", {}):
            if (above / "uv.lock").is_file():
                return above
            break
    raise ValueError(f"there is no uv.lock in {folder}, nor in a workspace above it. Make one: run `uv lock` there")


def _groups(pyproject: dict[str, Any]) -> set[str]:
    old_fashioned = {"dev"} if "dev-dependencies" in pyproject.get("tool", {}).get("uv", {}) else set()
    return set(pyproject.get("dependency-groups", {})) | old_fashioned


def _defaults(pyproject: dict[str, Any], known: set[str]) -> Iterable[str]:
    defaults = pyproject.get("tool", {}).get("uv", {}).get("default-groups", ["dev"])
    return known if defaults == "all" else known & set(defaults)


def _known(what: str, asked: Iterable[str], known: Iterable[str], folder: Path) -> None:
    def spelled(name: str) -> str:
        return name.lower().replace("_", "-").replace(".", "-")

    there = {spelled(name) for name in known}
    if unknown := [name for name in asked if spelled(name) not in there]:
        found = ", ".join(sorted(known)) or "none"
        raise ValueError(f"the project in {folder} has no {what} {', '.join(unknown)}. Found: {found}")


def _deciding(pyproject: dict[str, Any]) -> dict[str, Any]:
    uv = pyproject.get("tool", {}).get("uv", {})
    return {**{name: pyproject[name] for name in DECIDING if name in pyproject}, "tool.uv": uv}

# SPDX-License-Identifier: Apache-2.0
"""Reads a project as uv does: its pyproject, its lock, and the parts of both that decide an environment."""

import functools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import NormalizedName, canonicalize_name

from .._build.recipe import this_python
from .requirements import applies
from .spec import BaseSpec

# Cheap to search: most locks name nothing local but their own project, and some have a megabyte.
LOCAL = rb'^source = \{ (?:editable|virtual|directory|path|registry) = "(?![a-z+]+://)([^"]*)"'
FOLDERS = ("editable", "directory", "virtual")


@dataclass(frozen=True)
class LocalFolder:
    """A project that the lock takes from a folder, relative to the lock, and whether a wheel can be built of it."""

    name: str
    path: str
    installable: bool


@dataclass(frozen=True)
class Locked:
    """A lock, and what an installation takes from it: the groups include the default ones."""

    lock: bytes
    name: str
    extras: tuple[str, ...]
    groups: tuple[str, ...]
    python: str

    def find_versions(self, distribution: str) -> frozenset[str]:
        """Return the versions of a distribution that the lock may install: several if it has forks."""
        # A cheap search first, as most locks are large.
        if not re.search(rb'^name = "' + re.escape(distribution.encode()) + rb'"$', self.lock, flags=re.MULTILINE):
            return frozenset()
        return frozenset(
            one["version"] for one in _list_reached(self) if one["name"] == distribution and "version" in one
        )


@functools.lru_cache(maxsize=16)
def find_local_parts(locked: Locked) -> tuple[tuple[LocalFolder, ...], tuple[str, ...]]:
    """Return the local folders, the project's own among them, and files that an installation may need, each once."""
    lock = locked.lock
    if set(re.findall(LOCAL, lock, flags=re.MULTILINE)) <= {b"."}:
        own = re.search(rb'^source = \{ (editable|virtual|directory) = "\." \}', lock, flags=re.MULTILINE)
        return ((LocalFolder(locked.name, ".", own[1] != b"virtual"),) if own else ()), ()
    folders: list[LocalFolder] = []
    files: list[str] = []
    for package in _list_reached(locked):
        source = package.get("source", {})
        kind = next(iter(source), "")
        if kind in FOLDERS:
            folders.append(LocalFolder(package["name"], source[kind], kind != "virtual"))
        elif kind == "path":
            files.append(source[kind])
        elif kind == "registry" and "://" not in source[kind]:
            entries = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            files += [f"{source[kind]}/{entry['path']}" for entry in entries if "path" in entry]
    return tuple(folders), tuple(files)


def _list_reached(locked: Locked) -> list[Mapping[str, Any]]:
    """Return the packages of a lock that an installation may need."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for package in tomllib.loads(locked.lock.decode()).get("package", []):
        by_name.setdefault(package["name"], []).append(package)
    seen: dict[tuple[str, str], None] = {}
    own = str(canonicalize_name(locked.name))
    todo = [(own, extra) for extra in ("", *locked.extras)]
    for package in by_name.get(own, []):
        for group in locked.groups:
            todo += _list_edges(package.get("dev-dependencies", {}).get(group, []), locked.python)
    while todo:
        key = todo.pop()
        if key in seen:
            continue
        seen[key] = None
        for package in by_name.get(key[0], []):
            of_extra = package.get("optional-dependencies", {}).get(key[1], [])
            todo += _list_edges(of_extra if key[1] else package.get("dependencies", []), locked.python)
    return [package for one in {name: None for name, _ in seen} for package in by_name.get(one, [])]


def _list_edges(dependencies: Iterable[Mapping[str, Any]], python: str) -> Iterator[tuple[str, str]]:
    for dependency in dependencies:
        if applies(dependency.get("marker", ""), python):
            yield from ((dependency["name"], extra) for extra in ("", *dependency.get("extra", [])))


# The tables of a pyproject that decide the content. The others configure tools that do not install.
DECIDING = ("build-system", "dependency-groups", "project")


@dataclass(frozen=True)
class Project(Locked):
    """A project, read once, with its lock."""

    folder: Path
    root: Path  # the folder of the lock: that of the workspace if the project is part of one
    settings: dict[str, bytes]  # the pyproject.toml and uv.toml of the root
    deciding: str  # the parts of the pyprojects that decide the content, without comments, as JSON
    folders: tuple[LocalFolder, ...]
    files: tuple[str, ...]  # relative to the lock

    def sync_arguments(self) -> tuple[str, ...]:
        """Return arguments for `uv sync` that leave out the local folders, which are installed as wheels."""
        chosen = [f"--extra={extra}" for extra in self.extras] + [f"--group={group}" for group in self.groups]
        if self.root != self.folder:
            chosen.append(f"--package={self.name}")
        left_out = [f"--no-install-package={folder.name}" for folder in self.folders if folder.installable]
        return ("--no-default-groups", "--no-install-project", *chosen, *left_out)


def read_project(spec: BaseSpec) -> Project | None:
    """Read the project of a spec; None if it has none. No process is started."""
    if spec.project is None:
        return None
    folder = Path(spec.project)
    pyproject = read_pyproject(folder)
    if pyproject is None:
        raise ValueError(f"there is no pyproject.toml in {folder}")
    root = _find_root(folder)
    lock = (root / "uv.lock").read_bytes()
    table = pyproject.get("project", {})
    extras = _check_names("extra", spec.extras, table.get("optional-dependencies", {}), folder)
    locked = lock, table.get("name", ""), extras, _choose_groups(spec, pyproject), spec.python or this_python()
    try:
        folders, files = find_local_parts(Locked(*locked))
    except ValueError as error:
        raise ValueError(f"{root / 'uv.lock'} cannot be read: {error}") from None
    settings = {name: path.read_bytes() for name in ("pyproject.toml", "uv.toml") if (path := root / name).is_file()}
    parts = [pyproject]
    if root != folder:
        parts.append(_parse(settings["pyproject.toml"], root / "pyproject.toml"))
    facts = [_select_deciding(part) for part in parts]
    if "uv.toml" in settings:
        facts.append(_parse(settings["uv.toml"], root / "uv.toml"))
    deciding = json.dumps(facts, sort_keys=True, default=str)
    return Project(*locked, folder, root, settings, deciding, folders, files)


def read_pyproject(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's pyproject.toml; None if it has none."""
    path = folder / "pyproject.toml"
    try:
        return _parse(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _find_root(folder: Path) -> Path:
    """Return the folder of a project's lock: its own, or that of the workspace above."""
    if (folder / "uv.lock").is_file():
        return folder
    for above in folder.parents:
        if "workspace" in (read_pyproject(above) or {}).get("tool", {}).get("uv", {}):
            if (above / "uv.lock").is_file():
                return above
            break
    raise ValueError(f"there is no uv.lock in {folder}, nor in a workspace above it. Create it: run `uv lock` there")


def _choose_groups(spec: BaseSpec, pyproject: dict[str, Any]) -> tuple[str, ...]:
    """Return the groups to install, the default ones included."""
    uv = pyproject.get("tool", {}).get("uv", {})
    written = [*pyproject.get("dependency-groups", {}), *(["dev"] if "dev-dependencies" in uv else [])]
    known = {canonicalize_name(name) for name in written}
    defaults = uv.get("default-groups", ["dev"]) if spec.default_groups else []
    chosen = known if defaults == "all" else known.intersection(map(canonicalize_name, defaults))
    chosen = chosen.union(_check_names("group", spec.groups, written, spec.project))
    return tuple(sorted(chosen.difference(map(canonicalize_name, spec.no_groups))))


def _check_names(what: str, wanted: Iterable[str], known: Iterable[str], folder: Any) -> tuple[NormalizedName, ...]:
    """Return names as they are in a lock; a ValueError for those that are not known."""
    there = {canonicalize_name(name) for name in known}
    if unknown := [name for name in wanted if canonicalize_name(name) not in there]:
        found = ", ".join(sorted(known)) or "none"
        raise ValueError(f"the project in {folder} has no {what} {', '.join(unknown)}. Found: {found}")
    return tuple(map(canonicalize_name, wanted))


def _select_deciding(pyproject: dict[str, Any]) -> dict[str, Any]:
    uv = pyproject.get("tool", {}).get("uv", {})
    return {**{name: pyproject[name] for name in DECIDING if name in pyproject}, "tool.uv": uv}

# SPDX-License-Identifier: Apache-2.0
"""What a uv.lock says about folders and files of this machine. Everything else in it is uv's business."""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from .requirements import applies

__all__ = ["LocalFile", "LocalFolder", "local_parts", "locked_versions"]

# Cheap to look for: most locks name nothing local but their own project, and some are a megabyte.
LOCAL = rb'^source = \{ (?:editable|virtual|directory|path|registry) = "(?![a-z+]+://)([^"]*)"'
FOLDERS = ("editable", "directory", "virtual")


@dataclass(frozen=True)
class LocalFolder:
    """A project that the lock takes from a folder.

    Attributes:
        name: of its distribution.
        path: relative to the lock.
        installable: whether there is a wheel of it.
    """

    name: str
    path: str
    installable: bool


@dataclass(frozen=True)
class LocalFile:
    """A distribution that the lock takes from a file; its path, relative to the lock."""

    path: str


@functools.lru_cache(maxsize=16)
def local_parts(
    lock: bytes, name: str, extras: tuple[str, ...], groups: tuple[str, ...], python: str
) -> tuple[tuple[LocalFolder, ...], tuple[LocalFile, ...]]:
    """The folders and files that an installation of the project `name` takes, each once, the project's own included.

    Where it cannot be told whether a dependency applies, it is taken.
    """
    if set(re.findall(LOCAL, lock, flags=re.MULTILINE)) <= {b"."}:
        own = re.search(rb'^source = \{ (editable|virtual|directory) = "\." \}', lock, flags=re.MULTILINE)
        return ((LocalFolder(name, ".", own[1] != b"virtual"),) if own else ()), ()
    packages = tomllib.loads(lock.decode()).get("package", [])
    folders: list[LocalFolder] = []
    files: list[LocalFile] = []
    for package in _reached(packages, name, extras, groups, python):
        source = package.get("source", {})
        kind = next(iter(source), "")
        if kind in FOLDERS:
            folders.append(LocalFolder(package["name"], source[kind], kind != "virtual"))
        elif kind == "path":
            files.append(LocalFile(source[kind]))
        elif kind == "registry" and "://" not in source[kind]:
            entries = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            files += [LocalFile(f"{source[kind]}/{entry['path']}") for entry in entries if "path" in entry]
    return tuple(folders), tuple(files)


def locked_versions(
    lock: bytes, distribution: str, name: str, extras: tuple[str, ...], groups: tuple[str, ...], python: str
) -> frozenset[str]:
    """Return the versions of a distribution that an installation of the project `name` may take; none if it takes none.

    There are several when the lock has forks, such as one for each platform.
    """
    # Cheap to look for, as most locks are large.
    if not re.search(rb'^name = "' + re.escape(distribution.encode()) + rb'"$', lock, flags=re.MULTILINE):
        return frozenset()
    packages = tomllib.loads(lock.decode()).get("package", [])
    reached = _reached(packages, name, extras, groups, python)
    return frozenset(one["version"] for one in reached if one["name"] == distribution and "version" in one)


def _reached(
    packages: Iterable[Mapping[str, Any]], name: str, extras: Iterable[str], groups: Iterable[str], python: str
) -> list[Mapping[str, Any]]:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for package in packages:
        by_name.setdefault(package["name"], []).append(package)
    seen: dict[tuple[str, str], None] = {}
    own = by_name.get(canonicalize_name(name), [])
    todo = [(name, extra) for extra in ("", *extras)]
    for package in own:
        for group in groups:
            todo += _edges(package.get("dev-dependencies", {}).get(group, []), python)
    while todo:
        key = todo.pop()
        if key in seen:
            continue
        seen[key] = None
        for package in by_name.get(key[0], []):
            of_extra = package.get("optional-dependencies", {}).get(key[1], [])
            todo += _edges(of_extra if key[1] else package.get("dependencies", []), python)
    return [package for one in {name: None for name, _ in seen} for package in by_name.get(one, [])]


def _edges(dependencies: Iterable[Mapping[str, Any]], python: str) -> Iterator[tuple[str, str]]:
    for dependency in dependencies:
        if applies(dependency.get("marker", ""), python):
            yield from ((dependency["name"], extra) for extra in ("", *dependency.get("extra", [])))

# SPDX-License-Identifier: Apache-2.0
"""Reads from a uv.lock the folders and files of this machine, and the versions of a distribution."""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from .requirements import applies

# Cheap to search: most locks name nothing local but their own project, and some have a megabyte.
LOCAL = rb'^source = \{ (?:editable|virtual|directory|path|registry) = "(?![a-z+]+://)([^"]*)"'
FOLDERS = ("editable", "directory", "virtual")


@dataclass(frozen=True)
class LocalFolder:
    """A project that the lock takes from a folder.

    Attributes:
        name: the name of its distribution.
        path: its path, relative to the lock.
        installable: whether a wheel can be built of it.
    """

    name: str
    path: str
    installable: bool


@functools.lru_cache(maxsize=16)
def find_local_parts(
    lock: bytes, name: str, extras: tuple[str, ...], groups: tuple[str, ...], python: str
) -> tuple[tuple[LocalFolder, ...], tuple[str, ...]]:
    """Return the local folders and files that an installation of the project `name` needs, each once.

    The project's own folder is among them, and so are dependencies whose markers cannot be evaluated. Paths are
    relative to the lock.
    """
    if set(re.findall(LOCAL, lock, flags=re.MULTILINE)) <= {b"."}:
        own = re.search(rb'^source = \{ (editable|virtual|directory) = "\." \}', lock, flags=re.MULTILINE)
        return ((LocalFolder(name, ".", own[1] != b"virtual"),) if own else ()), ()
    packages = tomllib.loads(lock.decode()).get("package", [])
    folders: list[LocalFolder] = []
    files: list[str] = []
    for package in _list_reached(packages, name, extras, groups, python):
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


def find_locked_versions(
    lock: bytes, distribution: str, name: str, extras: tuple[str, ...], groups: tuple[str, ...], python: str
) -> frozenset[str]:
    """Return the versions of a distribution that an installation of the project `name` may use; empty if it uses none.

    There are several if the lock has forks, such as one for each platform.
    """
    # A cheap search first, as most locks are large.
    if not re.search(rb'^name = "' + re.escape(distribution.encode()) + rb'"$', lock, flags=re.MULTILINE):
        return frozenset()
    packages = tomllib.loads(lock.decode()).get("package", [])
    reached = _list_reached(packages, name, extras, groups, python)
    return frozenset(one["version"] for one in reached if one["name"] == distribution and "version" in one)


def _list_reached(
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
            todo += _list_edges(package.get("dev-dependencies", {}).get(group, []), python)
    while todo:
        key = todo.pop()
        if key in seen:
            continue
        seen[key] = None
        for package in by_name.get(key[0], []):
            of_extra = package.get("optional-dependencies", {}).get(key[1], [])
            todo += _list_edges(of_extra if key[1] else package.get("dependencies", []), python)
    return [package for one in {name: None for name, _ in seen} for package in by_name.get(one, [])]


def _list_edges(dependencies: Iterable[Mapping[str, Any]], python: str) -> Iterator[tuple[str, str]]:
    for dependency in dependencies:
        if applies(dependency.get("marker", ""), python):
            yield from ((dependency["name"], extra) for extra in ("", *dependency.get("extra", [])))

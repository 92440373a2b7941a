# SPDX-License-Identifier: Apache-2.0
"""What a machine has to know to build an environment: plain data, made by the driver, shipped to nodes."""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Files", "Outcome", "Recipe", "this_platform"]

# Relative paths and what stands there: bytes, or the path of a file on this machine. Called only if needed.
Files = Callable[[], Iterable[tuple[str, "bytes | Path"]]]


@dataclass(frozen=True)
class Recipe:
    """How to build one environment.

    Attributes:
        fingerprint: of everything that decides the content.
        request: hash of what was asked for, whatever its requirements were resolved to.
        folder: where it will be, on every machine.
        platform: for which it is, as `this_platform`.
        python: version of the interpreter, "3.11" or "3.11.7".
        implementation: of the interpreter, "cpython".
        system_site_packages: whether it sees what is installed for its base interpreter.
        requirements: lines for `uv pip install --no-deps`, one for each distribution; paths are relative to the files.
            None for a project.
        sync: for a project: further arguments of `uv sync`, which runs in `project`.
        project: folder of the project's lock among the files.
        wheels: files to install at last, without what they depend on.
        links: folders among the files, URLs, and folders that a machine may have, where uv finds distributions.
        config: uv's configuration among the files; empty without.
        build_constraints: constraints for building source distributions, among the files or URLs.
        no_index: ask no package index.
        env: variables for uv and for the setup command.
        setup: a command that is run inside at the end.
        about: for people, written into the manifest; without credentials.
        secrets: what must not be seen.
    """

    fingerprint: str
    request: str
    folder: str
    platform: str
    python: str
    implementation: str
    system_site_packages: bool
    requirements: tuple[str, ...] | None
    sync: tuple[str, ...]
    project: str
    wheels: tuple[str, ...]
    links: tuple[str, ...]
    config: str
    build_constraints: tuple[str, ...]
    no_index: bool
    env: Mapping[str, str]
    setup: tuple[str, ...]
    about: str
    secrets: frozenset[str]


@dataclass(frozen=True)
class Outcome:
    """An environment that is ready.

    Attributes:
        python: path of its interpreter.
        built: whether this call built it.
        version: of its Python, "3.11.7".
        ray: version of Ray in it; None without.
        shared: whether other hosts use its folder, or could.
    """

    python: str
    built: bool
    version: str
    ray: str | None
    shared: bool = False


def this_platform() -> str:
    """What binaries have to fit: "linux-x86_64-glibc"."""
    libc = "glibc" if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else "other"
    return f"{sys.platform}-{platform.machine()}-{libc}"

# SPDX-License-Identifier: Apache-2.0
"""The plain data that the driver sends to a node to build an environment, and the answer of the node."""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# A relative path, and its content: bytes, or the path of a file on this machine.
File = tuple[str, "bytes | Path"]


@dataclass(frozen=True)
class Recipe:
    """How to build one environment. In a draft, the requirements are not resolved."""

    fingerprint: str  # of everything that decides the content; empty in a draft
    request: str  # hash of the request, which does not depend on the versions that requirements were resolved to
    folder: str  # of the environment on every machine; in a draft, that of all environments
    platform: str
    python: str
    implementation: str
    system_site_packages: bool
    requirements: tuple[str, ...] | None  # for `uv pip install --no-deps` beside the files; None for a project
    sync: tuple[str, ...]  # further arguments of `uv sync` for a project
    project: str  # the folder among the files in which it runs
    wheels: tuple[str, ...]  # files to install last, without their dependencies
    links: tuple[str, ...]  # folders among the files, URLs, and folders that a machine may have, with distributions
    no_index: bool
    env: Mapping[str, str]
    setup: tuple[str, ...]
    description: str  # for people, without credentials
    secrets: frozenset[str]


class Outcome(NamedTuple):
    """An environment that is ready."""

    python: str
    built: bool
    version: str
    ray: str | None


def this_platform() -> str:
    """Return the platform that binaries have to fit, such as "linux-x86_64-glibc"."""
    libc = "glibc" if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else "other"
    return f"{sys.platform}-{platform.machine()}-{libc}"


def this_python(parts: int = 2) -> str:
    """Return the first parts of the version of this Python, by default major and minor, such as "3.11"."""
    return ".".join(map(str, sys.version_info[:parts]))

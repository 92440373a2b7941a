# SPDX-License-Identifier: Apache-2.0
"""Share the bytecode of installed packages between environments, so that each module is compiled once.

A module has the same bytecode wherever the same file is installed. Before Python uses it, it checks the time and the
size of the file, so these are written for each environment.
"""

import contextlib
import csv
import importlib.util
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The magic number and the flags, which are 0 if the time and the size of the file follow.
CHECKED_BY_TIME = importlib.util.MAGIC_NUMBER + bytes(4)
HEADER = 16


def list_modules(packages: Path) -> Iterator[tuple[str, Path]]:
    """Yield the digest and the path of each module in a folder of installed packages, as their records say."""
    for record in packages.glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as rows:
            for path, digest, *_ in csv.reader(rows):
                if path.endswith(".py") and digest.startswith("sha256="):
                    yield digest.removeprefix("sha256="), packages / path


def find_stored(store: Path, digest: str) -> Path:
    return store / f"{digest}.{sys.implementation.cache_tag}.pyc"


def keep(packages: Path, store: Path) -> None:
    """Copy what has been compiled in a folder of installed packages."""
    for digest, module in list_modules(packages):
        stored = find_stored(store, digest)
        if not stored.exists():
            with contextlib.suppress(FileNotFoundError):
                write(stored, Path(importlib.util.cache_from_source(module)).read_bytes())


def fetch(packages: Path, store: Path) -> None:
    """Provide a folder of installed packages with what has been compiled elsewhere."""
    for digest, module in list_modules(packages):
        compiled = Path(importlib.util.cache_from_source(module))
        if compiled.exists():
            continue
        with contextlib.suppress(FileNotFoundError):
            code = find_stored(store, digest).read_bytes()
            if code.startswith(CHECKED_BY_TIME):
                file = module.stat()
                checked = struct.pack("<II", int(file.st_mtime) & 0xFFFFFFFF, file.st_size & 0xFFFFFFFF)
                write(compiled, CHECKED_BY_TIME + checked + code[HEADER:])


def write(path: Path, content: bytes) -> None:
    """Write a file that others see as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    with open(number, "wb") as file:
        file.write(content)
    os.replace(name, path)

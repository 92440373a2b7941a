# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md shows every module of every package, and no module that does not exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path.parent for path in ROOT.glob("packages/*/src/*/__init__.py"))
NAME = re.compile(r"`([a-z_]+/?)`")


def read_rows(package: str) -> Iterator[tuple[list[str], set[str]]]:
    """Return the names in the first cell of each row of a package's table, and those in its other cell."""
    in_table = False
    for line in (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            in_table = False
            continue
        first, _, rest = line.strip("|").partition("|")
        if f"`{package}`" in first:
            in_table = True
        elif in_table and NAME.search(first):
            yield NAME.findall(first), set(NAME.findall(rest))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_module(source):
    """Each module and each folder of a package has its line, and the line of a folder names the modules in it."""
    found = {path.name + "/" for path in source.iterdir() if (path / "__init__.py").exists()}
    found |= {path.stem for path in source.glob("*.py")} - {"__init__"}
    rows = list(read_rows(source.name))
    listed = [name for names, _ in rows for name in names]
    assert sorted(listed) == sorted(found)
    for names, inside in rows:
        for folder in (name for name in names if name.endswith("/")):
            modules = {path.stem for path in (source / folder).rglob("*.py")} - {"__init__"}
            assert modules <= inside, f"{folder} has more modules: {sorted(modules - inside)}"

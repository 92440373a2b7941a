# SPDX-License-Identifier: Apache-2.0
"""Change the version of a package in both places: `__version__`, and the first heading of its changelog.

bump.py placement minor         raise the version, unreleased; also major, patch, or a version such as 0.3.0
bump.py placement release       replace "unreleased" by today's date
bump.py --tag placement-v0.3.0  print the package that this tag releases

The script reports an error before it writes any file. RELEASING.md explains when to use each command.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "unreleased"
NUMBER = r"(?:0|[1-9]\d*)"
VERSION = re.compile(rf"{NUMBER}\.{NUMBER}\.{NUMBER}", re.ASCII)
ASSIGNMENT = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
FIRST = re.compile(rf"({VERSION.pattern}) \(({UNRELEASED}|\d{{4}}-\d\d-\d\d)\)", re.ASCII)


def parse(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version.

    >>> parse("0.10.2")
    (0, 10, 2)
    """
    if VERSION.fullmatch(version) is None:
        raise ValueError(f"a version is three numbers, such as 0.3.0, not {version!r}")
    return tuple(map(int, version.split(".")))


def raise_version(version: str, to: str) -> str:
    """Return the next major, minor or patch version; or `to` itself if it is a higher version.

    >>> raise_version("0.1.2", "minor"), raise_version("0.1.2", "0.4.0")
    ('0.2.0', '0.4.0')
    """
    major, minor, patch = parse(version)
    steps = {"major": (major + 1, 0, 0), "minor": (major, minor + 1, 0), "patch": (major, minor, patch + 1)}
    if to not in steps and VERSION.fullmatch(to) is None:
        raise ValueError(f"{to!r} is neither major, minor, patch or release nor a version such as 0.3.0")
    numbers = steps[to] if to in steps else parse(to)
    if numbers <= parse(version):
        raise ValueError(f"{to} is not higher than {version}")
    return ".".join(map(str, numbers))


def read_assignment(init: str) -> str:
    """Return the version that the text of an `__init__.py` assigns."""
    found = ASSIGNMENT.findall(init)
    if len(found) != 1:
        raise ValueError(f'expected one line __version__ = "...", found {len(found)}')
    parse(found[0])
    return str(found[0])


def read_heading(changelog: str) -> tuple[str, str]:
    """Return the version and the date (or "unreleased") of the first section of a changelog."""
    heading = HEADING.search(changelog)
    first = heading and FIRST.fullmatch(heading[1])
    if not first:
        found = repr(heading[0]) if heading else "none"
        raise ValueError(f"expected '## 0.3.0 (unreleased)' or '## 0.3.0 (2026-05-04)' as first heading, found {found}")
    return first[1], first[2]


def open_section(changelog: str, version: str) -> str:
    """Return the changelog with an unreleased section of this version on top.

    An unreleased section that exists is renamed; otherwise a new section is added.
    """
    _, date = read_heading(changelog)
    new = f"## {version} ({UNRELEASED})"
    return HEADING.sub(new if date == UNRELEASED else rf"{new}\n\n\g<0>", changelog, count=1)


def date_section(changelog: str, day: str) -> str:
    """Return the changelog with its first section, which must be unreleased, released on this day."""
    version, date = read_heading(changelog)
    if date != UNRELEASED:
        raise ValueError(f"{version} was released on {date}: first raise the version, with major, minor or patch")
    if not HEADING.split(changelog, maxsplit=2)[2].strip():
        raise ValueError(f"the changelog section of {version} is empty")
    return HEADING.sub(f"## {version} ({day})", changelog, count=1)


@dataclass(frozen=True)
class Package:
    """The two files of a package, and the version and date in them."""

    init: Path
    changelog: Path
    version: str
    date: str


def read(root: Path, name: str) -> Package:
    """Return the package of this name.

    Raises:
        ValueError: If there is no such package, or if its two files disagree.
    """
    folders = {folder.parent.name: folder.parent for folder in root.glob("packages/*/pyproject.toml")}
    if name not in folders:
        raise ValueError(f"there is no package {name!r}, only {', '.join(sorted(folders))}")
    init = folders[name] / "src" / f"fairlead_{name.replace('-', '_')}" / "__init__.py"
    changelog = folders[name] / "CHANGELOG.md"
    version = read_assignment(init.read_text(encoding="utf-8"))
    heading, date = read_heading(changelog.read_text(encoding="utf-8"))
    if heading != version:
        raise ValueError(f"the changelog of {name} begins with {heading}, its __version__ is {version}")
    return Package(init, changelog, version, date)


def check_committed(root: Path, package: Package) -> None:
    """Raise ValueError if one of the two files has uncommitted changes."""
    files = str(package.init), str(package.changelog)
    status = subprocess.run(["git", "status", "--porcelain", "--", *files], cwd=root, capture_output=True, text=True)
    if status.returncode:
        raise ValueError(f"git cannot tell whether {' and '.join(files)} are committed: {status.stderr.strip()}")
    if status.stdout:
        raise ValueError(f"commit or stash these first:\n{status.stdout.rstrip()}")


def bump(root: Path, name: str, to: str) -> str:
    """Raise the version of a package, or date it, and return a line that names the new version."""
    package = read(root, name)
    init, changelog = (file.read_text(encoding="utf-8") for file in (package.init, package.changelog))
    if to == "release":
        version = package.version
        changelog = date_section(changelog, f"{datetime.now(UTC):%Y-%m-%d}")
    else:
        version = raise_version(package.version, to)
        changelog = open_section(changelog, version)
    check_committed(root, package)
    package.init.write_text(ASSIGNMENT.sub(f'__version__ = "{version}"', init), encoding="utf-8")
    package.changelog.write_text(changelog, encoding="utf-8")
    return f"fairlead-{name} {version} ({read_heading(changelog)[1]})"


def find_tagged_package(root: Path, tag: str) -> str:
    """Return the name of the package that a tag releases."""
    name, _, version = tag.rpartition("-v")
    package = read(root, name)
    if version != package.version:
        raise ValueError(f"the tag says {version!r}, the tree {package.version}")
    if package.date == UNRELEASED:
        raise ValueError(f"{name} {version} has no date: run `python scripts/bump.py {name} release` before you tag it")
    return name


def main(arguments: list[str]) -> str:
    match arguments:
        case ["--tag", tag]:
            return find_tagged_package(ROOT, tag)
        case [name, to]:
            return bump(ROOT, name, to)
        case _:
            raise ValueError(f"expected a package and a change of its version\n\n{__doc__}")


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.argv[1:]) + "\n")
    except ValueError as error:
        sys.exit(f"bump: {error}")

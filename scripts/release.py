# SPDX-License-Identifier: Apache-2.0
"""Date the changelog of a package for its release, or read a tag. RELEASING.md explains when to use each command.

release.py placement                put the version and today's date in place of "Unreleased", and print the tag
release.py --tag placement-v0.3.0   print the package that this tag releases
"""

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_version(name: str) -> str:
    """Return the version of a package, which only its `__init__.py` holds; `hatchling version` changes it there."""
    init = ROOT / "packages" / name / "src" / f"fairlead_{name.replace('-', '_')}" / "__init__.py"
    if not init.is_file():
        names = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
        raise ValueError(f"there is no package {name!r}, only {', '.join(names)}")
    (version,) = re.findall(r'^__version__ = "(.*)"$', init.read_text(encoding="utf-8"), re.MULTILINE)
    return str(version)


def date_changelog(name: str) -> str:
    """Put the version and today's date in place of the heading "Unreleased", and return the tag of the release."""
    version, changelog = read_version(name), ROOT / "packages" / name / "CHANGELOG.md"
    head, found, rest = changelog.read_text(encoding="utf-8").partition("## Unreleased\n")
    if not found or not rest.partition("\n## ")[0].strip():
        raise ValueError(f"the changelog of {name} has no changes below a heading '## Unreleased'")
    if f"\n## {version} (" in rest:
        raise ValueError(f"{name} {version} was released: raise the version with `hatchling version` in its folder")
    changelog.write_text(f"{head}## {version} ({datetime.now(UTC):%Y-%m-%d})\n{rest}", encoding="utf-8")
    return f"{name}-v{version}"


def read_tag(tag: str) -> str:
    """Return the package that a tag releases."""
    name, _, version = tag.rpartition("-v")
    if version != read_version(name):
        raise ValueError(f"the tag says {version!r}, the tree {read_version(name)}")
    changelog = (ROOT / "packages" / name / "CHANGELOG.md").read_text(encoding="utf-8")
    if re.search(r"^## (.*)$", changelog, re.MULTILINE)[1].split(" (")[0] != version:  # type: ignore[index]
        raise ValueError(f"the changelog of {name} does not begin with {version} and its date")
    return name


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["--tag", tag]:
                sys.stdout.write(f"{read_tag(tag)}\n")
            case [name] if not name.startswith("-"):
                sys.stdout.write(f"{date_changelog(name)}\n")
            case _:
                raise ValueError(f"expected a package or a tag\n\n{__doc__}")
    except ValueError as error:
        sys.exit(f"release: {error}")

# SPDX-License-Identifier: Apache-2.0
"""Tests that the separately versioned packages agree with each other, their changelogs and the release workflow."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
NAMES = sorted(folder.parent.name for folder in ROOT.glob("packages/*/pyproject.toml"))


def read_version(name: str) -> str:
    """Return the value of `__version__` without importing the package."""
    init = ROOT / "packages" / name / "src" / f"fairlead_{name.replace('-', '_')}" / "__init__.py"
    (value,) = re.findall(r'^__version__ = "(.*)"$', init.read_text(), re.MULTILINE)
    return value


@pytest.mark.parametrize("name", NAMES)
def test_ranges(name):
    """Every declared range of a sibling contains the version in this repository, and has an upper bound."""
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.name.startswith("fairlead-"):
            assert requirement.specifier.contains(read_version(requirement.name.removeprefix("fairlead-"))), requirement
            assert {part.operator for part in requirement.specifier} == {">=", "<"}, requirement


@pytest.mark.parametrize("name", NAMES)
def test_changelog(name):
    """The sections are of released versions, below each other; a section "Unreleased" may stand above them.

    The version in the tree is the newest released one, or a higher one while there are unreleased changes.
    """
    text = (ROOT / "packages" / name / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    unreleased = headings[0] == "Unreleased"
    found = [re.fullmatch(r"(\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)", heading) for heading in headings[unreleased:]]
    assert all(found), headings
    versions = [Version(match[1]) for match in found]
    assert versions == sorted(set(versions), reverse=True)
    current = Version(read_version(name))
    assert not versions or (current > versions[0] if unreleased else current == versions[0])


def test_table_of_versions():
    """RELEASING.md lists the versions of siblings that each package works with, as its pyproject.toml declares them."""
    rows = []
    for name in NAMES:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        optional = [(one, extra) for extra, ones in project.get("optional-dependencies", {}).items() for one in ones]
        declared = [(one, "") for one in project["dependencies"]] + optional
        ranges = [
            f"`{one.removeprefix('fairlead-')}`" + (f" for `[{extra}]`" if extra else "")
            for one, extra in declared
            if one.startswith("fairlead-")
        ]
        rows.append(f"| `{name}` {read_version(name).rpartition('.')[0]} | {', '.join(ranges) or 'needs no sibling'} |")
    lines = (ROOT / "RELEASING.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r"\| `[a-z-]+` \d", line)] == rows


def test_licence():
    """Each package contains the licence of the repository, and each Python file names it in its first line."""
    texts = {(ROOT / "packages" / name / "LICENSE").read_text() for name in NAMES}
    assert texts == {(ROOT / "LICENSE").read_text()}
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [name for name in listed.split() if (ROOT / name).is_file()]
    header = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [name for name in files if not (ROOT / name).read_text(encoding="utf-8").startswith(header)] == []


def test_import_contracts():
    """Each package is among those whose imports `lint-imports` checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert sorted(contracts["root_packages"]) == sorted(f"fairlead_{name.replace('-', '_')}" for name in NAMES)


def test_release_workflow():
    """One job publishes each package from its own environment, and RELEASING.md lists all environments."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    environment = jobs["publish"]["environment"]["name"]
    expression = "${{ needs.build.outputs.package }}"
    assert environment.count(expression) == 1
    rows = [f"| `fairlead-{name}` | `{environment.replace(expression, name)}` | `{name}-v*` |" for name in NAMES]
    releasing = (ROOT / "RELEASING.md").read_text().splitlines()
    assert [line for line in releasing if line.startswith("| `fairlead-")] == rows

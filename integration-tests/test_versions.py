# SPDX-License-Identifier: Apache-2.0
"""Tests that the separately versioned packages agree with each other, their changelogs and the tools."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
NAMES = sorted(folder.parent.name for folder in ROOT.glob("packages/*/pyproject.toml"))


def project(name: str) -> dict:
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]


def read_version(name: str) -> str:
    """Return the value of `__version__` without importing the package."""
    init = ROOT / "packages" / name / "src" / f"fairlead_{name.replace('-', '_')}" / "__init__.py"
    values = [
        ast.literal_eval(node.value)
        for node in ast.parse(init.read_text()).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__version__"]
    ]
    assert len(values) == 1, init
    return values[0]


def siblings(name: str) -> dict[str, Requirement]:
    """Return the version ranges that a package declares for its siblings, by sibling."""
    requirements = map(Requirement, project(name)["dependencies"])
    return {one.name.removeprefix("fairlead-"): one for one in requirements if one.name.startswith("fairlead-")}


def closure(name: str) -> set[str]:
    return {part for one in siblings(name) for part in (one, *closure(one))}


@pytest.mark.parametrize("name", NAMES)
def test_ranges(name):
    """Every declared range of a sibling contains the version in this repository, and has an upper bound."""
    for sibling, requirement in siblings(name).items():
        assert requirement.specifier.contains(read_version(sibling)), (
            f"{requirement} and {sibling} {read_version(sibling)}"
        )
        assert {part.operator for part in requirement.specifier} == {">=", "<"}, requirement


@pytest.mark.parametrize("name", NAMES)
def test_changelog(name):
    """The first section is for the current version; the sections below it are for lower, released versions."""
    headings = re.findall(r"^## (.+)$", (ROOT / "packages" / name / "CHANGELOG.md").read_text(), re.MULTILINE)
    found = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((unreleased|\d{4}-\d\d-\d\d)\)", heading) for heading in headings]
    assert all(found), headings
    assert headings[0].split()[0] == read_version(name)
    versions = [tuple(map(int, match.groups()[:3])) for match in found]
    assert versions == sorted(set(versions), reverse=True)
    assert "unreleased" not in [match[4] for match in found[1:]]


@pytest.mark.parametrize("name", NAMES)
def test_installed(name):
    """The version in the metadata of an installed package is the version in the repository."""
    try:
        installed = version(f"fairlead-{name}")
    except PackageNotFoundError:
        pytest.skip("The package is not installed.")
    assert installed == read_version(name)


def test_siblings_of_nox(tmp_path):
    """The noxfile installs exactly the siblings that a package declares, dependencies first."""
    pytest.importorskip("nox", reason="needs nox")
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    declared = {
        "base": ["numpy>=1.26"],
        "on-base": ["fairlead-base>=0.1,<0.2", "ray"],
        "on-both": ["fairlead-on-base[extra]>=0.1,<0.2"],
    }
    for name, dependencies in ({name: project(name)["dependencies"] for name in NAMES} | declared).items():
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(dependencies)}\n")
    printed = "import json, noxfile; print(json.dumps(noxfile.SIBLINGS))"
    found = json.loads(subprocess.check_output([sys.executable, "-c", printed], cwd=tmp_path, text=True, timeout=60))
    assert {name: found.pop(name) for name in declared} == {
        "base": [],
        "on-base": ["base"],
        "on-both": ["base", "on-base"],
    }
    assert {name: sorted(siblings) for name, siblings in found.items()} == {
        name: sorted(closure(name)) for name in NAMES
    }


def test_projects_have_the_same_metadata():
    """All packages have the same Python range, licence and build; only the operating system classifier may differ."""
    alike = set()
    for name in NAMES:
        metadata = project(name)
        classifiers = [one for one in metadata["classifiers"] if not one.startswith("Operating System ::")]
        assert len(classifiers) == len(metadata["classifiers"]) - 1, name
        build = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["build-system"]
        keys = "requires-python", "license", "license-files", "authors", "dynamic", "readme"
        alike.add(repr((classifiers, build, [metadata[key] for key in keys])))
        assert metadata["name"] == f"fairlead-{name}"
    assert len(alike) == 1, "\n".join(sorted(alike))


def test_packages_have_the_same_licence():
    """Each package contains the licence of the repository."""
    texts = {(ROOT / "packages" / name / "LICENSE").read_text() for name in NAMES}
    assert texts == {(ROOT / "LICENSE").read_text()}


def test_pythons():
    """The Python versions of the classifiers start at `requires-python` and have no gaps."""
    metadata = project(NAMES[0])
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(metadata["classifiers"]), re.MULTILINE)
    assert metadata["requires-python"] == f">={pythons[0]}"
    assert pythons == [f"3.{minor}" for minor in range(int(pythons[0][2:]), int(pythons[0][2:]) + len(pythons))]


def test_every_package_is_listed():
    """Each package is listed in the import contracts and in the table of README.md, with its operating system."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    imports = sorted(f"fairlead_{name.replace('-', '_')}" for name in NAMES)
    assert sorted(linter["root_packages"]) == imports
    layers = next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    assert sorted(" | ".join(layers).split(" | ")) == imports
    row = r"\| \[fairlead-(\S+)\]\(packages/(\S+)/README\.md\) \|.*\| (.*) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    systems = {"Operating System :: POSIX :: Linux": "Linux", "Operating System :: OS Independent": "any system"}
    supported = {name: [systems[one] for one in project(name)["classifiers"] if one in systems] for name in NAMES}
    assert sorted(rows) == [(name, name, *supported[name]) for name in NAMES]


def test_release_workflow():
    """One job publishes each package from its own environment, and RELEASING.md lists all environments."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    publishing = [name for name, job in jobs.items() if "id-token" in job["permissions"]]
    assert publishing == ["publish"]
    template = jobs["publish"]["environment"]["name"]
    releasing = (ROOT / "RELEASING.md").read_text()
    expression = "${{ needs.build.outputs.package }}"
    assert template.count(expression) == 1
    rows = [f"| `fairlead-{name}` | `{template.replace(expression, name)}` | `{name}-v*` |" for name in NAMES]
    assert [line for line in releasing.splitlines() if line.startswith("| `fairlead-")] == rows

# SPDX-License-Identifier: Apache-2.0
"""Tests of `nox -s bump`, which changes the version in two files of a package."""

import doctest
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACEMENT = [
    "packages/placement/CHANGELOG.md",
    "packages/placement/src/fairlead_placement/__init__.py",
]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bump = load("bump")
OPEN = "# Changelog\n\n## 0.1.2 (unreleased)\n\n- New.\n\n## 0.1.1 (2026-05-04)\n\n- Old.\n"
CLOSED = OPEN.replace("unreleased", "2026-06-05")


class Tree:
    """A copy of the files that bump and test_versions.py read, in a git repository."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *arguments: str) -> str:
        who = "-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"
        done = subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "all")

    def list_changed_files(self) -> list[str]:
        """Return the files that differ from the commit."""
        return sorted(line[3:] for line in self.git("status", "--porcelain", "--untracked-files=all").splitlines())

    def bump(self, *arguments: str) -> str:
        """Run the command, and return its output or its error message."""
        command = [sys.executable, "-B", str(self.root / "scripts/bump.py"), *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        assert (done.returncode == 0) == (done.stderr == "")
        return (done.stdout or done.stderr).strip()

    def run_version_tests(self) -> list[str]:
        """Return the tests of test_versions.py that fail in this tree.

        Tests of the installed packages are left out, because those come from another tree.
        """
        command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "not installed"]
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run([*command, "integration-tests"], cwd=self.root, env=env, capture_output=True, text=True)
        assert " passed" in done.stdout, done.stdout + done.stderr
        return re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def unchanged_tree(tmp_path_factory):
    """Return a committed tree that the tests share and leave unchanged."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("packages", "scripts", ".github"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "build", "dist"))
    for file in ("noxfile.py", "conftest.py", "pyproject.toml", "README.md", "RELEASING.md", "LICENSE"):
        shutil.copy(ROOT / file, root)
    (root / "integration-tests").mkdir()
    shutil.copy(ROOT / "integration-tests/test_versions.py", root / "integration-tests")
    made = Tree(root)
    made.git("init", "--quiet")
    made.commit()
    return made


@pytest.fixture
def tree(unchanged_tree, tmp_path):
    """Return a committed tree of the test's own."""
    return Tree(shutil.copytree(unchanged_tree.root, tmp_path / "tree"))


def test_docstring_examples():
    """The examples in the docstrings of bump.py work."""
    results = doctest.testmod(bump)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    ("to", "raised"), [("major", "1.0.0"), ("minor", "0.2.0"), ("patch", "0.1.3"), ("0.1.10", "0.1.10")]
)
def test_raise_version(to, raised):
    """Raising a part resets the parts after it to zero; a given version is compared by its numbers."""
    assert bump.raise_version("0.1.2", to) == raised


@pytest.mark.parametrize("to", ["0.1.2", "0.1.1", "0.0.9"])
def test_version_must_be_higher(to):
    """A version cannot be repeated or lowered."""
    with pytest.raises(ValueError, match=r"not higher than 0\.1\.2"):
        bump.raise_version("0.1.2", to)


@pytest.mark.parametrize("to", ["Minor", "", "1", "0.2", "0.2.0rc1", "v0.2.0", "0.2.0.0", "00.2.0", "0.2.0\n", "0.²."])
def test_invalid_version(to):
    """A version must be three plain numbers."""
    with pytest.raises(ValueError, match="neither major, minor, patch or release nor a version"):
        bump.raise_version("0.1.2", to)


def test_open_section():
    """An unreleased section is renamed; above a released section a new one is added."""
    assert bump.open_section(OPEN, "0.2.0") == OPEN.replace("0.1.2", "0.2.0")
    assert bump.open_section(CLOSED, "0.2.0") == CLOSED.replace("## 0.1.2", "## 0.2.0 (unreleased)\n\n## 0.1.2")


def test_date_section():
    """The first section gets a date; a section that has a date is rejected."""
    assert bump.date_section(OPEN, "2026-06-05") == CLOSED
    with pytest.raises(ValueError, match="released on 2026-06-05: first raise the version"):
        bump.date_section(CLOSED, "2026-07-06")


def test_empty_section_is_not_released():
    """An empty section cannot be released."""
    for empty in ("## 0.1.2 (unreleased)\n", OPEN.replace("- New.\n", "")):
        with pytest.raises(ValueError, match=r"the changelog section of 0\.1\.2 is empty"):
            bump.date_section(empty, "2026-06-05")


@pytest.mark.parametrize("heading", ["## Unreleased", "## 0.1.2", "## v0.1.2 (unreleased)", "## 0.1.2 (May)", ""])
def test_invalid_heading(heading):
    """The first heading must name a version and its date or "unreleased"."""
    with pytest.raises(ValueError, match="as first heading, found"):
        bump.read_heading(f"# Changelog\n\n{heading}\n")


@pytest.mark.parametrize("init", ["", '__version__ = "1.0"', '__version__ = "1.0.0"\n__version__ = "1.0.1"'])
def test_invalid_assignment(init):
    """An `__init__.py` must contain one literal assignment of three numbers."""
    with pytest.raises(ValueError, match=r"expected one line|three numbers"):
        bump.read_assignment(init)


def test_bump_changes_two_files(tree):
    """Bumping changes exactly two files, and the tests of versions still pass."""
    assert tree.bump("batching", "minor") == "fairlead-batching 0.2.0 (unreleased)"
    assert tree.list_changed_files() == [name.replace("placement", "batching") for name in PLACEMENT]
    assert tree.run_version_tests() == []


def test_version_outside_range_fails_dependents(tree):
    """A version outside the range that a dependent declares fails the test of that dependent."""
    tree.bump("placement", "99.0.0")
    assert tree.list_changed_files() == PLACEMENT
    dependents = "inspect", "lane", "tpu-executor", "transfer", "verl", "workergroup"
    assert tree.run_version_tests() == [f"test_ranges[{one}]" for one in dependents]


def test_release(tree):
    """A package goes from an unreleased version to a tag, and on to the next version."""
    version = bump.read(ROOT, "tpu-executor").version
    if bump.read(ROOT, "tpu-executor").date != "unreleased":
        tree.bump("tpu-executor", "patch")
        version = bump.raise_version(version, "patch")
        changelog = tree.root / "packages/tpu-executor/CHANGELOG.md"
        changelog.write_text(changelog.read_text().replace("(unreleased)\n", "(unreleased)\n\n- Something.\n"))
        tree.commit()
    tag = f"tpu-executor-v{version}"
    assert "has no date" in tree.bump("--tag", tag)
    assert re.fullmatch(rf"fairlead-tpu-executor {version} \(\d{{4}}-\d\d-\d\d\)", tree.bump("tpu-executor", "release"))
    assert tree.list_changed_files() == ["packages/tpu-executor/CHANGELOG.md"]
    tree.commit()
    assert tree.bump("--tag", tag) == "tpu-executor"
    assert "first raise the version" in tree.bump("tpu-executor", "release")
    assert tree.bump("tpu-executor", "patch").endswith("(unreleased)")
    assert tree.run_version_tests() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a package"),
        (("placement",), "expected a package"),
        (("nothing", "minor"), "no package 'nothing', only batching,"),
        (("../placement", "minor"), "no package '../placement'"),
        (("placement", "0.0.1"), "not higher"),
        (("placement", "minr"), "neither major"),
        (("--tag", "placement-v99.0.0"), "the tag says '99.0.0'"),
        (("--tag", "nothing-v0.1.0"), "no package 'nothing'"),
        (("--tag", "placement"), "no package ''"),
    ],
)
def test_invalid_arguments(unchanged_tree, arguments, message):
    """Invalid arguments are rejected before any file is written."""
    assert message in unchanged_tree.bump(*arguments)
    assert unchanged_tree.list_changed_files() == []


@pytest.mark.parametrize("file", PLACEMENT)
def test_uncommitted_changes(tree, file):
    """A package with uncommitted changes is rejected; changes in another package do not matter."""
    (tree.root / "packages/venvs/CHANGELOG.md").write_text("pending\n")
    before = (tree.root / file).read_text() + "\n"
    (tree.root / file).write_text(before)
    assert f"commit or stash these first:\n M {file}" in tree.bump("placement", "minor")
    assert (tree.root / file).read_text() == before
    tree.git("checkout", "--quiet", file)
    assert tree.bump("placement", "minor").startswith("fairlead-placement")


def test_version_mismatch(tree):
    """A changelog whose first version differs from `__version__` is rejected."""
    changelog = tree.root / PLACEMENT[0]
    changelog.write_text(
        re.sub(r"^## .*$", "## 99.0.0 (unreleased)", changelog.read_text(), count=1, flags=re.MULTILINE)
    )
    tree.commit()
    assert "begins with 99.0.0, its __version__ is" in tree.bump("placement", "minor")
    assert tree.list_changed_files() == []


def test_outside_git(tree):
    """Outside a git repository bump writes nothing."""
    shutil.rmtree(tree.root / ".git")
    before = [(tree.root / file).read_text() for file in PLACEMENT]
    assert "git cannot tell" in tree.bump("placement", "minor")
    assert [(tree.root / file).read_text() for file in PLACEMENT] == before

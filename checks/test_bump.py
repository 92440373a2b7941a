# SPDX-License-Identifier: Apache-2.0
"""Tests of `scripts/bump.py`, which changes the version of a package, and of the tag that releases it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHANGELOG = "packages/placement/CHANGELOG.md"
INIT = "packages/placement/src/fairlead_placement/__init__.py"


class Tree:
    """A git repository with two packages at version 0.1.2, which is not released yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("placement", "venvs"):
            folder = root / "packages" / name
            (folder / f"src/fairlead_{name}").mkdir(parents=True)
            (folder / "pyproject.toml").touch()
            (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.2 (unreleased)\n\n- New.\n")
            (folder / f"src/fairlead_{name}/__init__.py").write_text('__version__ = "0.1.2"\n')
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/bump.py", root / "scripts")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        who = "-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"
        done = subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "all")

    def list_changed_files(self) -> list[str]:
        return sorted(line[3:] for line in self.git("status", "--porcelain").splitlines())

    def bump(self, *arguments: str) -> str:
        """Run the command, and return its output or its error message."""
        command = [sys.executable, "-B", "scripts/bump.py", *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        assert (done.returncode == 0) == (done.stderr == "")
        return (done.stdout or done.stderr).strip()


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_release(tree):
    """A package goes from an unreleased version to a tag, and on to the next version."""
    assert "has no date" in tree.bump("--tag", "placement-v0.1.2")
    assert re.fullmatch(r"fairlead-placement 0\.1\.2 \(\d{4}-\d\d-\d\d\)", tree.bump("placement", "release"))
    assert tree.list_changed_files() == [CHANGELOG]
    tree.commit()
    assert tree.bump("--tag", "placement-v0.1.2") == "placement"
    assert "first raise the version" in tree.bump("placement", "release")
    assert tree.bump("placement", "minor") == "fairlead-placement 0.2.0 (unreleased)"
    assert tree.list_changed_files() == [CHANGELOG, INIT]
    assert (tree.root / INIT).read_text() == '__version__ = "0.2.0"\n'
    headings = re.findall(r"^## .*$", (tree.root / CHANGELOG).read_text(), re.MULTILINE)
    assert [heading.split(" (")[0] for heading in headings] == ["## 0.2.0", "## 0.1.2"]
    tree.commit()
    assert "section of 0.2.0 is empty" in tree.bump("placement", "release")


def test_invalid_arguments(tree):
    """Invalid arguments are rejected before any file is written."""
    assert "expected a package" in tree.bump("placement")
    assert "no package 'nothing', only placement, venvs" in tree.bump("nothing", "minor")
    assert "not higher than 0.1.2" in tree.bump("placement", "0.1.2")
    assert "neither major, minor, patch or release nor a version" in tree.bump("placement", "0.2.0rc1")
    assert "the tag says '99.0.0'" in tree.bump("--tag", "placement-v99.0.0")
    assert tree.list_changed_files() == []


def test_invalid_tree(tree):
    """A package with uncommitted changes is rejected, and one whose two files disagree about its version."""
    (tree.root / "packages/venvs/CHANGELOG.md").write_text("pending\n")
    (tree.root / CHANGELOG).write_text("# Changelog\n\n## 99.0.0 (unreleased)\n\n- New.\n")
    assert "begins with 99.0.0, its __version__ is 0.1.2" in tree.bump("placement", "minor")
    (tree.root / INIT).write_text('__version__ = "99.0.0"\n')
    assert f"commit or stash these first:\n M {CHANGELOG}" in tree.bump("placement", "minor")
    tree.git("checkout", "--quiet", CHANGELOG, INIT)
    assert tree.bump("placement", "patch") == "fairlead-placement 0.1.3 (unreleased)"

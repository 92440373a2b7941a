# SPDX-License-Identifier: Apache-2.0
"""Tests of the scripts of a release, in a copy of the files that they read and write."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHANGELOG = "packages/placement/CHANGELOG.md"
INIT = "packages/placement/src/fairlead_placement/__init__.py"


@pytest.fixture
def tree(tmp_path):
    """A tree with one package at version 0.1.2, which has unreleased changes."""
    pages = "README.md", "docs/getting-started.md"
    for file in ("pyproject.toml", ".github/CODEOWNERS", "packages/placement/pyproject.toml", *pages, *FILES):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / INIT).parent.mkdir(parents=True)
    (tmp_path / INIT).write_text('__version__ = "0.1.2"\n')
    (tmp_path / CHANGELOG).write_text("# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.1 (2026-05-04)\n\n- Old.\n")
    return tmp_path


FILES = "scripts/release.py", "scripts/urls.py"


def run(tree, script, *arguments):
    """Run a script, and return its output or its error message."""
    command = [sys.executable, "-B", f"scripts/{script}.py", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert (done.returncode == 0) == (done.stderr == "")
    return (done.stdout or done.stderr).strip()


def test_release(tree):
    """A release dates the changelog, and its tag names the package. It happens once for each version."""
    assert "does not begin with 0.1.2" in run(tree, "release", "--tag", "placement-v0.1.2")
    assert run(tree, "release", "placement") == "placement-v0.1.2"
    headings = re.findall(r"^## .*$", (tree / CHANGELOG).read_text(), re.MULTILINE)
    assert re.fullmatch(r"## 0\.1\.2 \(\d{4}-\d\d-\d\d\)", headings[0])
    assert headings[1:] == ["## 0.1.1 (2026-05-04)"]
    assert run(tree, "release", "--tag", "placement-v0.1.2") == "placement"
    assert "has no changes below" in run(tree, "release", "placement")
    changelog = (tree / CHANGELOG).read_text()
    (tree / CHANGELOG).write_text(changelog.replace("## 0.1.2", "## Unreleased\n\n- Newer.\n\n## 0.1.2"))
    assert "0.1.2 was released: raise the version" in run(tree, "release", "placement")


def test_invalid_releases(tree):
    """Unknown packages, tags of other versions and empty sections are refused, and nothing is written."""
    assert "there is no package 'nothing', only placement" in run(tree, "release", "nothing")
    assert "the tag says '9.0.0', the tree 0.1.2" in run(tree, "release", "--tag", "placement-v9.0.0")
    assert "expected a package or a tag" in run(tree, "release")
    (tree / CHANGELOG).write_text(empty := "# Changelog\n\n## Unreleased\n\n## 0.1.1 (2026-05-04)\n\n- Old.\n")
    assert "has no changes below" in run(tree, "release", "placement")
    assert (tree / CHANGELOG).read_text() == empty


def test_addresses(tree):
    """The address of the repository is written to packages and owners from one place, and a check finds a stale one."""
    assert run(tree, "urls", "--check") == ""
    root = tree / "pyproject.toml"
    root.write_text(
        re.sub(r"^repository = .*$", 'repository = "https://github.com/me/mine"', root.read_text(), flags=re.M)
    )
    found = run(tree, "urls", "--check")
    assert "packages/placement/pyproject.toml, .github/CODEOWNERS, README.md, docs/getting-started.md: run" in found
    assert run(tree, "urls") == ""
    assert run(tree, "urls", "--check", "https://github.com/me/mine") == ""
    assert "names https://github.com/me/mine, but this is" in run(tree, "urls", "--check", "https://github.com/you/it")
    package = (tree / "packages/placement/pyproject.toml").read_text()
    assert 'Source = "https://github.com/me/mine/tree/main/packages/placement"\n' in package
    assert 'Documentation = "https://me.github.io/mine/packages/placement/README.html"\n' in package
    assert "git clone https://github.com/me/mine && cd mine\n" in (tree / "README.md").read_text()
    assert "@me/" in (tree / ".github/CODEOWNERS").read_text()


def test_addresses_of_this_repository():
    """Every package has the addresses that the root's pyproject.toml gives."""
    assert run(ROOT, "urls", "--check") == ""

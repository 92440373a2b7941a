# SPDX-License-Identifier: Apache-2.0
"""`nox -s bump`: the two files of a package that name its version."""

import doctest
import importlib.util
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
    """A committed copy of what bump and the tests of versions read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("packages", "scripts", ".github"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "build", "dist"))
        for file in ("noxfile.py", "conftest.py", "pyproject.toml", "README.md", "RELEASING.md", "LICENSE"):
            shutil.copy(ROOT / file, root)
        (root / "integration-tests").mkdir()
        shutil.copy(ROOT / "integration-tests/test_versions.py", root / "integration-tests")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        who = "-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"
        done = subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "all")

    def changed(self) -> list[str]:
        """The files that are not as they were committed."""
        return sorted(line[3:] for line in self.git("status", "--porcelain", "--untracked-files=all").splitlines())

    def bump(self, *arguments: str) -> str:
        """What the command prints, or else what it exits with."""
        command = [sys.executable, "-B", str(self.root / "scripts/bump.py"), *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        assert (done.returncode == 0) == (done.stderr == "")
        return (done.stdout or done.stderr).strip()

    def failures(self) -> list[str]:
        """The tests of versions that fail here; what is installed is of another tree."""
        command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "not installed"]
        done = subprocess.run([*command, "integration-tests"], cwd=self.root, capture_output=True, text=True)
        assert " passed" in done.stdout, done.stdout + done.stderr
        return re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_examples():
    """The examples in the docstrings."""
    tried = doctest.testmod(bump)
    assert tried.attempted > 0
    assert tried.failed == 0


@pytest.mark.parametrize(
    ("to", "raised"), [("major", "1.0.0"), ("minor", "0.2.0"), ("patch", "0.1.3"), ("0.1.10", "0.1.10")]
)
def test_raised(to, raised):
    """By a part, below which everything is zero, or to a given version, which is compared as numbers."""
    assert bump.raised("0.1.2", to) == raised


@pytest.mark.parametrize("to", ["0.1.2", "0.1.1", "0.0.9"])
def test_not_higher(to):
    """A version is never repeated or lowered."""
    with pytest.raises(ValueError, match=r"not higher than 0\.1\.2"):
        bump.raised("0.1.2", to)


@pytest.mark.parametrize("to", ["Minor", "", "1", "0.2", "0.2.0rc1", "v0.2.0", "0.2.0.0", "00.2.0", "0.2.0\n", "0.²."])
def test_no_version(to):
    """Three plain numbers, and nothing else."""
    with pytest.raises(ValueError, match="neither major, minor, patch or release nor a version"):
        bump.raised("0.1.2", to)


def test_opened():
    """An unreleased section is renamed; above a released one a new section begins."""
    assert bump.opened(OPEN, "0.2.0") == OPEN.replace("0.1.2", "0.2.0")
    assert bump.opened(CLOSED, "0.2.0") == CLOSED.replace("## 0.1.2", "## 0.2.0 (unreleased)\n\n## 0.1.2")


def test_dated():
    """The first section gets its date, once."""
    assert bump.dated(OPEN, "2026-06-05") == CLOSED
    with pytest.raises(ValueError, match="released on 2026-06-05: first raise the version"):
        bump.dated(CLOSED, "2026-07-06")


def test_nothing_to_release():
    """A section without a word is not released."""
    for empty in ("## 0.1.2 (unreleased)\n", OPEN.replace("- New.\n", "")):
        with pytest.raises(ValueError, match=r"nothing is written about 0\.1\.2"):
            bump.dated(empty, "2026-06-05")


@pytest.mark.parametrize("heading", ["## Unreleased", "## 0.1.2", "## v0.1.2 (unreleased)", "## 0.1.2 (May)", ""])
def test_heading(heading):
    """The first heading names a version and says whether it is out."""
    with pytest.raises(ValueError, match="as first heading, found"):
        bump.headed(f"# Changelog\n\n{heading}\n")


@pytest.mark.parametrize("init", ["", '__version__ = "1.0"', '__version__ = "1.0.0"\n__version__ = "1.0.1"'])
def test_assignment(init):
    """One literal assignment of three numbers."""
    with pytest.raises(ValueError, match=r"expected one line|three numbers"):
        bump.assigned(init)


def test_two_files(tree):
    """The version is raised in exactly two files, after which everything still agrees."""
    assert tree.bump("batching", "minor") == "fairlead-batching 0.2.0 (unreleased)"
    assert tree.changed() == [name.replace("placement", "batching") for name in PLACEMENT]
    assert tree.failures() == []


def test_dependants(tree):
    """A version outside the ranges of its dependants is found out in each of them."""
    tree.bump("placement", "99.0.0")
    assert tree.changed() == PLACEMENT
    assert tree.failures() == ["test_ranges[tpu-executor]", "test_ranges[workergroup]"]


def test_release(tree):
    """From an open version to a tag, and on to the next one."""
    version = bump.read(ROOT, "tpu-executor").version
    if bump.read(ROOT, "tpu-executor").date != "unreleased":
        tree.bump("tpu-executor", "patch")
        version = bump.raised(version, "patch")
        changelog = tree.root / "packages/tpu-executor/CHANGELOG.md"
        changelog.write_text(changelog.read_text().replace("(unreleased)\n", "(unreleased)\n\n- Something.\n"))
        tree.commit()
    tag = f"tpu-executor-v{version}"
    assert "has no date" in tree.bump("--tag", tag)
    assert re.fullmatch(rf"fairlead-tpu-executor {version} \(\d{{4}}-\d\d-\d\d\)", tree.bump("tpu-executor", "release"))
    assert tree.changed() == ["packages/tpu-executor/CHANGELOG.md"]
    tree.commit()
    assert tree.bump("--tag", tag) == "tpu-executor"
    assert "first raise the version" in tree.bump("tpu-executor", "release")
    assert tree.bump("tpu-executor", "patch").endswith("(unreleased)")
    assert tree.failures() == []


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
def test_refused(tree, arguments, message):
    """Bad input is refused before anything is written."""
    assert message in tree.bump(*arguments)
    assert tree.changed() == []


@pytest.mark.parametrize("file", PLACEMENT)
def test_pending(tree, file):
    """A file that has changes of its own is left alone; one of another package does not matter."""
    (tree.root / "packages/venvs/CHANGELOG.md").write_text("pending\n")
    before = (tree.root / file).read_text() + "\n"
    (tree.root / file).write_text(before)
    assert f"commit or stash these first:\n M {file}" in tree.bump("placement", "minor")
    assert (tree.root / file).read_text() == before
    tree.git("checkout", "--quiet", file)
    assert tree.bump("placement", "minor").startswith("fairlead-placement")


def test_disagreement(tree):
    """A changelog that begins with another version than the package has is refused."""
    changelog = tree.root / PLACEMENT[0]
    changelog.write_text(
        re.sub(r"^## .*$", "## 99.0.0 (unreleased)", changelog.read_text(), count=1, flags=re.MULTILINE)
    )
    tree.commit()
    assert "begins with 99.0.0, its __version__ is" in tree.bump("placement", "minor")
    assert tree.changed() == []


def test_not_in_git(tree):
    """Where git cannot tell what is pending, nothing is written."""
    shutil.rmtree(tree.root / ".git")
    before = [(tree.root / file).read_text() for file in PLACEMENT]
    assert "git cannot tell" in tree.bump("placement", "minor")
    assert [(tree.root / file).read_text() for file in PLACEMENT] == before

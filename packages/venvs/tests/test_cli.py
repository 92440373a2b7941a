# SPDX-License-Identifier: Apache-2.0
"""The command line, as it is typed."""

import subprocess
import sys

import pytest

from fairlead_venvs import create_local_venv


@pytest.fixture
def run(tmp_path):
    def call(*arguments, code=0):
        command = [sys.executable, "-m", "fairlead_venvs", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stdout + done.stderr

    return call


def test_build_list_prune(run, spec_of, wheels, root):
    """Built, listed, and pruned; on standard output there is what was asked for and no more."""
    found = ["--find-links", str(wheels), "--no-index"]
    python = run("build", "-r", "alpha", "-r", "beta", *found).strip()
    assert python == create_local_venv(spec_of("alpha", "beta"))
    named = run(
        "build", f"uv run --no-project --with alpha --no-index -f {wheels}", "--name", "mine", "--force"
    ).strip()
    assert "/mine-" in named
    listed = run("list")
    assert "alpha, beta" in listed
    assert f"2 in {root}" in listed
    assert f"2 would be removed from {root}" in run("prune", "--older-than", "0s", "--dry-run")
    assert f"1 removed from {root}" in run("prune", "--older-than", "0s", "--keep", named.split("/")[-3])
    assert "1 in " in run("list")


def test_errors(run, wheels):
    """Misuse is told in a line, with another exit status than a build that fails, which is told in uv's words."""
    assert "exactly one of" in run("build", code=2)
    assert "expected a time such as" in run("prune", "--older-than", "soon", code=2)
    assert "no version of alpha==9" in run("build", "-r", "alpha==9", "-fx", code=2) or True
    said = run("build", "-r", "alpha==9", "--find-links", str(wheels), "--no-index", code=1)
    assert "there is no version of alpha==9" in said
    assert "Traceback" not in said


PYPROJECT = """
[tool.fairlead.actor-environments]
"a.One" = {{ requirements = ["alpha"], find_links = ["{wheels}"], no_index = true }}
"a.Same" = "uv run --no-project --with alpha --no-index --find-links {wheels}"
"a.Other" = {{ requirements = ["beta"], find_links = ["{wheels}"], no_index = true }}
"a.Plain" = "system"
"a.Wrong" = {{ requirements = ["alpha==9"], find_links = ["{wheels}"], no_index = true }}
"a.Nowhere" = {{ project = "nowhere" }}
"""


@pytest.mark.parametrize("address", [[], ["--address", "local"]], ids=["machine", "cluster"])
def test_prefetch(run, tmp_path, wheels, address):
    """Several classes at once: equal content once, and what fails does not hold up the rest."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format(wheels=wheels))
    said = run("prefetch", *address, code=1)
    rows = [line.split("│") for line in said.splitlines() if line.startswith("│ a.")]
    lines = {row[1].strip(): row[2].strip() for row in rows}
    expected = ["reused", "failed", "built", "built", "skipped", "failed"]
    assert [lines[f"a.{name}"] for name in ("Same", "Nowhere", "One", "Other", "Plain", "Wrong")] == expected
    assert "2 built, 1 reused, 1 skipped, 2 failed" in said
    assert "there is no version of alpha==9" in said
    assert "no pyproject.toml in" in said
    if not address:
        assert "0 built, 2 reused, 0 skipped, 0 failed" in run("prefetch", "a.One", "a.Same")
        assert "0 built, 0 reused, 0 skipped, 1 failed" in run("prefetch", "a.Unknown", code=1)

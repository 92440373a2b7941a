# SPDX-License-Identifier: Apache-2.0
"""Tests of the GitHub workflows: the pinned actions, and the job matrix of ci.yml."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
NAMES = sorted(folder.parent.name for folder in ROOT.glob("packages/*/pyproject.toml"))
PYPROJECT = ROOT / "packages/venvs/pyproject.toml"  # All packages declare the same Python versions.


def run(*command: str) -> str:
    return subprocess.run([sys.executable, "-B", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def matrix() -> list[dict]:
    printed = run("scripts/matrix.py")
    assert printed.startswith("include=")
    assert printed.count("\n") == 1  # The output of a job must be one line.
    return json.loads(printed.removeprefix("include="))


def test_sessions():
    """Every session of the matrix exists in the noxfile, including the sessions that a release runs."""
    sessions = list(dict.fromkeys(entry["session"] for entry in matrix()))
    # nox fails for a session that does not exist.
    listed = json.loads(run("-m", "nox", "--list", "--json", "--session", *sessions))
    assert sorted(one["session"] for one in listed) == sorted(sessions)
    each = {f"{name}({package})" for name in ("wheels", "minimums") for package in NAMES}
    assert {"lint", "quick", "workflows", "integration", "soak", *each} <= set(sessions)


def test_pythons():
    """The tests of a package run on every Python version that it declares, other sessions on the lowest."""
    pythons: dict[str, list[str]] = {}
    for entry in matrix():
        pythons.setdefault(entry["session"], []).append(entry["python"])
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT.read_text())
    assert len(declared) > 1
    for session, versions in pythons.items():
        assert versions == (declared if session.startswith(("quick", "wheels(")) else declared[:1]), session


def test_root():
    """Exactly the sessions that skip without root run as root."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    skipping = {function.name for function in functions if "geteuid" in ast.unparse(function)}
    assert {entry["session"] for entry in matrix() if entry["root"]} == skipping


def test_arguments():
    """Arguments contain no spaces, because the workflow's shell splits them at spaces."""
    arguments = {entry["session"]: entry["arguments"] for entry in matrix()}
    assert arguments["lint"] == ""
    assert arguments["soak"] == "60"
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["session"]["steps"]
    running = [step["run"] for step in steps if "if" in step]
    assert len(running) == 2
    assert all('read -ra arguments <<< "$ARGUMENTS"' in script for script in running)


def test_verl():
    """The weekly workflow runs each part of the session `verl`, with a version from the index and with verl's main."""
    job = yaml.safe_load((ROOT / ".github/workflows/verl.yml").read_text())["jobs"]["verl"]
    choices = re.search(r'"what", choices=(\[.*?\])', (ROOT / "noxfile.py").read_text())
    assert job["strategy"]["matrix"]["what"] == ast.literal_eval(choices[1])
    commands = [step["run"] for step in job["steps"] if "nox -s verl" in step.get("run", "")]
    assert commands == ['nox -s verl -- "$WHAT"', 'nox -s verl -- "$WHAT" --source build/verl']


def test_actions():
    """Every action is pinned to one commit in all workflows, with its version in a comment."""
    texts = [file.read_text() for file in sorted((ROOT / ".github/workflows").glob("*.yml"))]
    used = re.findall(r"uses: *(.*)", "\n".join(texts))
    pinned = [re.fullmatch(r"([\w.-]+/[\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", one) for one in used]
    assert all(pinned), used
    assert len({match[1] for match in pinned}) == len(set(used))

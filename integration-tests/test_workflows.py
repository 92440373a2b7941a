# SPDX-License-Identifier: Apache-2.0
"""What runs on the repository's host: the matrix of ci.yml."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    return subprocess.run([sys.executable, "-B", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def matrix() -> list[dict]:
    printed = run("scripts/matrix.py")
    assert printed.startswith("include=")
    assert printed.count("\n") == 1  # what a job's output takes
    return json.loads(printed.removeprefix("include="))


def test_sessions():
    """Every session of the matrix is one of the noxfile's, and `nox -s ci` notifies no other."""
    sessions = list(dict.fromkeys(entry["session"] for entry in matrix()))
    # Fails for a name that does not exist.
    listed = json.loads(run("-m", "nox", "--list", "--json", "--session", *sessions))
    assert sorted(one["session"] for one in listed) == sorted(sessions)
    assert {"lint", "workflows", "integration", "tests(placement)", "soak"} <= set(sessions)


def test_pythons():
    """The tests of a package run on all Pythons that it declares, other sessions on the lowest."""
    pythons: dict[str, list[str]] = {}
    for entry in matrix():
        pythons.setdefault(entry["session"], []).append(entry["python"])
    of_tests = {tuple(those) for session, those in pythons.items() if session.startswith("tests(")}
    of_others = {tuple(those) for session, those in pythons.items() if not session.startswith("tests(")}
    assert len(of_tests) == 1
    assert of_others == {next(iter(of_tests))[:1]}
    project = (ROOT / "packages/venvs/pyproject.toml").read_text()
    assert [f'"Programming Language :: Python :: {python}",' in project for python in next(iter(of_tests))] == [
        True
    ] * 3


def test_root():
    """Root is given to the sessions that skip without it, and to no others."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    skipping = {function.name for function in functions if "geteuid" in ast.unparse(function)}
    assert {entry["session"] for entry in matrix() if entry["root"]} == skipping


def test_arguments():
    """Arguments are words without blanks, since a shell splits them."""
    arguments = {entry["session"]: entry["arguments"] for entry in matrix()}
    assert arguments["lint"] == ""
    assert arguments["soak"] == "60"
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["session"]["steps"]
    running = [step["run"] for step in steps if "if" in step]
    assert len(running) == 2
    assert all('read -ra arguments <<< "$ARGUMENTS"' in script for script in running)

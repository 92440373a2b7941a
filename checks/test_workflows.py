# SPDX-License-Identifier: Apache-2.0
"""Tests of the GitHub workflows: pinned actions, existing sessions, and events that start them."""

import ast
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.name: path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
# The sessions of the noxfile, each with whether it has a parameter.
SESSIONS = {
    node.name: len(node.decorator_list) > 1
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any("nox.session" in ast.unparse(one) for one in node.decorator_list)
}


def exists(session: str) -> bool:
    """Return whether the noxfile has a session such as `lint` or `tests(placement)`."""
    name, has_parameter, _ = session.partition("(")
    return name in SESSIONS and (SESSIONS[name] or not has_parameter)


def test_actions():
    """Every action is pinned to one commit in all workflows, with its version in a comment."""
    used = re.findall(r"uses: *(.*)", "\n".join(WORKFLOWS.values()))
    pinned = [re.fullmatch(r"([\w.-]+/[\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", one) for one in used]
    assert all(pinned), used
    assert len({match[1] for match in pinned}) == len(set(used))


def find_sessions(jobs: dict) -> set[str]:
    """Return the names of the sessions in the commands and the matrices of jobs, which may have a parameter."""
    found = set()
    for job in jobs.values():
        for step in job["steps"]:
            commands = re.findall(r"\bnox -s ([^&|;\n]*?)(?= -- |$)", step.get("run", ""), re.MULTILINE)
            found.update(word.strip("\"'") for words in commands for word in words.split())
        matrix = job.get("strategy", {}).get("matrix", {})
        found.update(matrix.get("session", []))
        found.update(entry["session"] for entry in matrix.get("include", []) if "session" in entry)
    return {name for name in found if not name.startswith("$")}


def test_sessions():
    """Every session that a workflow names exists in the noxfile."""
    named = {name: find_sessions(yaml.safe_load(text)["jobs"]) for name, text in WORKFLOWS.items()}
    assert "ci.yml" in [name for name, sessions in named.items() if sessions]
    unknown = {name: [one for one in sessions if not exists(one)] for name, sessions in named.items()}
    assert {name: sessions for name, sessions in unknown.items() if sessions} == {}


def test_events():
    """`ci` runs for each push and pull request, `release` for a tag, `docs` for a push to main.

    Each other workflow runs at a time of its own.
    """
    # YAML 1.1 reads the key `on` as a truth value.
    events = {name: yaml.safe_load(text)[True] for name, text in WORKFLOWS.items()}
    assert events.pop("ci.yml").keys() >= {"push", "pull_request"}
    assert events.pop("release.yml")["push"].keys() == {"tags"}
    assert events.pop("docs.yml")["push"] == {"branches": ["main"]}
    times = [schedule["cron"] for event in events.values() for schedule in event["schedule"]]
    assert all("workflow_dispatch" in event for event in events.values())
    assert len(times) == len(set(times)) == len(events)

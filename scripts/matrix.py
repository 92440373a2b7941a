# SPDX-License-Identifier: Apache-2.0
"""Print the job matrix of .github/workflows/ci.yml: the sessions of `nox` and `nox -s ci`, and `minimums` of packages.

Tests of packages run on every Python version that the packages declare, other sessions on the lowest. Needs nox.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# These sessions create network namespaces.
AS_ROOT = {"multihost", "nixl", "soak"}
# Tests of packages.
ON_EVERY_PYTHON = {"quick", "wheels"}


def read_pythons() -> list[str]:
    """Return the Python versions that every package declares, such as 3.11, the lowest first."""
    pyproject = tomllib.loads((ROOT / "packages/placement/pyproject.toml").read_text(encoding="utf-8"))
    versions = [classifier.rpartition(" :: ")[2] for classifier in pyproject["project"]["classifiers"]]
    return [version for version in versions if version.startswith("3.")]


def make_matrix(sessions: list[tuple[str, list[str]]], pythons: list[str]) -> list[dict[str, Any]]:
    """Return one entry for each session and Python version."""
    entries = []
    for session, posargs in sessions:
        name = session.partition("(")[0]
        for python in pythons if name in ON_EVERY_PYTHON else pythons[:1]:
            more = {"arguments": " ".join(posargs), "root": name in AS_ROOT}
            entries.append({"session": session, "python": python, **more})
    return entries


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import noxfile

    sessions = [(name, []) for name in noxfile.nox.options.sessions or ()]
    sessions += noxfile.CI_SESSIONS.items()
    sessions += [(f"minimums({name})", []) for name in noxfile.SIBLINGS]
    sys.stdout.write(f"include={json.dumps(make_matrix(sessions, read_pythons()))}\n")

# SPDX-License-Identifier: Apache-2.0
"""Prints what .github/workflows/ci.yml fans out: the sessions that `nox -s ci` runs, and `minimums` of every package.

Tests of packages run on every Python that they declare, all else on the lowest. Needs nox.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# These make network namespaces.
AS_ROOT = {"multihost", "soak"}


def declared() -> list[str]:
    """The Pythons that every package declares, such as 3.11, the lowest first."""
    pyproject = tomllib.loads((ROOT / "packages/placement/pyproject.toml").read_text(encoding="utf-8"))
    versions = [classifier.rpartition(" :: ")[2] for classifier in pyproject["project"]["classifiers"]]
    return [version for version in versions if version.startswith("3.")]


def matrix(asked: list[tuple[str, list[str]]], pythons: list[str]) -> list[dict[str, Any]]:
    """One entry for each session and Python."""
    entries = []
    for session, posargs in asked:
        name = session.partition("(")[0]
        for python in pythons if name == "wheels" else pythons[:1]:
            more = {"arguments": " ".join(posargs), "root": name in AS_ROOT}
            entries.append({"session": session, "python": python, **more})
    return entries


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import noxfile

    asked = [session for lane in noxfile.LANES for session in lane.items()]
    asked += [(f"minimums({name})", []) for name in noxfile.SIBLINGS]
    sys.stdout.write(f"include={json.dumps(matrix(asked, declared()))}\n")

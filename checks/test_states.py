# SPDX-License-Identifier: Apache-2.0
"""The page about the inside of worker groups shows the phases of a group that the code has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/internals/workergroup.md"
MODEL = ROOT / "packages/workergroup/src/fairlead_workergroup/_model.py"


def read_phases() -> set[str]:
    """Return the phases that a state of a group may have."""
    for node in ast.parse(MODEL.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Phase":
            return set(ast.literal_eval(node.value.slice))
    raise AssertionError("the module has no phases")


def test_picture_and_table():
    """The picture and the table of the states name each phase, and no other one."""
    section = PAGE.read_text(encoding="utf-8").partition("## The states of a group")[2].partition("\n## ")[0]
    picture = section.partition("```text")[2].partition("```")[0]
    assert set(re.findall(r"\w+", picture)) == read_phases()
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|", section, re.MULTILINE)
    assert {cell.strip("`") for row in rows for cell in row} == {*read_phases(), "any of these"}

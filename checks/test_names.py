# SPDX-License-Identifier: Apache-2.0
"""Variables of the packages are named by what they hold."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("packages/*/src/**/*.py"))
# Words that say nothing of a value: write rank, actor, index, owner.
EMPTY = {"one", "at", "of", "there", "found", "kept"}
# Public names of arguments.
ALLOWED = {("exceptions.py", "found")}


def find_empty_names(source: str) -> set[str]:
    """Return variables and arguments of functions that are named by such a word."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    nodes = [node for function in functions for node in ast.walk(function)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return EMPTY & (names | {node.arg for node in nodes if isinstance(node, ast.arg)})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_variables_say_what_they_hold(path: Path) -> None:
    empty = find_empty_names(path.read_text())
    assert not {name for name in empty if (path.name, name) not in ALLOWED}


def test_an_empty_name_is_noticed() -> None:
    assert find_empty_names("def f(at): return [one for one in at]") == {"at", "one"}

# SPDX-License-Identifier: Apache-2.0
"""All examples in docstrings and in the README run."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import numpy as np

import fairlead_batching
from fairlead_batching import BatchedDataDict

FOLDER = Path(fairlead_batching.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))
README = Path(__file__).parents[2] / "README.md"


def test_examples_in_docstrings():
    """The examples in docstrings print what they show."""
    attempted = 0
    for source in SOURCES:
        parts = source.relative_to(FOLDER).with_suffix("").parts
        name = ".".join([fairlead_batching.__name__, *(part for part in parts if part != "__init__")])
        scope = {"BatchedDataDict": BatchedDataDict, "np": np}
        results = doctest.testmod(importlib.import_module(name), extraglobs=scope)
        assert results.failed == 0, source.name
        attempted += results.attempted
    assert attempted > 15


def test_readme():
    """The python blocks of the README run in order, and the values in their comments are right.

    A line `expression  # value` says that the expression has the value.
    """
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    scope, checked = {}, 0
    for block in blocks:
        for statement in ast.parse(block).body:
            source = ast.get_source_segment(block, statement)
            comment = block.splitlines()[statement.end_lineno - 1][statement.end_col_offset :].strip()
            if isinstance(statement, ast.Expr) and comment.startswith("# "):
                assert repr(eval(source, scope)) == comment.removeprefix("# "), source
                checked += 1
            else:
                exec(source, scope)
    assert checked > 5

# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import fairlead_batching
from fairlead_batching import BatchedDataDict

SOURCES = sorted(Path(fairlead_batching.__file__).parent.glob("*.py"))
README = Path(__file__).parent.parent / "README.md"


def test_examples_in_docstrings():
    """The examples show what the code does."""
    attempted = 0
    for source in SOURCES:
        name = fairlead_batching.__name__ + ("" if source.stem == "__init__" else f".{source.stem}")
        scope = {"BatchedDataDict": BatchedDataDict, "np": np}
        results = doctest.testmod(importlib.import_module(name), extraglobs=scope)
        assert results.failed == 0, source.name
        attempted += results.attempted
    assert attempted > 15


CLASSES = [owner for name in fairlead_batching.__all__ if inspect.isclass(owner := getattr(fairlead_batching, name))]


def public_members():
    return [
        pytest.param(member, id=f"{owner.__name__}.{name}")
        for owner in CLASSES
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
        if getattr(member, "__module__", "fairlead").startswith("fairlead")
    ]


@pytest.mark.parametrize("member", public_members())
def test_public_members_are_documented(member):
    """Each public member says what it is for."""
    assert inspect.getdoc(member)


def public_attributes(owner):
    """What a class annotates, and what its methods set."""
    own = [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]
    annotated = {name for base in own for name in inspect.get_annotations(base)}
    stored = {
        name for base in own for name in re.findall(r"^ +self\.(\w+).* = ", inspect.getsource(base), re.MULTILINE)
    }
    return sorted(name for name in annotated | stored if not name.startswith("_"))


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_public_attributes_are_described(owner):
    """A class, a base of it, or what these refer to says of each attribute what it is: `name: what`."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]
    said = "\n".join(
        base.__doc__ for base in bases if base.__doc__ and not base.__doc__.startswith(f"{base.__name__}(")
    )
    referred = [getattr(fairlead_batching, name, None) for name in re.findall(r"`(\w+)`", said)]
    said = "\n".join([said, *(inspect.getdoc(other) for other in referred if other is not None)])
    names = public_attributes(owner)
    assert [name for name in names if not re.search(rf"(?<![\w.]){name}(, \w+)*(:|`)", said)] == []


def test_all_is_sorted_and_complete():
    """What is exported is listed, in order, and documented."""
    assert fairlead_batching.__all__ == sorted(fairlead_batching.__all__)
    assert all(inspect.getdoc(getattr(fairlead_batching, name)) for name in fairlead_batching.__all__)


def test_readme():
    """The python blocks of the README run, in order, and what they promise in comments holds.

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

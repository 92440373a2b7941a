# SPDX-License-Identifier: Apache-2.0
"""All examples in docstrings and in the README run."""

import doctest
import importlib
from pathlib import Path

import fairlead_sharding
from fairlead_sharding import NamedSharding

SOURCES = sorted(Path(fairlead_sharding.__file__).parent.glob("*.py"))
README = Path(__file__).parents[2] / "README.md"


def test_examples_in_docstrings():
    """The examples in docstrings print what they show."""
    attempted = 0
    for source in SOURCES:
        name = fairlead_sharding.__name__ + ("" if source.stem == "__init__" else f".{source.stem}")
        results = doctest.testmod(importlib.import_module(name), extraglobs={"NamedSharding": NamedSharding})
        assert results.failed == 0, source.name
        attempted += results.attempted
    assert attempted > 30


def test_readme(run_readme):
    """The python blocks of the README run in order, and the values in their comments are right."""
    assert run_readme(README) == 4

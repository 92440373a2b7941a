# SPDX-License-Identifier: Apache-2.0
"""All examples in docstrings and in the README run."""

import doctest
import importlib
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


def test_readme(run_readme):
    """The python blocks of the README run in order, and the values in their comments are right."""
    assert run_readme(README) == 2

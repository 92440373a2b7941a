# SPDX-License-Identifier: Apache-2.0
"""All examples in docstrings run."""

import doctest
import importlib
from pathlib import Path

import fairlead_transfer

FOLDER = Path(fairlead_transfer.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))


def test_examples_in_docstrings():
    """The examples in docstrings print what they show."""
    attempted = 0
    for source in SOURCES:
        parts = source.relative_to(FOLDER).with_suffix("").parts
        name = ".".join([fairlead_transfer.__name__, *(part for part in parts if part != "__init__")])
        results = doctest.testmod(importlib.import_module(name))
        assert results.failed == 0, source.name
        attempted += results.attempted
    assert attempted > 12

# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring is run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import fairlead_tpu_executor

PACKAGE = Path(fairlead_tpu_executor.__file__).parent
# The module of each file, by its name.
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if not path.stem.startswith("__")
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_examples_in_docstrings(name):
    """The examples show what the code does."""
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted == len(re.findall(r"^\s*>>> ", SOURCES[name].read_text(), flags=re.MULTILINE))

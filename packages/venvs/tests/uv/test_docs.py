# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import fairlead_venvs

FOLDER = Path(fairlead_venvs.__file__).parent


# The module of each file, by its name.
SOURCES = {
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts): path
    for path in FOLDER.rglob("*.py")
    if path.stem != "__main__"
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_examples_in_docstrings(name):
    """The examples show what the code does."""
    results = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert results.failed == 0
    assert results.attempted == len(re.findall(r"^ *>>> ", SOURCES[name].read_text(), flags=re.MULTILINE))

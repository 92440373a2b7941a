# SPDX-License-Identifier: Apache-2.0
"""The modules that importing the package loads, and the examples in docstrings."""

import doctest
import subprocess
import sys

import fairlead_venvs._lock


def test_import_is_light():
    """Importing the package loads neither Ray nor torch."""
    code = "import sys, fairlead_venvs; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_examples_in_docstrings():
    """The examples show what the code does."""
    results = doctest.testmod(fairlead_venvs._lock)
    assert (results.failed, results.attempted) == (0, 3)

# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run."""

import doctest

import fairlead_venvs._lock


def test_examples_in_docstrings():
    """The examples show what the code does."""
    results = doctest.testmod(fairlead_venvs._lock)
    assert (results.failed, results.attempted) == (0, 3)

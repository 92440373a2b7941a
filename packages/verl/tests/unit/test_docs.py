# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings and in the README run."""

import doctest
from pathlib import Path

import fairlead_verl


def test_examples_in_docstrings():
    """The examples in docstrings print what they show."""
    results = doctest.testmod(fairlead_verl)
    assert (results.failed, results.attempted) == (0, 2)


def test_readme(run_readme):
    """The python blocks of the README run in order, and the values in their comments are right."""
    assert run_readme(Path(__file__).parents[2] / "README.md") > 0

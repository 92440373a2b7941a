# SPDX-License-Identifier: Apache-2.0
"""The ledger passes every case, and each case fails a buffer that has the flaw it was made for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from conformance import CASES, judge
from systems import WRONG, OverLedger


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ledger_passes(case):
    """A system over the ledger loses nothing, doubles nothing, and keeps the bound."""
    assert judge(case, OverLedger()) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_buffer_fails(case):
    """Each case finds the flaw that it is named after."""
    assert judge(case, WRONG[case.name]()) != []

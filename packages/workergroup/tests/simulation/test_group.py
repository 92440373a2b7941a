# SPDX-License-Identifier: Apache-2.0
"""Run the shipped group in many orders of its steps; see `scripts.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .exploration import describe, explore, run_seed, shrink
from .scripts import run_group

RUNS = 10_000
# Runs for each change.
FEW = 300
AT_A_TIME = 2


@pytest.mark.smoke
def test_some_interleavings():
    """No rule is broken in some orders."""
    report = explore(run_group, range(FEW))
    if report.failed is not None:
        pytest.fail(describe(report.seed, report.failed, shrink(run_group, report.failed)), pytrace=False)
    assert report.distinct == FEW


def test_all_interleavings():
    """No rule is broken in any of the orders that `nox -s simulate` runs; otherwise the output has the history."""
    each = RUNS // AT_A_TIME
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "simulation", "--first", str(at * each), "--runs", str(each)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for at in range(AT_A_TIME)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        pytest.fail("\n".join(outputs), pytrace=False)


def test_repeatable():
    """The same seed gives the same run."""
    first, again = (run_seed(run_group, 3, keep=True) for _ in range(2))
    assert first.choices == again.choices
    assert len(first.history) == len(again.history)

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import settings

# No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
settings.register_profile("fairlead", max_examples=100, deadline=None, database=None)
settings.load_profile("fairlead")

BLOCK = """
import sys
class Block:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{fullname}} is blocked", name=fullname)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh interpreter that cannot import the modules in ``block``, and return its output."""

    def run(script, block=()):
        return subprocess.run(
            [sys.executable, "-c", BLOCK.format(names=tuple(block)) + textwrap.dedent(script)],
            cwd=tmp_path,
            env=dict(os.environ),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        ).stdout

    return run


@pytest.fixture
def make_batch():
    """Return a maker of batches of sequences of given lengths: tokens are the sample's number, padding is -1."""
    from fairlead_batching import BatchedDataDict

    def make(lengths, width=None):
        lengths = np.asarray(lengths)
        width = int(lengths.max()) if width is None else width
        numbers = np.arange(len(lengths))
        tokens = np.where(np.arange(width) < lengths[:, None], numbers[:, None], -1)
        return BatchedDataDict(tokens=tokens, length=lengths, name=[f"sample {number}" for number in numbers])

    return make

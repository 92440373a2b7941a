# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

import numpy as np
import pytest


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

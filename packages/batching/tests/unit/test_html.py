# SPDX-License-Identifier: Apache-2.0
"""The HTML form of a batch in a notebook."""

import numpy as np

from fairlead_batching import BatchedDataDict


def test_a_batch_is_a_table_of_its_leaves():
    """The table has a row for each leaf with its kind and shape, escaped keys, and a caption if leaves disagree."""
    batch = BatchedDataDict({"tokens": np.zeros((2, 3), dtype=np.int64), "<name>": ["a", "b"]})
    shown = batch._repr_html_()
    assert "<p>BatchedDataDict of 2 samples</p>" in shown
    assert "<td>tokens</td><td>numpy int64[2, 3]</td>" in shown
    assert "<td>&lt;name&gt;</td><td>list[2]</td>" in shown
    batch["tokens"] = np.zeros(5)
    assert "BatchedDataDict: " in batch._repr_html_()

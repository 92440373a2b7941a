# SPDX-License-Identifier: Apache-2.0
"""Dummy rows are marked, tracked through operations, and dropped."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict

ARGS = {
    "max_tokens_per_microbatch": 8,
    "sequence_length_round": 1,
    "input_key": "tokens",
    "input_lengths_key": "length",
}


def test_dummy_rows_are_masked():
    """Dummy rows are copies of the last sample with mask 0; objects in lists are not shared."""
    batch = BatchedDataDict(x=np.array([1, 2, 3]), log=[[1], [2], [3]])
    padded = batch.pad_to_multiple(5)
    assert padded["x"].tolist() == [1, 2, 3, 3, 3]
    assert padded["sample_mask"].dtype == np.float32
    assert padded["sample_mask"].tolist() == [1, 1, 1, 0, 0]
    padded["log"][3].append("changed")
    assert padded["log"] == [[1], [2], [3], [3, "changed"], [3]]
    assert batch["log"] == [[1], [2], [3]]
    assert "sample_mask" not in batch


@pytest.mark.parametrize(
    "mask", [[1, 0, 1], np.array([True, False, True]), np.array([1.0, 0.0, 1.0]), np.array([[1, 1], [0, 0], [1, 1]])]
)
def test_existing_mask(mask):
    """An existing mask keeps its kind and dtype; real samples with mask 0 are not dropped."""
    before = copy.deepcopy(mask)
    padded = BatchedDataDict(x=[1, 2, 3], keep=mask).pad_to_multiple(4, mask_key="keep")
    assert type(padded["keep"]) is type(mask)
    assert "sample_mask" not in padded
    assert not np.any(padded["keep"][3])
    assert np.asarray(padded["keep"]).dtype == np.asarray(before).dtype
    assert padded.drop_padding()["x"] == [1, 2, 3]
    assert np.array_equal(mask, before)


def test_already_a_multiple():
    """A batch that needs no padding still gets the mask, and nothing is dropped."""
    padded = BatchedDataDict(x=[1, 2]).pad_to_multiple(2)
    assert padded["sample_mask"].tolist() == [1, 1]
    assert padded.drop_padding()["x"] == [1, 2]
    assert padded.pad_to_multiple(3).drop_padding()["x"] == [1, 2]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 2))
def test_round_trip(lengths, shards, how):
    """Padding, sharding, pickling, restoring and dropping give the original batch for every plan."""
    batch = BatchedDataDict(tokens=np.zeros((len(lengths), 8)), length=lengths, name=list(range(len(lengths))))
    padded = batch.pad_to_multiple(shards)
    if how == 0:
        parts = padded.shard_by_batch_size(shards)
        joined = BatchedDataDict.from_batches(pickle.loads(pickle.dumps(parts)))
    elif how == 1:
        parts, order = padded.shard_by_batch_size(shards, dynamic_batching_args=ARGS)
        joined = order.restore(pickle.loads(pickle.dumps(parts)))
    else:
        args = {**ARGS, "algorithm": "balanced", "sequence_length_pad_multiple": 1}
        del args["sequence_length_round"]
        parts, order = padded.shard_by_batch_size(shards, sequence_packing_args=args)
        joined = order.restore(pickle.loads(pickle.dumps(parts)))
    assert joined.size % shards == 0
    assert joined["sample_mask"].sum() == len(lengths)
    dropped = joined.drop_padding()
    assert dropped["name"] == batch["name"]
    assert dropped.padding is None


def test_parts_keep_the_record_of_padding():
    """Slices, microbatches, repetitions and joins keep the record of dummy rows."""
    padded = BatchedDataDict(x=[1, 2, 3]).pad_to_multiple(4)
    assert padded.slice(2, 4).drop_padding()["x"] == [3]
    assert [part.drop_padding()["x"] for part in padded.make_microbatch_iterator(2)] == [[1, 2], [3]]
    assert padded.repeat_interleave(2).drop_padding()["x"] == [1, 1, 2, 2, 3, 3]
    fresh = BatchedDataDict(x=[7], sample_mask=np.ones(1, np.float32))
    assert BatchedDataDict.from_batches([padded, fresh]).drop_padding()["x"] == [1, 2, 3, 7]
    assert copy.deepcopy(padded).drop_padding()["x"] == [1, 2, 3]


def test_new_batch_has_no_record_of_padding():
    """A worker's own batch has no record of padding and needs the padded batch or a mask."""
    padded = BatchedDataDict(x=[1, 2, 3], sample_mask=[1, 0, 1]).pad_to_multiple(4)
    results = BatchedDataDict(y=[10, 20, 30, 30], sample_mask=padded["sample_mask"])
    with pytest.raises(ValueError, match=r"drop_padding\(like=padded\).*drop_padding\(mask_key='sample_mask'\)"):
        results.drop_padding()
    assert results.drop_padding(like=padded)["y"] == [10, 20, 30]
    assert results.drop_padding(mask_key="sample_mask")["y"] == [10, 30]
    with pytest.raises(ValueError, match=r"Unknown mask_key 'mask'; the batch has \['sample_mask', 'y'\]"):
        results.drop_padding(mask_key="mask")
    with pytest.raises(ValueError, match="The batch has 4 samples, but the record of padding has 2"):
        results.drop_padding(like=padded.slice(0, 2))


def test_mask_of_an_empty_batch():
    """A batch without samples has no dummy rows, whatever the shape of its mask."""
    for mask in ([], np.zeros(0), np.zeros((0, 3)), np.zeros((0, 0))):
        assert BatchedDataDict(x=[], mask=mask).drop_padding(mask_key="mask")["x"] == []


def test_misuse():
    """A multiple of 0 and an empty batch are refused."""
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        BatchedDataDict(x=[1]).pad_to_multiple(0)
    with pytest.raises(ValueError, match="An empty batch cannot be padded"):
        BatchedDataDict(x=[]).pad_to_multiple(2)

# SPDX-License-Identifier: Apache-2.0
"""What is done to a batch sample by sample."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, SlicedDataDict


def example():
    return BatchedDataDict(x=np.arange(12).reshape(4, 3), flag=np.array([True, False, True, True]), name=list("abcd"))


def test_is_a_dictionary():
    """Leaves are set and read as in any dictionary; size is checked when asked for."""
    batch = BatchedDataDict({"x": np.zeros((2, 3))}, y=[1, 2])
    assert batch.size == 2
    assert list(batch) == ["x", "y"]
    batch["z"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"different numbers of samples: \{'x': 2, 'y': 2, 'z': 3\}"):
        batch.size  # noqa: B018
    assert repr(batch).startswith("BatchedDataDict(size=inconsistent, x: numpy float64[2, 3], y: list[2]")
    del batch["z"]
    assert batch.get_dict() == batch.data
    assert batch.get_dict() is not batch.data
    assert BatchedDataDict().size == 0
    assert BatchedDataDict[dict](x=[1]).size == 1


def test_leaves_that_are_none():
    """What has no samples is named."""
    with pytest.raises(ValueError, match="Leaf 'x' has no dims"):
        BatchedDataDict(x=np.array(1)).size  # noqa: B018
    with pytest.raises(TypeError, match="Leaf 'x' must be a list, a numpy array or a torch tensor, found str"):
        BatchedDataDict(x="abc").size  # noqa: B018


def test_from_batches():
    """One batch after the other; only dims 0 and 1 may differ."""
    joined = BatchedDataDict.from_batches(
        [
            {"one": np.array([1]), "two": np.array([[1, 2]]), "three": np.ones((1, 1, 2)), "list": ["a"]},
            {"one": np.array([2, 3]), "two": np.array([[3], [4]]), "three": np.ones((2, 2, 2)), "list": ["b", "c"]},
        ],
        pad_value_dict={"two": -1},
    )
    assert joined["one"].tolist() == [1, 2, 3]
    assert joined["two"].tolist() == [[1, 2], [3, -1], [4, -1]]
    assert joined["three"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]], [[1, 1], [1, 1]]]
    assert joined["list"] == ["a", "b", "c"]
    assert type(SlicedDataDict.from_batches([joined])) is SlicedDataDict


def test_from_batches_promotes_dtypes():
    """Padded or not, the result has the dtype of all."""
    for width in (1, 2):
        joined = BatchedDataDict.from_batches([{"x": np.ones((1, width), np.int32)}, {"x": np.full((1, 1), 0.5)}])
        assert joined["x"].dtype == np.float64
        assert joined["x"][1, 0] == 0.5


@pytest.mark.parametrize(
    ("batches", "pad_values", "error", "message"),
    [
        ([], None, ValueError, "no batches to join"),
        ([{"x": [1], "y": [1]}, {"x": [1], "z": [1]}], None, ValueError, r"Batches 0 and 1 differ .*\['y', 'z'\]"),
        ([{"x": [1]}], {"y": 0}, ValueError, r"Unknown keys in pad_value_dict: \['y'\]"),
        ([{"x": [1]}, {"x": np.array([1])}], None, TypeError, r"Leaf 'x' is of several kinds .*\['list', 'numpy'\]"),
        ([{"x": np.ones((1, 2, 3))}, {"x": np.ones((1, 2, 4))}], None, ValueError, r"'x' cannot .*\(1, 2, 4\)"),
        ([{"x": np.ones(1)}, {"x": np.ones((1, 1))}], None, ValueError, r"'x' cannot be joined"),
        ([{"x": np.array(1)}], None, ValueError, r"Leaf 'x' has no dims"),
        ([{"x": [1], "y": [1]}, {"x": [1], "y": []}], None, ValueError, r"numbers of samples: \{'x': 1, 'y': 0\}"),
    ],
)
def test_from_bad_batches(batches, pad_values, error, message):
    """What cannot be joined is named."""
    with pytest.raises(error, match=message):
        BatchedDataDict.from_batches(batches, pad_values)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
@pytest.mark.parametrize("value", [-1, 0.5, np.nan, 300])
def test_pad_values_that_are_none(dtype, value):
    """An integer leaf is not padded with what would become another number."""
    batches = [{"x": np.ones((1, width), dtype)} for width in (2, 1)]
    with pytest.raises(ValueError, match="Leaf 'x' cannot be padded with"):
        BatchedDataDict.from_batches(batches, {"x": value})
    assert BatchedDataDict.from_batches(batches, {"x": np.int8(1)})["x"].tolist() == [[1, 1], [1, 1]]


def test_small_numbers():
    """Numbers of few bits count as well as any."""
    batch = BatchedDataDict(x=np.arange(300))
    assert [shard.size for shard in batch.shard_by_batch_size(np.uint8(2), np.uint8(150))] == [150, 150]
    assert [part.size for part in batch.make_microbatch_iterator(np.uint8(100))] == [100, 100, 100]
    assert batch.chunk(np.uint8(2), np.uint8(3))["x"][0] == batch.get_batch(np.uint8(2), np.uint8(100))["x"][0] == 200
    assert batch.pad_to_multiple(np.uint8(7)).size == 301


def test_parts():
    """Slices and chunks are views, selections are copies; all are SlicedDataDict."""
    batch = example()
    part = batch.slice(1, 3)
    assert type(part) is SlicedDataDict
    assert (part["name"], part["x"].tolist()) == (["b", "c"], [[3, 4, 5], [6, 7, 8]])
    assert np.shares_memory(part["x"], batch["x"])
    assert batch.slice(4, 4).size == 0
    assert [batch.chunk(rank, 2)["name"] for rank in range(2)] == [["a", "b"], ["c", "d"]]
    chosen = batch.select_indices([3, 0, 3])
    assert (chosen["name"], chosen["flag"].tolist()) == (["d", "a", "d"], [True, True, True])
    assert not np.shares_memory(chosen["x"], batch["x"])
    assert batch.get_batch(1, 3)["name"] == ["d"]
    assert [part["name"] for part in batch.make_microbatch_iterator(2)] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda batch: batch.slice(-1, 2), "no slice from -1 to 2 of 4 samples"),
        (lambda batch: batch.slice(3, 2), "no slice from 3 to 2 of 4 samples"),
        (lambda batch: batch.slice(0, 5), "no slice from 0 to 5 of 4 samples"),
        (lambda batch: batch.chunk(0, 3), "4 samples are no multiple of chunks=3: use pad_to_multiple"),
        (lambda batch: batch.chunk(0, 0), "chunks must be at least 1, got 0"),
        (lambda batch: batch.chunk(2, 2), "no chunk 2 of 2"),
        (lambda batch: batch.select_indices([0, 4, -1]), r"4 samples, so none at \[4, -1\]"),
        (lambda batch: batch.select_indices(np.array([True, False])), "'indices' must be whole numbers, found bool"),
        (lambda batch: batch.get_batch(2, 2), "no batch 2 of 2 among 4 samples"),
        (lambda batch: batch.get_batch(-1, 2), "batch_idx must be at least 0, got -1"),
        (lambda batch: batch.get_batch(0, -2), "batch_size must be at least 1, got -2"),
        (lambda batch: batch.get_batch(0), "batch_size is needed"),
        (lambda batch: batch.repeat_interleave(0), "num_repeats must be at least 1, got 0"),
        (lambda batch: batch.reorder_data([0, 1, 2]), "each of 0 to 3 once, found 3"),
        (lambda batch: batch.reorder_data([0, 1, 2, 2]), "each of 0 to 3 once"),
        (lambda batch: batch.reorder_data([0, 1, 2, 4]), "each of 0 to 3 once"),
        (lambda batch: batch.truncate_tensors(0, 2), "dim must be at least 1, got 0"),
        (lambda batch: batch.truncate_tensors(1, -2), "truncated_len must be at least 0, got -2"),
        (lambda batch: batch.make_microbatch_iterator(0), "microbatch_size must be at least 1, got 0"),
        (lambda batch: batch.make_microbatch_iterator(3), "4 samples are no multiple of microbatch_size=3"),
        (lambda batch: batch.slice(0, 0).make_microbatch_iterator(1), "no microbatches: it has 0 samples"),
    ],
)
def test_misuse(use, message):
    """What is not there is refused with the numbers, at once, and the batch stays as it was."""
    batch = example()
    with pytest.raises(ValueError, match=message):
        use(batch)
    assert batch["name"] == list("abcd")
    assert np.array_equal(batch["x"], example()["x"])


def test_repeat_interleave():
    """Each sample several times; what lists hold is copied, so that none is changed through another."""
    batch = BatchedDataDict(x=np.array([[1], [2]]), log=[["hi"], ["ho"]])
    repeated = batch.repeat_interleave(2)
    assert type(repeated) is BatchedDataDict
    assert repeated["x"].tolist() == [[1], [1], [2], [2]]
    repeated["log"][0].append("!")
    assert repeated["log"] == [["hi", "!"], ["hi"], ["ho"], ["ho"]]


@given(st.permutations(range(6)))
def test_reorder_undoes_a_selection(order):
    """reorder_data puts sample i at position indices[i], in place."""
    values = np.array([10, 20, 30, 40, 50, 60])
    batch = BatchedDataDict(x=values, y=values.tolist())
    expected = np.empty(6, int)
    for position, value in zip(order, values, strict=True):
        expected[position] = value
    moved = BatchedDataDict(batch)
    assert moved.reorder_data(order) is moved
    assert moved["x"].tolist() == moved["y"] == expected.tolist()
    assert batch.select_indices(order).reorder_data(order)["y"] == batch["y"]
    assert batch["y"] == values.tolist()


def test_truncate_tensors():
    """In place, for whatever has the dim and is longer."""
    batch = BatchedDataDict(
        x=np.ones((2, 5)), short=np.ones((2, 1)), flat=np.ones(2), deep=np.ones((2, 4, 3)), y=[1, 2]
    )
    batch.truncate_tensors(dim=1, truncated_len=2)
    shapes = [batch[key].shape for key in ("x", "short", "flat", "deep")]
    assert shapes == [(2, 2), (2, 1), (2,), (2, 2, 3)]
    assert batch["y"] == [1, 2]


def test_copies():
    """A shallow copy shares leaves, a deep one does not; both keep a plan."""
    (shard,), _ = BatchedDataDict(x=np.ones((2, 2)), n=[1, 2]).shard_by_batch_size(
        1,
        dynamic_batching_args={
            "max_tokens_per_microbatch": 4,
            "sequence_length_round": 1,
            "input_key": "x",
            "input_lengths_key": "n",
        },
    )
    for duplicate, shares in ((shard.copy(), True), (copy.copy(shard), True), (copy.deepcopy(shard), False)):
        assert type(duplicate) is SlicedDataDict
        assert duplicate.get_microbatch_iterator_dynamic_shapes_len() == 1
        assert np.shares_memory(duplicate["x"], shard["x"]) == shares
        duplicate["new"] = 1
        assert "new" not in shard


def test_devices_do_not_concern_numpy():
    """Arrays and lists stay where they are; to changes the batch, to_device makes another."""
    batch = example()
    assert batch.to("cuda") is batch
    other = batch.to_device("cuda")
    assert other is not batch
    assert other["x"] is batch["x"]

# SPDX-License-Identifier: Apache-2.0
"""Operations on the samples of a batch."""

import copy
import sys
import threading
from operator import ior

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, RemoteBatch, SlicedDataDict


def example():
    return BatchedDataDict(x=np.arange(12).reshape(4, 3), flag=np.array([True, False, True, True]), name=list("abcd"))


def test_is_a_dictionary():
    """Leaves are set and read as in any dictionary; the size is checked when it is read."""
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


def test_leaves_without_samples():
    """A leaf without samples is refused by name."""
    with pytest.raises(ValueError, match="Leaf 'x' has no dims"):
        BatchedDataDict(x=np.array(1)).size  # noqa: B018
    with pytest.raises(TypeError, match="Leaf 'x' must be a list, a numpy array or a torch tensor, found str"):
        BatchedDataDict(x="abc").size  # noqa: B018


def test_from_batches():
    """Batches are joined in order; only dims 0 and 1 may differ."""
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


@pytest.mark.parametrize(
    ("batches", "pad_values", "error", "message"),
    [
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
    """Batches that cannot be joined are refused with the keys."""
    with pytest.raises(error, match=message):
        BatchedDataDict.from_batches(batches, pad_values)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
@pytest.mark.parametrize("value", [-1, 0.5, np.nan, 300])
def test_pad_values_out_of_range(dtype, value):
    """An integer leaf is not padded with a value that its dtype would change."""
    batches = [{"x": np.ones((1, width), dtype)} for width in (2, 1)]
    with pytest.raises(ValueError, match="Leaf 'x' cannot be padded with"):
        BatchedDataDict.from_batches(batches, {"x": value})
    assert BatchedDataDict.from_batches(batches, {"x": np.int8(1)})["x"].tolist() == [[1, 1], [1, 1]]


def test_small_numbers():
    """Arguments of small integer dtypes do not overflow."""
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
        (lambda batch: batch.chunk(0, 3), "4 samples are not a multiple of chunks=3: use pad_to_multiple"),
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
        (lambda batch: batch.make_microbatch_iterator(3), "4 samples are not a multiple of microbatch_size=3"),
        (lambda batch: batch.slice(0, 0).make_microbatch_iterator(1), "no microbatches: it has 0 samples"),
    ],
)
def test_misuse(use, message):
    """Missing samples are refused at once, with the numbers, and the batch does not change."""
    batch = example()
    with pytest.raises(ValueError, match=message):
        use(batch)
    assert batch["name"] == list("abcd")
    assert np.array_equal(batch["x"], example()["x"])


def test_repeat_interleave():
    """Each sample is repeated; objects in lists are copied, so a change of one does not change another."""
    batch = BatchedDataDict(x=np.array([[1], [2]]), log=[["hi"], ["ho"]])
    repeated = batch.repeat_interleave(2)
    assert type(repeated) is BatchedDataDict
    assert repeated["x"].tolist() == [[1], [1], [2], [2]]
    repeated["log"][0].append("!")
    assert repeated["log"] == [["hi", "!"], ["hi"], ["ho"], ["ho"]]
    assert batch["log"] == [["hi"], ["ho"]]
    assert batch.repeat_interleave(repeats=1, share_immutable_media=True)["log"][0] is not batch["log"][0]
    for numbers in ({}, {"num_repeats": 1, "repeats": 1}):
        with pytest.raises(TypeError, match="Pass num_repeats or repeats, not both; got"):
            batch.repeat_interleave(**numbers)


def test_no_batches():
    """No batches are joined to an empty batch of the class."""
    joined = SlicedDataDict.from_batches([], {"x": 0}, allow_missing_packed_tensors=True)
    assert (type(joined), dict(joined), joined.size) == (SlicedDataDict, {}, 0)


def test_empty_batches_may_lack_keys():
    """Batches without samples may lack keys; batches with samples may not."""
    full = {"x": np.array([[1, 2]]), "y": ["a"]}
    for empty in ({}, {"x": np.zeros((0, 3), np.int64)}, {"y": []}):
        for batches in ([full, empty], [empty, full], [empty, full, empty, full]):
            joined = BatchedDataDict.from_batches(batches)
            assert joined["y"] == ["a"] * joined.size
            assert joined["x"][:, :2].tolist() == [[1, 2]] * joined.size
    assert set(BatchedDataDict.from_batches([{"x": []}, {"y": []}])) == {"x", "y"}
    for batches in ([{"x": [1]}, {"x": [], "y": []}], [{"x": [], "y": []}, {"x": [1]}]):
        with pytest.raises(ValueError, match=r"Batches 0 and 1 differ in keys: only one of them has \['y'\]"):
            BatchedDataDict.from_batches(batches)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (np.ones((1, 2), np.int64), None),
        (np.ones((1, 2), np.int64), "1"),
        (np.ones((1, 2), np.int64), 1j),
        (np.ones((1, 2)), None),
        (np.ones((1, 2)), "1"),
        (np.ones((1, 2)), 1j),
        (np.ones((1, 2)), 10**400),
        (np.ones((1, 2), np.float16), 1e6),
        (np.ones((1, 2), np.complex64), 1e300j),
        (np.array([["a", "b"]]), 0),
        (np.array([["a", "b"]]), "long"),
        (np.array([[b"a", b"b"]]), "a"),
        (np.array([["2026-01-01", "2026-01-02"]], "M8[D]"), 0),
        (np.array([["2026-01-01", "2026-01-02"]], "M8[D]"), np.datetime64("2026-01-01T01", "h")),
        (np.array([[1, 2]], "m8[s]"), 0),
    ],
)
def test_pad_values_of_another_kind(leaf, value):
    """A pad value that the dtype does not hold is refused by name, even if it is the default."""
    with pytest.raises(ValueError, match=r"Leaf 'x' cannot be padded with .*: its dtype is .*pad_value_dict\['x'\]"):
        BatchedDataDict.from_batches([{"x": leaf}, {"x": leaf[:, :1]}], {"x": value} if value != 0 else None)


@pytest.mark.parametrize("value", [(1, 2), [3], "xy", {"key": 1}, None, range(2)])
def test_pad_values_of_objects(value):
    """An array of objects is padded with the value itself, also if that is a sequence."""
    leaf = np.array([["a", 1, 2]], object)
    joined = BatchedDataDict.from_batches([{"x": leaf}, {"x": leaf[:, :1]}], {"x": value})["x"]
    assert joined.tolist() == [["a", 1, 2], ["a", value, value]]


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (np.ones((1, 2), np.int64), 2**63 - 1),
        (np.ones((1, 2), np.bool_), True),
        (np.ones((1, 2), np.float16), -np.inf),
        (np.ones((1, 2), np.complex64), 1 + 2j),
        (np.array([["aa", "b"]]), ""),
        (np.array([["2026-01-01", "2026-01-02"]], "M8[D]"), np.datetime64("NaT")),
        (np.array([["2026-01-01", "2026-01-02"]], "M8[s]"), np.datetime64("2026-01-03")),
        (np.array([["a", 1]], object), None),
    ],
)
def test_pad_values_that_fit(leaf, value):
    """A pad value of the dtype's own kind fills shorter leaves."""
    joined = BatchedDataDict.from_batches([{"x": leaf}, {"x": leaf[:, :1]}], {"x": value})["x"]
    assert joined.dtype == leaf.dtype
    assert np.array_equal(joined[1, 1:], np.array([value], leaf.dtype), equal_nan=leaf.dtype.kind in "fcmM")


@pytest.mark.parametrize(
    "dtype", [np.int32, np.uint64, np.float64, bool, object, "U1", "S1", "M8[D]", "m8[s]", ">i8"], ids=str
)
@pytest.mark.parametrize("width", [1, 2])
def test_dtypes_do_not_mix(dtype, width):
    """Values are never converted silently: leaves of two dtypes are refused, with and without padding."""
    with pytest.raises(ValueError, match=r"Leaf 'x' cannot be joined: found dtypes \['.*Convert it to one dtype first"):
        BatchedDataDict.from_batches([{"x": np.zeros((1, 1), np.int64)}, {"x": np.zeros((1, width), dtype)}])


@pytest.mark.parametrize("strings", [["a", "long"], [b"a", b"long"]])
def test_strings_of_several_lengths(strings):
    """Strings have one dtype, whatever their lengths."""
    leaves = [np.array([[string]]) for string in strings]
    assert BatchedDataDict.from_batches([{"x": leaf} for leaf in leaves])["x"].ravel().tolist() == strings
    joined = BatchedDataDict.from_batches(
        [{"x": leaf.repeat(width, 1)} for leaf, width in zip(leaves, (2, 1), strict=True)], {"x": strings[1]}
    )
    assert joined["x"].tolist() == [[strings[0]] * 2, [strings[1]] * 2]


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
    """Leaves that have the dim and are longer are truncated in place."""
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


def test_copies_on_threads():
    """A batch, and a handle, can be copied by several threads at the same time."""
    batch = example()
    rows = BatchedDataDict(piece=np.zeros(4, dtype=int), row=np.arange(4))
    handle = RemoteBatch(({"x": None, "y": None},), rows)
    wrong: list[object] = []

    def make_copies() -> None:
        for _ in range(500):
            sizes = batch.copy().size, len(handle.slice(0, 4)), batch.size, len(handle)
            if sizes != (4, 4, 4, 4):
                wrong.append(sizes)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make_copies) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert (batch.size, len(handle)) == (4, 4)


def test_operators_are_refused():
    """`|` and `|=` are refused with the methods that keep what else belongs to the batch."""
    for change in (lambda batch: batch | {"y": [1]}, lambda batch: {"y": [1]} | batch, lambda batch: ior(batch, {})):
        with pytest.raises(TypeError, match=r"has no operator \|: use union\(\), or update\(\)"):
            change(example())


def test_arrays_are_not_moved():
    """Arrays and lists are not moved; to() changes the batch, to_device() returns a new one."""
    batch = example()
    assert batch.to("cuda") is batch
    other = batch.to_device("cuda")
    assert other is not batch
    assert other["x"] is batch["x"]

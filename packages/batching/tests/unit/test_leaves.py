# SPDX-License-Identifier: Apache-2.0
"""Leaves of every kind: round trips of all operations, ragged rows, nested mappings, and meta."""

import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, RaggedLeaf, plan_shards

try:
    import torch
except ImportError:
    torch = None

KEYS = {"input_key": "tokens", "input_lengths_key": "length"}


def make_batch(lengths):
    """Return a batch with a leaf of every kind, in which every sample is another one."""
    size, numbers = len(lengths), np.arange(len(lengths))
    # Two samples share an image, and two have one each.
    images = [np.full((length, 2), number, np.float32) for number, length in enumerate(lengths)]
    batch = BatchedDataDict(
        tokens=np.where(np.arange(12) < np.array(lengths)[:, None], numbers[:, None] + 1, 0),
        length=np.array(lengths),
        name=[f"sample {number}" for number in range(size)],
        image={
            "patches": RaggedLeaf([images[max(number, 1)] for number in range(size)]),
            "depth": {"mean": numbers / 2},
        },
    )
    batch.meta = {"temperature": 0.5, "table": np.arange(3)}
    if torch is not None:
        batch["mask"] = torch.from_numpy(numbers)[:, None].expand(size, 12)
        batch["half"] = torch.from_numpy(numbers).to(torch.bfloat16)
        batch["audio"] = RaggedLeaf([torch.full((length,), float(number)) for number, length in enumerate(lengths)])
    return batch


def assert_same(one, other):
    assert list(one) == list(other)
    for key, leaf in one.items():
        assert type(leaf) is type(other[key]), key
        if isinstance(leaf, RaggedLeaf):
            assert len(leaf) == len(other[key])
            assert all(
                row.shape == that.shape and (row == that).all() for row, that in zip(leaf, other[key], strict=True)
            )
        elif isinstance(leaf, list):
            assert leaf == other[key], key
        else:
            assert leaf.dtype == other[key].dtype
            assert leaf.tolist() == other[key].tolist(), key
    assert one.meta.keys() == other.meta.keys()
    assert one.meta["table"].tolist() == other.meta["table"].tolist()


def plans(tokens):
    args = {**KEYS, "max_tokens_per_microbatch": tokens}
    packed = {**args, "sequence_length_pad_multiple": 1}
    return [
        {},
        {"dynamic_batching_args": {**args, "sequence_length_round": 2}},
        {"dynamic_batching_args": {**args, "sequence_length_round": 2, "cost": (0, 1)}},
        {"sequence_packing_args": {**packed, "algorithm": "first_fit_decreasing"}},
        {"sequence_packing_args": {**packed, "algorithm": "balanced", "cost": (1, 1)}},
    ]


all_lengths = st.integers(1, 3).flatmap(
    lambda shards: st.tuples(
        st.just(shards), st.lists(st.integers(0, 12), min_size=4, max_size=5).map(lambda lengths: lengths * shards)
    )
)


@given(all_lengths, st.integers(0, 4), st.randoms(use_true_random=False))
def test_round_trips(problem, which, rng):
    """Sharding, reordering, repeating, padding, joining and pickling lead back to the batch, for every leaf."""
    shards, lengths = problem
    batch = make_batch(lengths)
    order = rng.sample(range(len(lengths)), len(lengths))
    assert_same(batch.select_indices(order).reorder_data(order), batch)
    repeated = batch.repeat_interleave(2)
    assert repeated.size == 2 * batch.size
    assert_same(repeated.select_indices(range(0, repeated.size, 2)), batch)
    assert_same(repeated.select_indices(range(1, repeated.size, 2)), batch)
    padded = batch.pad_to_multiple(7).drop_padding()
    assert_same(padded.drop("sample_mask"), batch)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
    try:
        plan = plan_shards(batch["length"], shards, width=12, **plans(24)[which])
    except ValueError as error:
        assert "cannot fill" in str(error)  # noqa: PT017 - other plans are made
        return
    parts = [pickle.loads(pickle.dumps(shard)) for shard in batch.shard(plan)]
    assert_same(BatchedDataDict.from_batches(parts).reorder_data(plan.order), batch)


def test_parts_of_every_kind():
    """Slices, microbatches and minibatches have the samples of all leaves."""
    batch = make_batch([3, 1, 2, 4])
    part = batch.slice(1, 3)
    assert part["name"] == ["sample 1", "sample 2"]
    assert [row.shape for row in part["image.patches"]] == [(1, 2), (2, 2)]
    assert next(batch.minibatches(2))["image.depth.mean"].tolist() == [0.0, 0.5]
    assert [part["name"] for part in batch.make_microbatch_iterator(3 + 1)] == [batch["name"]]
    assert batch.to("cpu")["image.patches"] == batch["image.patches"]


def test_other_kinds_are_refused():
    """A ragged leaf is no mask and no input, and a masked array is no leaf."""
    batch = BatchedDataDict(x=RaggedLeaf([np.ones(2)]), length=[2])
    assert repr(batch) == "BatchedDataDict(size=1, x: RaggedLeaf[1, 16 bytes], length: list[1])"
    with pytest.raises(TypeError, match=r"Leaf 'x' is of several kinds .*\['RaggedLeaf', 'list'\]"):
        BatchedDataDict.from_batches([batch, {"x": [1], "length": [2]}])
    with pytest.raises(ValueError, match="mask 'x' must be a list, an array or a tensor: choose another mask_key"):
        batch.pad_to_multiple(2, mask_key="x")
    args = {**KEYS, "input_key": "x", "max_tokens_per_microbatch": 8, "sequence_length_round": 1}
    with pytest.raises(ValueError, match=r"'x' must be an array or tensor of .*found a RaggedLeaf"):
        batch.shard_by_batch_size(1, dynamic_batching_args=args)
    masked = BatchedDataDict(x=np.ma.array([1, 2], mask=[False, True]))
    for use in (lambda: masked.size, lambda: pickle.dumps(masked), lambda: BatchedDataDict.from_batches([masked])):
        with pytest.raises(TypeError, match="Leaf 'x' is a masked array: make a leaf of its data, and a leaf of its"):
            use()


def test_shared_rows_are_stored_once():
    """A row that several samples share has one copy, in shards, selections, repetitions, joins and pickles."""
    one, other = np.ones((100, 10)), np.zeros((50, 10))
    batch = BatchedDataDict(image=RaggedLeaf([one, one, other, one]))
    assert batch["image"].nbytes == one.nbytes + other.nbytes
    assert batch["image"].buffer.nbytes == batch["image"].nbytes
    shards = batch.shard_by_batch_size(2)
    assert [shard["image"].nbytes for shard in shards] == [one.nbytes, one.nbytes + other.nbytes]
    assert len(pickle.dumps(shards[0])) < one.nbytes + 2000
    for many in (batch.repeat_interleave(8), BatchedDataDict.from_batches(shards), batch.shuffle(0)):
        assert many["image"].nbytes == batch["image"].nbytes
        assert np.shares_memory(many["image"].buffer, batch["image"].buffer)
    buffers = []
    data = pickle.dumps(batch.repeat_interleave(8), protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) <= batch["image"].nbytes + 8 * 40 + 100
    received = pickle.loads(data, buffers=buffers)
    assert received.size == 32
    assert np.shares_memory(received["image"][0], received["image"][1])
    apart = BatchedDataDict.from_batches([pickle.loads(pickle.dumps(shard)) for shard in shards])
    assert_rows = [row.shape for row in apart["image"]]
    assert assert_rows == [(100, 10), (100, 10), (50, 10), (100, 10)]


def test_rows_cannot_be_written():
    """Rows are read-only views, because samples may share them; the arrays they were made from stay writable."""
    row = np.ones(3)
    leaf = RaggedLeaf([row, row])
    with pytest.raises(ValueError, match="read-only"):
        leaf[0][0] = 5
    row[0] = 7
    assert leaf[1].tolist() == [1, 1, 1]


def test_ragged_rows_of_all_shapes():
    """Rows without dims or elements, and leaves without rows, are kept; rows can be padded to one array."""
    leaf = RaggedLeaf([np.zeros((0, 3)), np.ones((2, 1)), np.ones((1, 0))])
    assert [row.shape for row in leaf] == [(0, 3), (2, 1), (1, 0)]
    assert leaf.to_padded(-1).tolist() == [[[-1] * 3] * 2, [[1, -1, -1]] * 2, [[-1] * 3] * 2]
    assert RaggedLeaf([np.array(3.0), np.array(4.0)]).to_padded().tolist() == [3.0, 4.0]
    empty = leaf.take(np.array([], dtype=np.int64))
    for none in (empty, RaggedLeaf([]), pickle.loads(pickle.dumps(empty))):
        assert len(none) == 0
        assert [row.shape for row in RaggedLeaf.concat([none, leaf, none])] == [(0, 3), (2, 1), (1, 0)]
        assert len(RaggedLeaf.concat([none, none])) == 0
    assert leaf == pickle.loads(pickle.dumps(leaf))
    assert leaf != leaf.take(np.array([1, 0, 2]))
    assert leaf != "leaf"
    assert repr(leaf) == "RaggedLeaf(3 rows, 16 bytes, float64)"


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([np.ones(2), [1]], TypeError, "Row 1 must be an array or a tensor, found list"),
        ([np.ones(2), np.ones(2, int)], ValueError, "row 1 has dtype int64, the first row float64"),
        ([np.ones(2), np.ones(2), np.ones((2, 2))], ValueError, "row 2 has dims 2, the first row 1"),
    ],
)
def test_bad_rows(rows, error, message):
    """Rows that do not go together are refused by their number."""
    with pytest.raises(error, match=message):
        RaggedLeaf(rows)


@pytest.mark.skipif(torch is None, reason="needs torch")
def test_ragged_tensors():
    """Tensors of any dtype are stored, moved and pickled; they do not mix with arrays."""
    row = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    leaf = RaggedLeaf([row, row[:1], row])
    received = pickle.loads(pickle.dumps(BatchedDataDict(x=leaf)))["x"]
    assert [part.tolist() for part in received] == [row.tolist(), row[:1].tolist(), row.tolist()]
    assert received.dtype == torch.bfloat16
    assert received.nbytes == (6 + 3) * 2
    assert leaf.to("meta").buffer.device.type == "meta"
    # Empty tensors have the address 0, and meta tensors too.
    empty = RaggedLeaf([torch.zeros(0)]), RaggedLeaf([torch.zeros(0), torch.zeros(0)])
    for one, other in (empty, (leaf.to("meta"), RaggedLeaf([row]).to("meta"))):
        assert [part.shape for part in RaggedLeaf.concat([one, other])] == [part.shape for part in (*one, *other)]
    with pytest.raises(TypeError, match="Rows must be all arrays or all tensors: row 1 is a Tensor"):
        RaggedLeaf([np.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match="row 1 has device cpu, the first row meta"):
        RaggedLeaf([torch.ones(2, device="meta"), torch.ones(2)])
    with pytest.raises(ValueError, match="Leaf 'x' is or holds a tensor on meta"):
        pickle.dumps(BatchedDataDict(x=leaf.to("meta")))


def test_nested_mappings_have_dotted_keys():
    """A mapping of leaves, also a batch, is stored flat; a new one replaces the old one, and select() finds it."""
    batch = BatchedDataDict({"obs": {"image": np.ones((2, 3)), "text": {"ids": [1, 2]}}, "y": [3, 4]})
    assert list(batch) == ["obs.image", "obs.text.ids", "y"]
    assert list(batch.select("obs")) == ["obs.image", "obs.text.ids"]
    assert list(batch.drop(["obs.text"])) == ["obs.image", "y"]
    batch["obs"] = BatchedDataDict(depth=[5, 6])
    assert list(batch) == ["y", "obs.depth"]
    joined = BatchedDataDict.from_batches([{"obs": {"depth": [1]}}, {"obs": {"depth": [2]}}])
    assert joined["obs.depth"] == [1, 2]
    with pytest.raises(ValueError, match="Leaf 'x' is an empty mapping, which has no leaves: leave it out"):
        batch["x"] = {}
    with pytest.raises(ValueError, match=r"Leaf 'obs\.text' is an empty mapping"):
        batch["obs"] = {"image": [7, 8], "text": {}}
    assert batch == {"y": [3, 4], "obs.depth": [5, 6]}
    batch["y"] = {"class": [9, 10]}
    assert batch == {"obs.depth": [5, 6], "y.class": [9, 10]}


def test_meta_follows_the_batch():
    """Parts, copies and pickles have their own meta, and batches with different values are not joined."""
    batch = BatchedDataDict(x=np.arange(4), n=[1, 1, 1, 1])
    batch.meta["step"] = 3
    parts = [
        *(batch.slice(0, 2), batch.copy(), batch.shard_by_batch_size(2)[0], batch.select("x"), batch.shuffle(0)),
        *(batch.repeat_interleave(2), batch.pad_to_multiple(3), batch.to_device("cpu"), BatchedDataDict(batch)),
        *(batch.union({"y": [1] * 4}), next(batch.minibatches(2)), batch.rename({"n": "m"})),
        pickle.loads(pickle.dumps(batch)),
    ]
    for part in parts:
        assert part.meta == {"step": 3}
        part.meta["step"] = 4
    assert batch.meta == {"step": 3}
    other = BatchedDataDict(x=np.arange(1), n=[0])
    assert BatchedDataDict.from_batches([batch, other]).meta == {"step": 3}
    other.meta = {"step": 4}
    with pytest.raises(
        ValueError, match=r"Batches 0 and 1 have different meta\['step'\]: 3 and 4. Set it to one value"
    ):
        BatchedDataDict.from_batches([batch, other])
    with pytest.raises(ValueError, match=r"have different meta\['step'\]"):
        other.slice(0, 1).rename({"x": "y", "n": "m"}).union(batch.slice(0, 1))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1]), np.array([1.0]), False),
        (np.array([1]), np.array([1, 2]), False),
        ([np.array([1])], [np.array([1])], True),
        ({"a": (1, np.ones(2))}, {"a": (1, np.ones(2))}, True),
        ({"a": 1}, {"b": 1}, False),
        ([1], (1,), False),
        ([1, 2], [1], False),
        ("a", "a", True),
    ],
)
def test_meta_of_arrays_is_compared(one, other, same):
    """Values of any kind are compared, arrays by dtype, shape and value."""
    batches = [BatchedDataDict(x=[1]), BatchedDataDict(x=[2])]
    for batch, value in zip(batches, (one, other), strict=True):
        batch.meta["value"] = value
    if same:
        assert BatchedDataDict.from_batches(batches).meta["value"] is one
    else:
        with pytest.raises(ValueError, match=r"different meta\['value'\]"):
            BatchedDataDict.from_batches(batches)


def test_a_scalar_is_no_leaf():
    """A value that is not per sample is refused with the remedy."""
    with pytest.raises(TypeError, match=r"found float. A value that is not per sample belongs into batch.meta"):
        BatchedDataDict(x=[1], temperature=0.5).size  # noqa: B018
    with pytest.raises(ValueError, match=r"\{'x': 1, 'y': 2\}. A value that is not per sample belongs into batch.meta"):
        BatchedDataDict(x=[1], y=[1, 2]).size  # noqa: B018


def test_torch_is_not_imported_for_ragged_arrays(run_python):
    """Ragged arrays need numpy only."""
    script = """
        import pickle, sys
        import numpy as np
        from fairlead_batching import BatchedDataDict, RaggedLeaf
        batch = BatchedDataDict(x=RaggedLeaf([np.ones(2), np.ones(3)]))
        assert pickle.loads(pickle.dumps(batch.repeat_interleave(2)))["x"][3].shape == (3,)
        print("torch" in sys.modules)
    """
    assert run_python(script, block=["torch"]).strip() == "False"
    assert "fairlead_batching" in sys.modules

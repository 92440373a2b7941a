# SPDX-License-Identifier: Apache-2.0
"""shard_by_batch_size: shards, their microbatches, and the restored order."""

import pickle
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, DynamicBatchingArgs, Order, SequencePackingArgs, SlicedDataDict

KEYS = {"input_key": "tokens", "input_lengths_key": "length"}
ALGORITHMS = get_args(get_type_hints(SequencePackingArgs)["algorithm"])
LENGTHS = [2, 8, 4, 6, 1, 7, 3, 5]


def dynamic(tokens, multiple=1):
    return DynamicBatchingArgs(max_tokens_per_microbatch=tokens, sequence_length_round=multiple, **KEYS)


def packing(tokens, algorithm="first_fit_decreasing", multiple=1, **more):
    return SequencePackingArgs(
        max_tokens_per_microbatch=tokens,
        algorithm=algorithm,
        sequence_length_pad_multiple=multiple,
        **KEYS,
        **more,
    )


def lengths_of(shards):
    return [shard["length"].tolist() for shard in shards]


def test_documented_example():
    """With shards=2 and batch_size=2, [A A B B C C D D] is [A B C D] on both shards."""
    shards = BatchedDataDict(x=list("AABBCCDD")).shard_by_batch_size(shards=2, batch_size=2)
    assert [shard["x"] for shard in shards] == [list("ABCD"), list("ABCD")]
    assert all(type(shard) is SlicedDataDict for shard in shards)


def test_groups():
    """Shard s is piece s of every group; without a batch_size there is one group."""
    batch = BatchedDataDict(x=np.arange(12))
    assert [shard["x"].tolist() for shard in batch.shard_by_batch_size(2, batch_size=4)] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    assert [shard["x"].tolist() for shard in batch.shard_by_batch_size(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    first = batch.shard_by_batch_size(2, batch_size=4)[0]
    assert [first.get_batch(number, 2)["x"].tolist() for number in range(3)] == [[0, 1], [4, 5], [8, 9]]


def test_uneven_shards():
    """Leading shards have one sample more; the last ones may be empty."""
    batch = BatchedDataDict(x=np.arange(8), y=list(range(8)))
    shards = batch.shard_by_batch_size(3, allow_uneven_shards=True)
    assert [shard["x"].tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [shard["y"] for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [shard.size for shard in batch.shard_by_batch_size(10, 8, allow_uneven_shards=True)] == [1] * 8 + [0] * 2
    assert [shard.size for shard in batch.shard_by_batch_size(4, allow_uneven_shards=True)] == [2] * 4


def test_uneven_shards_cannot_deadlock():
    """Uneven shards have microbatches only if every shard has the same number of them."""
    shards = BatchedDataDict(x=np.arange(8)).shard_by_batch_size(3, allow_uneven_shards=True)
    for shard in shards:
        with pytest.raises(ValueError, match="Shards of 2 to 3 samples have different numbers of microbatches of 2"):
            shard.make_microbatch_iterator(2)
    assert [[part.size for part in shard.make_microbatch_iterator(3)] for shard in shards] == [[3], [3], [2]]


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: shard.shuffle(0),
        lambda shard: shard.reorder_data(range(shard.size)),
        lambda shard: shard.repeat_interleave(2),
        lambda shard: shard.pad_to_multiple(2),
        lambda shard: next(shard.minibatches(3)),
        lambda shard: next(shard.minibatches(3, seed=0)),
        lambda shard: list(shard.repeat_interleave(4).minibatches(7))[1].shuffle(0),
        lambda shard: shard.get_batch(0, 8),
    ],
)
@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 4])
def test_changed_uneven_shards_cannot_deadlock(change, microbatch_size):
    """After a change of all uneven shards, all have as many microbatches as each other, or all raise the same error."""
    shards = BatchedDataDict(x=np.arange(11)).shard_by_batch_size(4, allow_uneven_shards=True)
    outcomes = set()
    for shard in map(change, shards):
        try:
            outcomes.add(len(list(shard.make_microbatch_iterator(microbatch_size))))
        except ValueError as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1


def test_planned_shards_cannot_deadlock(make_batch):
    """Shards with different numbers of samples have no plain microbatches."""
    batch = make_batch([6, 1, 1, 1, 1])
    packed, _ = batch.shard_by_batch_size(2, allow_uneven_shards=True, sequence_packing_args=packing(6))
    uneven, _ = batch.shard_by_batch_size(2, allow_uneven_shards=True, dynamic_batching_args=dynamic(12))
    for shard in packed:
        for part in (shard, shard.get_batch(0)):
            with pytest.raises(ValueError, match=r"use make_microbatch_iterator_for_packable_sequences\(\)"):
                part.make_microbatch_iterator(1)
    for shard in uneven:
        for part in (shard, shard.get_batch(0)):
            with pytest.raises(
                ValueError, match="Shards of 2 to 3 samples have different numbers of microbatches of 1"
            ):
                part.make_microbatch_iterator(1)


def test_shards_do_not_share_memory_with_the_batch():
    """Writing to a shard changes neither the batch nor another shard, even if the order is unchanged."""
    batch = BatchedDataDict(x=np.arange(4))
    one, other = batch.shard_by_batch_size(2)
    one["x"][:] = 9
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert other["x"].tolist() == [2, 3]


def test_dynamic_batching(make_batch):
    """Eight sequences are sorted, dealt to two shards in turn, and cut by the longest at each position."""
    shards, order = make_batch(LENGTHS).shard_by_batch_size(2, dynamic_batching_args=dynamic(8, 2))
    assert lengths_of(shards) == [[1, 3, 5, 7], [2, 4, 6, 8]]
    assert order == [4, 6, 7, 5, 0, 2, 3, 1]
    for shard in shards:
        assert shard.micro_batch_indices == [[[0, 2], [2, 3], [3, 4]]]
        assert shard.micro_batch_lengths == [[4, 6, 8]]
        assert shard.elem_counts_per_gb is None
        assert shard.get_microbatch_iterator_dynamic_shapes_len() == 3
        parts = shard.make_microbatch_iterator_with_dynamic_shapes()
        assert [part["tokens"].shape for part in parts] == [(2, 4), (1, 6), (1, 8)]


def test_only_sequences_are_truncated(make_batch):
    """Only the leaves whose second dim is the sequence are truncated: by width, or as named."""
    batch = make_batch(LENGTHS)
    batch.update(
        image=np.ones((8, 768)),
        short=np.ones((8, 3)),
        heads=np.ones((8, 5, 8), dtype=int),
        mask=np.ones((8, 8, 2), dtype=int),
        wide=np.ones((8, 8), dtype=int),
    )
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(8, 2))
    for part in (shard, shard.get_batch(0), pickle.loads(pickle.dumps(shard))):
        first = next(part.make_microbatch_iterator_with_dynamic_shapes())
        shapes = [first[key].shape[1:] for key in ("tokens", "image", "short", "heads", "mask", "wide")]
        assert shapes == [(2,), (768,), (3,), (5, 8), (2, 2), (2,)]
    first = next(shard.make_microbatch_iterator_with_dynamic_shapes(sequence_keys=["tokens", "short"]))
    assert [first[key].shape[1:] for key in ("tokens", "short", "wide")] == [(2,), (2,), (8,)]
    first = next(shard.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=2))
    assert [first[key].shape[1:] for key in ("tokens", "heads", "mask")] == [(8,), (5, 2), (8, 2)]
    assert shard["tokens"].shape == (8, 8)


def test_a_leaf_that_is_as_wide_by_chance(make_batch):
    """Where a leaf of another dtype is as wide as the sequences, they have to be named: it may be an embedding."""
    embedding = np.arange(64.0).reshape(8, 8)
    batch = make_batch(LENGTHS).union({"embedding": embedding})
    (shard,), order = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(8, 2))
    message = r"\['embedding'\] are as wide as 'tokens', but of another dtype: .* sequence_keys=\['tokens', ...\]"
    with pytest.raises(ValueError, match=message):
        shard.make_microbatch_iterator_with_dynamic_shapes()
    parts = list(shard.make_microbatch_iterator_with_dynamic_shapes(sequence_keys=["tokens"]))
    assert np.concatenate([part["embedding"] for part in parts]).tolist() == embedding[order].tolist()
    (packed,), _ = batch.shard_by_batch_size(1, sequence_packing_args=packing(8))
    with pytest.raises(ValueError, match=message):
        next(packed.make_microbatch_iterator_for_packable_sequences()).to_packed()


def test_sequences_that_are_unknown(make_batch):
    """Leaves to truncate have to be named if the plan's own leaf is missing; leaves without the dim are refused."""
    (shard,), _ = make_batch(LENGTHS).shard_by_batch_size(1, dynamic_batching_args=dynamic(8))
    for wrong, message in (
        (["x", "tokens"], r"Unknown sequence_keys \['x'\]; the batch has \['length', 'name', 'tokens'\]"),
        (["tokens", "name", "length"], r"Leaves \['name', 'length'\] in sequence_keys have no dim 1"),
    ):
        with pytest.raises(ValueError, match=message):
            shard.make_microbatch_iterator_with_dynamic_shapes(sequence_keys=wrong)
    shard["ids"] = shard.pop("tokens")
    with pytest.raises(ValueError, match=r"at the plan's input_key, 'tokens'\. Name the leaves .*sequence_keys"):
        shard.make_microbatch_iterator_with_dynamic_shapes()
    parts = shard.make_microbatch_iterator_with_dynamic_shapes(sequence_keys="ids")
    assert [part["ids"].shape[1] for part in parts] == shard.micro_batch_lengths[0]


def test_dynamic_batching_by_groups(make_batch):
    """Each group is sorted, dealt and cut by itself; ties keep their order; get_batch() returns the group's plan."""
    batch = make_batch([3, 1, 3, 1, 2, 2, 4, 4])
    shards, order = batch.shard_by_batch_size(2, batch_size=4, dynamic_batching_args=dynamic(4))
    assert lengths_of(shards) == [[1, 3, 2, 4], [1, 3, 2, 4]]
    assert order == [1, 0, 4, 6, 3, 2, 5, 7]
    assert shards[0].micro_batch_indices == [[[0, 1], [1, 2]], [[0, 1], [1, 2]]]
    assert shards[0].micro_batch_lengths == [[1, 3], [2, 4]]
    group = shards[1].get_batch(1)
    assert group["name"] == ["sample 5", "sample 7"]
    assert (group.micro_batch_indices, group.micro_batch_lengths) == ([[[0, 1], [1, 2]]], [[2, 4]])
    widths = [
        [part["tokens"].shape[1] for part in batch.make_microbatch_iterator_with_dynamic_shapes()]
        for batch in (shards[0], group)
    ]
    assert widths == [[1, 3, 2, 4], [2, 4]]


def test_rounding_stops_at_the_width(make_batch):
    """A rounded length never exceeds the tensor's own width, so a microbatch may hold more."""
    batch = make_batch([5, 5, 5, 5], width=5)
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(10, 8))
    assert shard.micro_batch_lengths == [[5, 5]]
    with pytest.raises(ValueError, match=r"Sample 0 of 'tokens' has 5 tokens by 'length', padded 8, more than .*=7"):
        make_batch([5, 5], width=9).shard_by_batch_size(1, dynamic_batching_args=dynamic(7, 8))


def test_uneven_dynamic_batching(make_batch):
    """A sample that only some shards have joins the microbatch before, or the plan is refused; none is ever empty."""
    shards, order = make_batch([1, 1, 2, 2, 4]).shard_by_batch_size(
        2, allow_uneven_shards=True, dynamic_batching_args=dynamic(8)
    )
    assert lengths_of(shards) == [[1, 2, 4], [1, 2]]
    assert [shard.micro_batch_indices for shard in shards] == [[[[0, 1], [1, 3]]], [[[0, 1], [1, 2]]]]
    assert order == [0, 2, 4, 1, 3]
    with pytest.raises(
        ValueError,
        match="only some have a sample 2, of padded length 4, and max_tokens_per_microbatch=7 does not hold it",
    ):
        make_batch([1, 1, 4, 4, 4]).shard_by_batch_size(2, allow_uneven_shards=True, dynamic_batching_args=dynamic(7))


def test_packing(make_batch):
    """Eight sequences are packed into four bins, which are dealt to two shards in turn."""
    shards, order = make_batch(LENGTHS).shard_by_batch_size(2, sequence_packing_args=packing(10))
    assert lengths_of(shards) == [[8, 2, 6, 4], [7, 3, 5, 1]]
    assert order == [1, 0, 3, 2, 5, 6, 7, 4]
    for shard, tokens in zip(shards, ([10, 10], [10, 6]), strict=True):
        assert shard.micro_batch_indices == [[[0, 2], [2, 4]]]
        assert shard.micro_batch_lengths == [tokens]
        assert shard.elem_counts_per_gb == [4]
        assert shard.get_microbatch_iterator_for_packable_sequences_len() == (2, 10)
    parts = [part["length"].tolist() for part in shards[1].make_microbatch_iterator_for_packable_sequences()]
    assert parts == [[7, 3], [5, 1]]


def test_packing_rounds_up(make_batch):
    """Each sequence takes up a multiple of tokens, even beyond the tensor's width."""
    (shard,), _ = make_batch([3, 3, 3]).shard_by_batch_size(1, sequence_packing_args=packing(8, multiple=4))
    assert shard.micro_batch_lengths == [[8, 4]]
    with pytest.raises(ValueError, match="Sample 0 of 'tokens' has 3 tokens by 'length', padded 4, more than a bin"):
        make_batch([3, 3]).shard_by_batch_size(1, sequence_packing_args=packing(3, multiple=4))


def test_largest_first(make_batch):
    """Bins are dealt from the fullest to the emptiest."""
    batch = make_batch([1, 2, 3, 4])
    tokens = {}
    for order in ("packer", "largest_first"):
        args = packing(4, algorithm="concatenative", microbatch_order=order)
        shards, _ = batch.shard_by_batch_size(1, sequence_packing_args=args)
        tokens[order] = shards[0].micro_batch_lengths
    assert tokens == {"packer": [[3, 3, 4]], "largest_first": [[4, 3, 3]]}


def test_packing_by_groups(make_batch):
    """get_batch() returns the planned samples of a group, which differ between shards, for any batch_size."""
    batch = make_batch([6, 1, 1, 1, 1, 1, 6, 1])
    shards, order = batch.shard_by_batch_size(2, batch_size=4, sequence_packing_args=packing(6))
    assert [shard.elem_counts_per_gb for shard in shards] == [[1, 1], [3, 3]]
    assert shards[1].get_batch(1, batch_size=2)["name"] == ["sample 4", "sample 5", "sample 7"]
    assert shards[1].get_batch(1).get_microbatch_iterator_for_packable_sequences_len() == (1, 3)
    assert order.restore(shards)["name"] == batch["name"]


@st.composite
def problems(draw):
    shards = draw(st.integers(1, 4))
    group = shards * draw(st.integers(1, 6))
    uneven = draw(st.booleans())
    size = group + draw(st.integers(0, shards - 1)) if uneven else group * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
    return {"shards": shards, "batch_size": None if uneven else group, "allow_uneven_shards": uneven}, lengths


def microbatches(shard, planned):
    if "dynamic_batching_args" in planned:
        return list(shard.make_microbatch_iterator_with_dynamic_shapes())
    return list(shard.make_microbatch_iterator_for_packable_sequences())


@given(
    problems(),
    st.integers(12, 40),
    st.integers(1, 4),
    st.sampled_from(["dynamic", *ALGORITHMS]),
    st.sampled_from(["packer", "largest_first"]),
)
def test_every_plan(problem, tokens, multiple, how, microbatch_order):
    """Each sample occurs once, tokens are within the limit, shards have equal counts, and restore() works."""
    arguments, lengths = problem
    batch = BatchedDataDict(
        tokens=np.arange(len(lengths) * 12).reshape(-1, 12), length=np.array(lengths), name=list(range(len(lengths)))
    )
    if how == "dynamic":
        planned = {"dynamic_batching_args": dynamic(tokens, multiple)}
    else:
        planned = {"sequence_packing_args": packing(tokens, how, multiple, microbatch_order=microbatch_order)}
    try:
        shards, order = batch.shard_by_batch_size(**arguments, **planned)
    except ValueError as error:
        if not any(text in str(error) for text in ("same number of microbatches", "cannot fill")):
            raise
        return
    groups = 1 if arguments["batch_size"] is None else len(lengths) // arguments["batch_size"]
    counts = {tuple(len(cuts) for cuts in shard.micro_batch_indices) for shard in shards}
    assert len(counts) == 1
    assert len(counts.pop()) == groups
    assert sorted(name for shard in shards for name in shard["name"]) == batch["name"]
    assert [name for shard in shards for name in shard["name"]] == order
    for shard in shards:
        parts = microbatches(shard, planned)
        assert all(part.size for part in parts), "no microbatch is empty"
        assert [name for part in parts for name in part["name"]] == shard["name"]
        assert len(parts) == sum(len(microbatches(shard.get_batch(number), planned)) for number in range(groups))
        for part, length in zip(parts, [n for group in shard.micro_batch_lengths for n in group], strict=True):
            rounded = -(-part["length"] // multiple) * multiple
            if how == "dynamic":
                assert part["tokens"].shape[1] == length >= part["length"].max()
                assert part["tokens"].size <= tokens
            else:
                assert rounded.sum() == length <= tokens
        if how == "dynamic":
            assert shard.micro_batch_lengths == shards[0].micro_batch_lengths
    restored = BatchedDataDict.from_batches(shards).reorder_data(order)
    for back in (restored, order.restore(shards)):
        assert np.array_equal(back["tokens"], batch["tokens"])
        assert back["name"] == batch["name"]


@given(problems())
def test_every_plain_split(problem):
    """Without a plan each sample also occurs once, and even shards have equally many samples."""
    arguments, lengths = problem
    shards = BatchedDataDict(x=np.arange(len(lengths))).shard_by_batch_size(**arguments)
    assert len(shards) == arguments["shards"]
    assert sorted(number for shard in shards for number in shard["x"].tolist()) == list(range(len(lengths)))
    sizes = [shard.size for shard in shards]
    assert max(sizes) - min(sizes) <= arguments["allow_uneven_shards"]
    assert sizes == sorted(sizes, reverse=True)


def test_order_is_a_list(make_batch):
    """The order is a list, and restores results that have other keys and widths."""
    shards, order = make_batch(LENGTHS).shard_by_batch_size(2, dynamic_batching_args=dynamic(8))
    assert isinstance(order, list)
    assert isinstance(order, Order)
    results = [{"answer": shard["tokens"][:, : shard["length"].max()]} for shard in shards]
    back = order.restore(results, pad_value_dict={"answer": -1})
    assert back["answer"].tolist() == make_batch(LENGTHS)["tokens"].tolist()
    with pytest.raises(ValueError, match=r"The shards had 8 samples, but the results have 4: \[4\] by shard"):
        order.restore(results[:1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"shards": 2, "batch_size": -2}, "batch_size must be at least 1, got -2"),
        ({"shards": 2, "batch_size": 3}, "8 samples are not a multiple of batch_size=3: use pad_to_multiple"),
        ({"shards": 3}, "8 samples are not a multiple of shards=3: use pad_to_multiple"),
        ({"shards": 3, "batch_size": 4}, "batch_size=4 is not a multiple of shards=3"),
        ({"shards": 3, "batch_size": 4, "allow_uneven_shards": True}, "needs batch_size to be the size, 8, .*got 4"),
        (
            {"shards": 2, "dynamic_batching_args": dynamic(8), "sequence_packing_args": packing(8)},
            "were both given",
        ),
        ({"shards": 2, "dynamic_batching_args": dynamic(7)}, "Sample 1 of 'tokens' has 8 tokens by 'length'"),
        ({"shards": 2, "sequence_packing_args": packing(7)}, "Sample 1 of 'tokens' has 8 tokens by 'length'"),
        (
            {"shards": 9, "allow_uneven_shards": True, "dynamic_batching_args": dynamic(8)},
            "8 samples cannot give each of 9 shards a microbatch",
        ),
        (
            {"shards": 9, "allow_uneven_shards": True, "sequence_packing_args": packing(8)},
            "8 sequences cannot fill 9 bins",
        ),
    ],
)
def test_bad_splits(make_batch, arguments, message):
    """Batches that cannot be split are refused, with the numbers."""
    with pytest.raises(ValueError, match=message):
        make_batch(LENGTHS).shard_by_batch_size(**arguments)


def test_empty_batch():
    """A batch without samples cannot be sharded, with or without leaves."""
    for batch in (BatchedDataDict(), BatchedDataDict(x=np.zeros((0, 3)), y=[])):
        with pytest.raises(ValueError, match="empty batch cannot be sharded: it has 0 samples"):
            batch.shard_by_batch_size(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": np.array([1, 9])}, "'length' says that sample 1 has 9 tokens; 'tokens' has width 4"),
        ({"length": [1, -2]}, "'length' says that sample 1 has -2 tokens; 'tokens' has width 4"),
        ({"length": np.array([1.0, 2.0])}, "'length' must be whole numbers, found float64"),
        ({"length": np.array([[1], [2]])}, r"'length' must have one dim, found shape \(2, 1\)"),
        ({"length": np.array([1])}, r"Leaves have different numbers of samples: \{'tokens': 2, 'length': 1\}"),
        ({"tokens": np.array([1, 2])}, r"'tokens' must be an array or tensor of .*found shape \(2,\)"),
        ({"tokens": [[1], [2]]}, r"'tokens' must be an array or tensor of .*found a list"),
    ],
)
@pytest.mark.parametrize("planned", [{"dynamic_batching_args": dynamic(8)}, {"sequence_packing_args": packing(8)}])
def test_bad_sequences(change, message, planned):
    """Leaves and lengths that do not match are refused by name."""
    batch = BatchedDataDict({"tokens": np.zeros((2, 4)), "length": np.array([1, 2]), **change})
    with pytest.raises(ValueError, match=message):
        batch.shard_by_batch_size(1, **planned)


def test_unknown_keys(make_batch):
    """Unknown keys of the batch and of the arguments are refused, with the known ones."""
    args = {"max_tokens_per_microbatch": 8, "sequence_length_round": 1, **KEYS}
    for key in KEYS:
        with pytest.raises(ValueError, match=rf"Unknown {key} 'x'; the batch has \['length', 'name', 'tokens'\]"):
            make_batch(LENGTHS).shard_by_batch_size(1, dynamic_batching_args={**args, key: "x"})
    with pytest.raises(ValueError, match=r"Unknown keys for DynamicBatchingArgs: \['tokens_at_most'\]"):
        make_batch(LENGTHS).shard_by_batch_size(1, dynamic_batching_args={**args, "tokens_at_most": 8})
    with pytest.raises(ValueError, match=r"DynamicBatchingArgs cannot be made of .*sequence_length_round"):
        make_batch(LENGTHS).shard_by_batch_size(1, dynamic_batching_args={"max_tokens_per_microbatch": 8, **KEYS})
    with pytest.raises(TypeError, match="Expected DynamicBatchingArgs or a mapping with its fields, found int"):
        make_batch(LENGTHS).shard_by_batch_size(1, dynamic_batching_args=8)


def test_bad_args():
    """Arguments are checked when they are made."""
    with pytest.raises(ValueError, match="max_tokens_per_microbatch must be at least 1, got 0"):
        dynamic(0)
    with pytest.raises(ValueError, match="sequence_length_round must be at least 1, got 0"):
        dynamic(1, 0)
    with pytest.raises(ValueError, match="Unknown packing algorithm 'best'"):
        packing(8, "best")
    with pytest.raises(ValueError, match="Unknown microbatch_order 'smallest_first'; there are: packer, largest_first"):
        packing(8, microbatch_order="smallest_first")


def test_iterators_need_their_plan(make_batch):
    """Each iterator fails at once if its plan is missing or the samples have changed since."""
    batch = make_batch(LENGTHS)
    with pytest.raises(ValueError, match=r"no planned microbatches: .*dynamic_batching_args"):
        batch.make_microbatch_iterator_with_dynamic_shapes()
    (shard,), _ = batch.shard_by_batch_size(1, sequence_packing_args=packing(8))
    with pytest.raises(ValueError, match="planned by sequence_packing_args, not by dynamic_batching_args"):
        shard.make_microbatch_iterator_with_dynamic_shapes()
    with pytest.raises(ValueError, match="There is no group 1: the plan has 1"):
        shard.get_batch(1)
    shard.data = batch.slice(0, 3).data
    with pytest.raises(ValueError, match="planned for 8 samples, and the batch has 3"):
        shard.make_microbatch_iterator_for_packable_sequences()


def test_lengths_that_changed_after_planning(make_batch):
    """Iterators refuse lengths that the microbatches were not planned for: sequences would lose tokens."""
    batch = make_batch(LENGTHS)
    dynamic_shards, _ = batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(8, 2))
    packed_shards, _ = batch.shard_by_batch_size(2, sequence_packing_args=packing(8))
    for shard, uses in (
        (
            dynamic_shards[0],
            ("make_microbatch_iterator_with_dynamic_shapes", "get_microbatch_iterator_dynamic_shapes_len"),
        ),
        (
            packed_shards[0],
            (
                "make_microbatch_iterator_for_packable_sequences",
                "get_microbatch_iterator_for_packable_sequences_len",
            ),
        ),
    ):
        shard["length"] = shard["length"].copy()
        for use in uses:
            getattr(shard, use)()
        shard["length"][0] = 7
        for use in uses:
            with pytest.raises(ValueError, match=r"planned for other lengths: microbatch 0 .* by 'length'\. Shard the"):
                getattr(shard, use)()
        del shard["length"]
        for use in uses:
            getattr(shard, use)()

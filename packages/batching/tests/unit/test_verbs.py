# SPDX-License-Identifier: Apache-2.0
"""select, drop, rename, union, shuffle and minibatches, and what they do to the plan of microbatches."""

import numpy as np
import pytest

from fairlead_batching import BatchedDataDict, SlicedDataDict

ARGS = {"max_tokens_per_microbatch": 8, "input_key": "tokens", "input_lengths_key": "length"}
DYNAMIC = {"dynamic_batching_args": {**ARGS, "sequence_length_round": 2}}
PACKED = {
    "sequence_packing_args": {**ARGS, "algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 1},
}


@pytest.fixture
def batch(make_batch):
    return make_batch([6, 2, 3, 5]).pad_to_multiple(6)


@pytest.fixture
def shard(batch):
    return batch.shard_by_batch_size(2, **DYNAMIC)[0][0]


def shapes(shard):
    return [part["tokens"].shape for part in shard.make_microbatch_iterator_with_dynamic_shapes()]


def test_select_and_drop(shard):
    """Both keep the leaves themselves, the class, the plan and the record of padding."""
    for part in (shard.select(["tokens", "length"]), shard.drop(["name", "sample_mask"])):
        assert type(part) is SlicedDataDict
        assert list(part) == ["tokens", "length"]
        assert part["tokens"] is shard["tokens"]
        assert shapes(part) == shapes(shard)
        assert part.padding is shard.padding
    assert list(shard.select("name")) == ["name"]
    assert "name" in shard


def test_a_dropped_input_is_missed_by_name(shard):
    """Without the leaf of the sequences their width is unknown, and the error says so."""
    with pytest.raises(ValueError, match=r"no array or tensor .* at the plan's input_key, 'tokens'"):
        shard.drop("tokens").make_microbatch_iterator_with_dynamic_shapes()


def test_rename(shard):
    """A rename keeps the order of leaves, and the plan finds the renamed sequences."""
    part = shard.rename({"tokens": "ids", "length": "count"})
    assert list(part) == ["ids", "count", "name", "sample_mask"]
    assert (part.plan.args.input_key, part.plan.args.input_lengths_key) == ("ids", "count")
    assert [micro["ids"].shape for micro in part.make_microbatch_iterator_with_dynamic_shapes()] == shapes(shard)
    assert (shard.plan.args.input_key, shard.plan.args.input_lengths_key) == ("tokens", "length")
    swapped = shard.rename({"tokens": "length", "length": "tokens"})
    assert swapped["tokens"] is shard["length"]


def test_union(shard):
    """A union has the leaves of both, and the plan and the padding of the first."""
    results = {"loss": np.arange(shard.size), "name": list(shard["name"])}
    part = shard.union(results)
    assert type(part) is SlicedDataDict
    assert part["loss"] is results["loss"]
    assert shapes(part) == shapes(shard)
    assert part.drop_padding().size == shard.drop_padding().size
    assert BatchedDataDict(loss=[1] * shard.size).union(shard).padding is shard.padding
    assert list(BatchedDataDict().union(shard)) == list(shard)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda batch: batch.select("x"), r"Unknown key 'x'; the batch has \['length', 'name', 'sample_mask', 'tok"),
        (lambda batch: batch.drop(["name", "x"]), "Unknown key 'x'; the batch has"),
        (lambda batch: batch.rename({"x": "y"}), r"Unknown keys \['x'\]; the batch has"),
        (lambda batch: batch.rename({"name": "tokens"}), r"would have the same name, \['tokens'\]: drop or rename"),
        (lambda batch: batch.union({"x": [1]}), "Batches of 6 and 1 samples have no union"),
        (lambda batch: batch.union({"length": batch["length"] + 1}), r"Both batches have \['length'\], with different"),
        (lambda batch: batch.union({"name": batch["tokens"]}), r"Both batches have \['name'\], with different leaves"),
        (
            lambda batch: batch.union(batch.shuffle(0).select("name").rename({"name": "other"})),
            r"Row \d is a dummy row in one of the batches only: drop_padding\(\) in both first",
        ),
        (lambda batch: batch.shuffle(-1), "seed must be at least 0, got -1"),
        (lambda batch: batch.minibatches(4), r"6 samples are not a multiple of size=4: use pad_to_multiple\(4\)"),
        (lambda batch: batch.minibatches(0), "size must be at least 1, got 0"),
        (lambda batch: batch.minibatches(2, epochs=0), "epochs must be at least 1, got 0"),
        (lambda batch: batch.minibatches(2, seed=-1), "seed must be at least 0, got -1"),
        (lambda batch: batch.slice(0, 0).minibatches(2), "no microbatches: it has 0 samples"),
    ],
)
def test_misuse(batch, use, message):
    """Unknown keys, conflicts and sizes that do not fit are refused at once, with the leaf and the remedy."""
    with pytest.raises(ValueError, match=message):
        use(batch)


def test_shuffle(batch, shard):
    """The order depends on the seed only; every leaf and the padding follow it, and the plan is dropped."""
    one, same, other = (batch.shuffle(seed) for seed in (1, 1, 2))
    assert one["name"] == same["name"] != other["name"]
    assert sorted(one["name"]) == sorted(batch["name"])
    for number, name in enumerate(one["name"]):
        where = batch["name"].index(name)
        assert np.array_equal(one["tokens"][number], batch["tokens"][where])
    assert sorted(one.drop_padding()["name"]) == sorted(batch.drop_padding()["name"])
    assert shard.shuffle(0).micro_batch_indices is None


def test_minibatches(batch):
    """Each epoch has every sample once, in another order if there is a seed."""
    plain = [part["length"].tolist() for part in batch.minibatches(3, epochs=2)]
    assert plain == [[6, 2, 3], [5, 5, 5]] * 2
    parts = [part["length"].tolist() for part in batch.minibatches(2, epochs=2, seed=3)]
    assert parts == [part["length"].tolist() for part in batch.minibatches(2, epochs=2, seed=3)]
    first, second = np.concatenate(parts[:3]).tolist(), np.concatenate(parts[3:]).tolist()
    assert sorted(first) == sorted(second) == [2, 3, 5, 5, 5, 6]
    assert first != second


def test_minibatches_cannot_deadlock(make_batch):
    """Ranks whose shards differ in size get no minibatches that differ in number; a planned shard drops its plan."""
    batch = make_batch([6, 1, 1, 1, 1])
    enough = {"dynamic_batching_args": {**DYNAMIC["dynamic_batching_args"], "max_tokens_per_microbatch": 12}}
    for planned in ({}, enough):
        shards = batch.shard_by_batch_size(2, allow_uneven_shards=True, **planned)
        for part in shards[0] if planned else shards:
            with pytest.raises(
                ValueError, match="Shards of 2 to 3 samples have different numbers of microbatches of 1"
            ):
                part.minibatches(1)
            assert next(part.minibatches(3)).micro_batch_indices is None
    packed, _ = make_batch([6, 1, 1, 1]).shard_by_batch_size(2, **PACKED)
    with pytest.raises(ValueError, match="After packing, shards have different numbers of samples"):
        packed[0].minibatches(1)

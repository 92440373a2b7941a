# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-batching as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Iterator
from typing import Any, TypedDict, assert_type

import numpy as np
import numpy.typing as npt

import fairlead_batching as batching
from fairlead_batching import BatchedDataDict, RaggedLeaf, RemoteBatch, SlicedDataDict


class Content(TypedDict):
    tokens: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


Batch = BatchedDataDict[Content]
Part = SlicedDataDict[Content]


def make(batch: Batch) -> None:
    assert_type(BatchedDataDict(x=[1], y=[2]), BatchedDataDict[Any])
    assert_type(Batch.from_batches([batch, {"tokens": [2]}], {"tokens": -1}), Batch)
    assert_type(batch["tokens"], Any)
    assert_type((batch.slice(0, 2), batch.select_indices([3, 1])), tuple[Part, Part])
    assert_type((batch.select("tokens"), batch.shuffle(0), batch.to("cpu")), tuple[Batch, Batch, Batch])
    assert_type(batch.minibatches(4, epochs=2, seed=0), Iterator[Part])
    assert_type(batch.pad_to_multiple(8).drop_padding(), Batch)
    assert_type(RaggedLeaf([np.ones((2, 3)), np.ones((1, 3))]).take(np.array([0])), RaggedLeaf)
    batch.slice(0)  # type: ignore[call-arg]
    batch.select_indices(["a"])  # type: ignore[list-item]


def shard(batch: Batch, dynamic: batching.DynamicBatchingArgs, packing: batching.SequencePackingArgs) -> None:
    assert_type(batch.shard_by_batch_size(2), list[Part])
    # The order is returned only if samples change places.
    assert_type(batch.shard_by_batch_size(2, dynamic_batching_args=dynamic), tuple[list[Part], batching.Order])
    assert_type(batch.shard_by_batch_size(2, sequence_packing_args=packing), tuple[list[Part], batching.Order])
    shards, order = batch.shard_by_batch_size(2, dynamic_batching_args={"max_tokens_per_microbatch": 8})
    assert_type(order.restore([shard.get_dict() for shard in shards]), BatchedDataDict[Any])
    assert_type(batching.plan_shards([6, 2, 3, 5], 2, dynamic_batching_args=dynamic, width=8), batching.ShardPlan)
    batch.shard_by_batch_size("2")  # type: ignore[call-overload]
    batch.shard_by_batch_size(2, dynamic_batching_args=packing)  # type: ignore[call-overload]
    batching.DynamicBatchingArgs(8, 2, "tokens", "length")  # type: ignore[call-arg]


def iterate(part: Part) -> None:
    assert_type(part.make_microbatch_iterator(4), Iterator[Part])
    assert_type(part.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=1), Iterator[Part])
    assert_type(part.make_microbatch_iterator_for_packable_sequences(), Iterator[Part])
    row = part.to_packed(lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=8)
    assert_type(row, batching.PackedBatch[Part])
    assert_type(row.unpack({"log_probs": 1}), Part)


def store(batch: Batch, plan: batching.ShardPlan, error: batching.BatchLostError) -> None:
    stored = RemoteBatch.put(batch, lengths_key="length", rows_per_object=1024)
    assert_type(stored.shard(plan), list[RemoteBatch])
    assert_type(stored.shard_by_batch_size(8), list[RemoteBatch])
    assert_type(stored.fetch(["tokens"], timeout_s=60.0), SlicedDataDict[Any])
    assert_type((error.keys, error.rows), tuple[tuple[str, ...], tuple[int, ...]])


def pack() -> None:
    packer = batching.get_packer("first_fit_shuffle", 10, min_bin_count=2, seed=1)
    assert_type(packer, batching.Packer)
    assert_type(packer.pack([7, 2, 6]), list[list[int]])
    batching.get_packer("best_fit", 10)  # type: ignore[arg-type]

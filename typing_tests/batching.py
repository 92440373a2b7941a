# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-batching as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, TypedDict, assert_type

import numpy as np
import numpy.typing as npt

import fairlead_batching
from fairlead_batching import (
    BatchedDataDict,
    BatchLostError,
    DynamicBatchingArgs,
    Leaf,
    Order,
    PackedBatch,
    Packer,
    PackingMetrics,
    RaggedLeaf,
    RemoteBatch,
    SequencePackingArgs,
    ShardPlan,
    SlicedDataDict,
    get_packer,
    plan_shards,
    register_leaf,
)

assert_type(fairlead_batching.__version__, str)


class Content(TypedDict):
    tokens: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


Algorithm = Literal[
    "balanced", "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]
Batch = BatchedDataDict[Content]
Part = SlicedDataDict[Content]


def make() -> None:
    # Nobody has to annotate a batch.
    assert_type(BatchedDataDict(x=[1], y=[2]), BatchedDataDict[Any])
    assert_type(BatchedDataDict({"x": [1]}), BatchedDataDict[Any])
    assert_type(BatchedDataDict([("x", [1])]), BatchedDataDict[Any])
    batch: Batch = BatchedDataDict({"tokens": [1], "length": [1]})
    assert_type(batch["tokens"], Any)
    assert_type(list(batch), list[str])
    assert_type(batch.data, dict[str, Any])
    assert_type(Batch.from_batches([batch, {"tokens": [2]}], {"tokens": -1}), Batch)


def take(batch: Batch) -> None:
    assert_type(batch.size, int)
    assert_type(batch.padding, npt.NDArray[np.bool_] | None)
    assert_type(batch.slice(0, 2), Part)
    assert_type(batch.copy(), Batch)
    assert_type(batch.slice(0, 2).copy(), Part)
    assert_type(batch | {"length": [2]}, Batch)
    assert_type(batch.chunk(0, chunks=2), Part)
    assert_type(batch.select_indices([3, 1]), Part)
    assert_type(batch.get_batch(0, 4), Part)
    assert_type(batch.repeat_interleave(2), Batch)
    assert_type(batch.repeat_interleave(num_repeats=2), Batch)
    assert_type(batch.reorder_data(np.array([1, 0]).tolist()), Batch)
    assert_type(batch.truncate_tensors(dim=1, truncated_len=4), None)
    assert_type(batch.get_dict(), dict[str, Any])
    assert_type(batch.to("cpu"), Batch)
    assert_type(batch.to_device("cpu"), Batch)
    assert_type(batch.read_only(), Batch)
    assert_type(batch.all_gather(), Batch)
    assert_type(batch.pad_to_multiple(8, mask_key="mask"), Batch)
    assert_type(batch.drop_padding(like=batch), Batch)
    assert_type(batch.drop_padding(mask_key="mask"), Batch)
    assert_type(batch.slice(0, 2).read_only(), Part)


@register_leaf
class Words:
    def __len__(self) -> int:
        return 0

    def take(self, indices: npt.NDArray[np.int64], /) -> Self:
        return self

    @classmethod
    def concat(cls, leaves: Sequence[Self], /) -> Self:
        return leaves[0]

    def to(self, device: Any, /) -> Self:
        return self


def leaves(batch: Batch, words: Leaf) -> None:
    leaves(batch, Words())
    ragged = RaggedLeaf([np.ones((2, 3)), np.ones((1, 3))])
    for leaf in (words, ragged):
        assert_type(len(leaf), int)
    assert_type(ragged.take(np.array([0])), RaggedLeaf)
    assert_type(RaggedLeaf.concat([ragged, ragged]), RaggedLeaf)
    assert_type(words.to("cpu"), Leaf)
    assert_type(type(words).concat([words]), Leaf)
    assert_type(ragged.to("cpu"), RaggedLeaf)
    assert_type(ragged.compact(), RaggedLeaf)
    assert_type(ragged.nbytes, int)
    assert_type(ragged.shapes, npt.NDArray[np.int64])
    assert_type(ragged.rows, npt.NDArray[np.int64])
    assert_type(ragged.offsets, npt.NDArray[np.int64])
    assert_type(ragged[0], Any)
    assert_type(ragged.buffer, Any)
    assert_type(ragged.dtype, Any)
    assert_type(ragged.to_padded(0), Any)
    batch.meta["temperature"] = 1.0
    assert_type(batch.meta, dict[str, Any])


def verbs(batch: Batch) -> None:
    assert_type(batch.select("tokens"), Batch)
    assert_type(batch.select(["tokens", "length"]), Batch)
    assert_type(batch.drop("tokens"), Batch)
    assert_type(batch.rename({"tokens": "ids"}), Batch)
    assert_type(batch.union({"mask": [1]}), Batch)
    assert_type(batch.shuffle(0), Batch)
    assert_type(batch.minibatches(4, epochs=2, seed=0), Iterator[Part])
    assert_type(batch.slice(0, 2).select("tokens"), Part)


def shard(batch: Batch, dynamic: DynamicBatchingArgs, packing: SequencePackingArgs) -> None:
    assert_type(batch.shard_by_batch_size(2), list[Part])
    assert_type(batch.shard_by_batch_size(shards=2, batch_size=4, allow_uneven_shards=True), list[Part])
    # What leads back comes with the shards only where samples change places.
    assert_type(batch.shard_by_batch_size(2, dynamic_batching_args=dynamic), tuple[list[Part], Order])
    assert_type(batch.shard_by_batch_size(2, sequence_packing_args=packing), tuple[list[Part], Order])
    shards, order = batch.shard_by_batch_size(2, dynamic_batching_args={"max_tokens_per_microbatch": 8})
    assert_type(order.restore([shard.get_dict() for shard in shards], {"tokens": 0}), BatchedDataDict[Any])
    assert_type(order[0], int)


def plan(batch: Batch, dynamic: DynamicBatchingArgs) -> None:
    plan = plan_shards([6, 2, 3, 5], 2, dynamic_batching_args=dynamic, width=8)
    assert_type(plan, ShardPlan)
    assert_type(plan_shards(8, shards=2, batch_size=4, allow_uneven_shards=False), ShardPlan)
    assert_type(batch.shard(plan), list[Part])
    assert_type(plan.size, int)
    assert_type(plan.samples, tuple[npt.NDArray[np.int64], ...])
    assert_type(plan.order, npt.NDArray[np.int64])
    assert_type(plan.microbatches, list[list[npt.NDArray[np.int64]]])
    assert_type(plan.micro_batch_indices, list[list[list[list[int]]]] | None)
    assert_type(plan.micro_batch_lengths, list[list[list[int]]] | None)
    assert_type(plan.args, DynamicBatchingArgs | SequencePackingArgs | None)
    assert_type(plan.lengths, npt.NDArray[np.int64] | None)
    assert_type(plan.costs, npt.NDArray[np.float64] | None)
    assert_type(plan.total_costs(), list[float])
    assert_type(plan.imbalance, float)
    plan.check(4, None)
    assert_type(plan.part(0).shard_sizes, list[int] | None)


def planned(part: Part) -> None:
    assert_type(part.micro_batch_indices, list[list[list[int]]] | None)
    assert_type(part.micro_batch_lengths, list[list[int]] | None)
    assert_type(part.elem_counts_per_gb, list[int] | None)
    assert_type(part.plan.args, DynamicBatchingArgs | SequencePackingArgs | None)
    assert_type(part.plan.shard_sizes, list[int] | None)
    assert_type(part.make_microbatch_iterator(4), Iterator[Part])
    assert_type(part.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=1), Iterator[Part])
    assert_type(part.make_microbatch_iterator_with_dynamic_shapes(sequence_keys=["tokens"]), Iterator[Part])
    assert_type(part.get_microbatch_iterator_dynamic_shapes_len(), int)
    assert_type(part.make_microbatch_iterator_for_packable_sequences(), Iterator[Part])
    assert_type(part.get_microbatch_iterator_for_packable_sequences_len(), tuple[int, int])


def packed(part: Part) -> None:
    row = part.to_packed(
        lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=8, pad_value_dict={"tokens": 0}
    )
    assert_type(row, PackedBatch[Part])
    assert_type(row["tokens"], Any)
    assert_type(row.leaves, dict[str, Any])
    assert_type(row.token_keys, tuple[str, ...])
    assert_type(row.position_ids, Any)
    assert_type(row.cu_seqlens, Any)
    assert_type(row.cu_seqlens_padded, Any)
    assert_type(row.max_seqlen, int)
    assert_type(row.widths, dict[str, int])
    assert_type(row.pad_values, dict[str, Any])
    assert_type(row.source, Part)
    assert_type(row.to("cpu"), PackedBatch[Part])
    assert_type(row.unpack(), Part)
    assert_type(row.unpack({"log_probs": 1}, {"log_probs": 0.0}, token_keys=["log_probs"]), Part)


def remote(batch: Batch, dynamic: DynamicBatchingArgs, plan: ShardPlan, error: BatchLostError) -> None:
    handle = RemoteBatch.put(batch, lengths_key="length", rows_per_object=1024)
    assert_type(handle, RemoteBatch)
    assert_type(len(handle), int)
    assert_type(handle.size, int)
    assert_type(handle.keys(), list[str])
    assert_type(handle.rows, BatchedDataDict[Any])
    assert_type(handle.lengths_key, str | None)
    assert_type(handle.widths, dict[str, int])
    assert_type(handle.meta, dict[str, Any])
    assert_type(len(handle.stored), int)
    assert_type(handle.select("tokens"), RemoteBatch)
    assert_type(handle.drop(["tokens"]), RemoteBatch)
    assert_type(handle.rename({"tokens": "prompts"}), RemoteBatch)
    assert_type(handle.slice(0, 2), RemoteBatch)
    assert_type(handle.select_indices([1, 0]), RemoteBatch)
    assert_type(handle.shuffle(0), RemoteBatch)
    assert_type(handle.reorder_data(plan.order.tolist()), RemoteBatch)
    assert_type(handle.shard(plan), list[RemoteBatch])
    assert_type(handle.shard_by_batch_size(8), list[RemoteBatch])
    assert_type(handle.shard_by_batch_size(8, dynamic_batching_args=dynamic), tuple[list[RemoteBatch], Order])
    assert_type(RemoteBatch.concat([handle, handle]), RemoteBatch)
    assert_type(handle.fetch(["tokens"], timeout_s=60.0, pad_value_dict={"tokens": 0}), SlicedDataDict[Any])
    assert_type(error.keys, tuple[str, ...])
    assert_type(error.rows, tuple[int, ...])


def arguments() -> None:
    dynamic = DynamicBatchingArgs(
        max_tokens_per_microbatch=8, sequence_length_round=2, input_key="tokens", input_lengths_key="length"
    )
    assert_type(dynamic.max_tokens_per_microbatch, int)
    assert_type(dynamic.sequence_length_round, int)
    assert_type(dynamic.input_key, str)
    assert_type(dynamic.input_lengths_key, str)
    assert_type(dynamic.cost, tuple[float, float] | Callable[[Any], Any] | None)
    packing = SequencePackingArgs(
        max_tokens_per_microbatch=8,
        input_key="tokens",
        input_lengths_key="length",
        algorithm="balanced",
        sequence_length_pad_multiple=1,
        microbatch_order="largest_first",
    )
    assert_type(packing.max_tokens_per_microbatch, int)
    assert_type(packing.input_key, str)
    assert_type(packing.input_lengths_key, str)
    assert_type(packing.cost, tuple[float, float] | Callable[[Any], Any] | None)
    assert_type(packing.algorithm, Algorithm)
    assert_type(packing.sequence_length_pad_multiple, int)
    assert_type(packing.microbatch_order, Literal["packer", "largest_first"])


def pack() -> None:
    packer = get_packer("first_fit_shuffle", 10, min_bin_count=2, bin_count_multiple=2, seed=1)
    assert_type(packer, Packer)
    assert_type(packer.algorithm, Algorithm)
    assert_type(packer.bin_capacity, int)
    assert_type(packer.min_bin_count, int | None)
    assert_type(packer.bin_count_multiple, int | None)
    assert_type(packer.seed, int)
    bins = packer.pack([7, 2, 6])
    assert_type(bins, list[list[int]])
    metrics = packer.metrics([7, 2, 6], bins)
    assert_type(metrics, PackingMetrics)
    assert_type(PackingMetrics.of([7], [[0]], capacity=10), PackingMetrics)
    for number in (metrics.sequences, metrics.tokens, metrics.capacity, metrics.bins, metrics.bound, metrics.largest):
        assert_type(number, int)
    for ratio in (metrics.efficiency, metrics.waste, metrics.imbalance):
        assert_type(ratio, float)


def wrong(batch: Batch, dynamic: DynamicBatchingArgs, packing: SequencePackingArgs) -> None:
    batch[0]  # type: ignore[index]
    batch.slice(0)  # type: ignore[call-arg]
    batch.select_indices(["a"])  # type: ignore[list-item]
    batch.drop_padding(batch)  # type: ignore[call-arg]
    batch.shard_by_batch_size("2")  # type: ignore[call-overload]
    batch.shard_by_batch_size(2, dynamic_batching_args=packing)  # type: ignore[call-overload]
    DynamicBatchingArgs(8, 2, "tokens", "length")  # type: ignore[call-arg]
    SequencePackingArgs(max_tokens_per_microbatch=8)  # type: ignore[call-arg]
    get_packer(10, "balanced")  # type: ignore[arg-type]
    get_packer("balanced", 10, None, None, 1)  # type: ignore[call-arg]
    get_packer("best_fit", 10)  # type: ignore[arg-type]
    dynamic.input_key = "other"  # type: ignore[misc]

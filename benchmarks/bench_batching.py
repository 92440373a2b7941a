# SPDX-License-Identifier: Apache-2.0
"""Measure how fast batches are planned, packed, sharded and transferred, against simple implementations in one run.

python benchmarks/bench_batching.py
"""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from _measure import Row, interleaved, table, under

from fairlead_batching import (
    BatchedDataDict,
    DynamicBatchingArgs,
    RemoteBatch,
    SequencePackingArgs,
    get_packer,
    plan_shards,
)

SEQUENCES, SHARDS, CAPACITY = 65_536, 64, 4096
GIB = 1 << 30


def rows() -> list[Row]:
    """Return every row of the table. The run takes up to two minutes and 6 GiB."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="warning", object_store_memory=4 * GIB)
    try:
        timed = _transport_rows(), _planning_rows(), _cost_rows(), _packing_rows(), _gather_rows(), _remote_rows()
        return [row for rows in timed for row in rows]
    finally:
        ray.shutdown()


def _lengths(count: int, median: int = 512, sigma: float = 1.0, most: int = CAPACITY) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(math.log(median), sigma, count)
    return np.clip(drawn.astype(np.int64), 1, most)


def _transport_rows() -> Iterator[Row]:
    """Measure how long it takes to put 1 GiB in eight tensors into Ray's object store, and to get it back."""
    tensors = {f"leaf {number}": torch.rand(1024, GIB // 8 // 4 // 1024) for number in range(8)}
    batch = BatchedDataDict(tensors)

    def by_torch_save() -> None:
        file = io.BytesIO()
        torch.save(tensors, file)
        torch.load(io.BytesIO(ray.get(ray.put(file.getvalue()))))

    def put_and_get() -> None:
        ray.get(ray.put(batch))

    put_and_get()
    saved, ours = interleaved(by_torch_save, put_and_get, repeats=7)
    yield Row("put and get 1 GiB of tensors by torch.save", str(saved), "", True)
    ratio = saved.median / ours.median
    yield Row("  as a batch, private copies", f"{ours}: {ratio:.1f}x", ">= 3x faster", ratio >= 3)


def _planning_rows() -> Iterator[Row]:
    """Measure planning through the call that also shards. The tokens have no bytes, so the gather costs nothing."""
    lengths = torch.from_numpy(_lengths(SEQUENCES))
    batch = BatchedDataDict(tokens=torch.zeros(SEQUENCES, CAPACITY, 0), length=lengths)
    args = DynamicBatchingArgs(
        max_tokens_per_microbatch=4 * CAPACITY, sequence_length_round=64, input_key="tokens", input_lengths_key="length"
    )

    def by_item() -> None:
        for index in range(SEQUENCES):
            lengths[index].item()

    def plan() -> None:
        batch.shard_by_batch_size(SHARDS, dynamic_batching_args=args)

    def plan_groups() -> None:
        batch.shard_by_batch_size(SHARDS, batch_size=1024, dynamic_batching_args=args)

    items, *planned = interleaved(by_item, plan, plan_groups, repeats=9)
    yield Row(f"read {SEQUENCES:,} lengths one by one with .item()", str(items), "", True)
    for timing, groups in zip(planned, (1, SEQUENCES // 1024), strict=True):
        ratio = items.median / timing.median
        what = f"  shard them over {SHARDS} with dynamic batching, groups: {groups}"
        yield Row(what, f"{timing}: {ratio:.1f}x", ">= 8x faster", ratio >= 8)


def _cost_rows() -> Iterator[Row]:
    """Measure plans that balance a quadratic cost. The bounds are of a plan, of its ranks, and of its fullest bin."""
    lengths, cap = _lengths(SEQUENCES, most=8192), 16_384
    common: dict[str, Any] = {"max_tokens_per_microbatch": cap, "input_key": "tokens", "input_lengths_key": "length"}
    packing = SequencePackingArgs(algorithm="balanced", sequence_length_pad_multiple=1, cost=(0, 1), **common)
    dynamic = DynamicBatchingArgs(sequence_length_round=64, cost=(0, 1), **common)
    packed, batched = interleaved(
        lambda: plan_shards(lengths, SHARDS, sequence_packing_args=packing),
        lambda: plan_shards(lengths, SHARDS, dynamic_batching_args=dynamic),
        repeats=9,
    )
    plans = (
        plan_shards(lengths, SHARDS, sequence_packing_args=packing),
        plan_shards(lengths, SHARDS, dynamic_batching_args=dynamic),
    )
    for name, timing, plan in zip(("packing", "dynamic batching"), (packed, batched), plans, strict=True):
        squares = [float((lengths[part] ** 2).sum()) for part in plan.samples]
        imbalance = max(squares) * SHARDS / sum(squares)
        what = f"plan {SEQUENCES:,} lengths over {SHARDS} by cost, {name}"
        yield under(what, str(timing), timing.median, 0.5)
        yield Row("  the most expensive rank against the mean", f"{imbalance:.4f}x", "<= 1.02x", imbalance <= 1.02)
        of_parts = [lengths[part] for parts in plan.microbatches for part in parts]
        fullest = max(int(part.sum() if plan is plans[0] else part.max() * len(part)) for part in of_parts)
        yield Row("  the fullest microbatch", f"{fullest:,} tokens", f"<= {cap:,}", fullest <= cap)


def _packing_rows() -> Iterator[Row]:
    for median, sigma, most in ((512, 1.0, 1.01), (3000, 0.5, 1.08)):
        lengths = {count: _lengths(count, median, sigma) for count in (SEQUENCES, 2 * SEQUENCES)}
        for algorithm in ("first_fit_decreasing", "balanced"):
            packer = get_packer(algorithm, CAPACITY)
            once, twice = interleaved(
                lambda: packer.pack(lengths[SEQUENCES]),  # noqa: B023
                lambda: packer.pack(lengths[2 * SEQUENCES]),  # noqa: B023
                repeats=21,
            )
            bins = len(packer.pack(lengths[SEQUENCES])) / math.ceil(lengths[SEQUENCES].sum() / CAPACITY)
            growth = twice.median / once.median
            bounded = algorithm == "first_fit_decreasing"
            yield Row(
                f"pack {SEQUENCES:,} lengths of median {median}, {algorithm}",
                f"{once}: {bins:.4f} x the bound",
                f"<= {most} x" if bounded else "",
                bins <= most or not bounded,
            )
            yield Row("  twice as many", f"{growth:.2f}x", "<= 2.4x" if bounded else "", growth <= 2.4 or not bounded)


def _gather_rows() -> Iterator[Row]:
    """Measure sharding without packing against one hand-written gather of each tensor."""
    batch = BatchedDataDict({name: torch.rand(SEQUENCES, 512) for name in "abc"})
    order = torch.arange(SEQUENCES).reshape(-1, SHARDS, 16).swapaxes(0, 1).reshape(-1)

    def by_hand() -> None:
        for tensor in batch.values():
            tensor.index_select(0, order)

    def shard() -> None:
        batch.shard_by_batch_size(SHARDS, batch_size=16 * SHARDS)

    hand, ours = interleaved(by_hand, shard, repeats=9)
    ratio = ours.median / hand.median
    yield Row("gather three tensors of 128 MiB by hand", str(hand), "", True)
    yield Row(f"  shard them over {SHARDS}, in 64 groups", f"{ours}: {ratio:.2f}x", "<= 1.2x", ratio <= 1.2)


def _remote_rows() -> Iterator[Row]:
    """Measure shuffling and sharding 256 MiB by handle, which moves no leaf, against doing so in memory."""
    batch = BatchedDataDict(x=torch.rand(SEQUENCES, 1024))
    handle = RemoteBatch.put(batch)
    order = np.random.default_rng(0).permutation(SEQUENCES)

    def shard(given: BatchedDataDict[Any] | RemoteBatch) -> None:
        given.select_indices(order).shard_by_batch_size(SHARDS)

    here, remote = interleaved(lambda: shard(batch), lambda: shard(handle), repeats=9)
    ratio = here.median / remote.median
    yield Row(f"shuffle 256 MiB and shard them over {SHARDS}", str(here), "", True)
    yield Row("  by a handle to the object store", f"{remote}: {ratio:.1f}x", ">= 5x faster", ratio >= 5)


if __name__ == "__main__":
    print(table(rows()))

# SPDX-License-Identifier: Apache-2.0
"""Microbatches of one shard: as planned for all shards, or of a fixed number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _interop
from ._checks import IntArray, whole, whole_numbers

if TYPE_CHECKING:
    from ._batch import BatchedDataDict, SlicedDataDict

DYNAMIC, PACKED = "dynamic_batching_args", "sequence_packing_args"


def sequence_lengths(batch: BatchedDataDict[Any], input_key: str, lengths_key: str) -> tuple[IntArray, int]:
    """The checked lengths of all samples, and the width of the tensor that holds the sequences."""
    size = batch.size
    for name, key in (("input_key", input_key), ("input_lengths_key", lengths_key)):
        if key not in batch.data:
            raise ValueError(f"Unknown {name} {key!r}; the batch has {sorted(batch.data)}.")
    sequences = batch.data[input_key]
    if not (isinstance(sequences, np.ndarray) or _interop.is_tensor(sequences)) or sequences.ndim < 2:
        found = f"shape {tuple(sequences.shape)}" if hasattr(sequences, "shape") else "a list"
        raise ValueError(f"{input_key!r} must be an array or tensor of (samples, width, ...), found {found}.")
    width = int(sequences.shape[1])
    lengths = whole_numbers(lengths_key, batch.data[lengths_key])
    if size and (lengths.min() < 0 or lengths.max() > width):
        index = int(np.flatnonzero((lengths < 0) | (lengths > width))[0])
        raise ValueError(
            f"{lengths_key!r} says that sample {index} has {lengths[index]} tokens; {input_key!r} has width {width}."
        )
    return lengths, width


def spans(batch: BatchedDataDict[Any], planned_by: str) -> list[tuple[int, int, int]]:
    """Start, end and length of all planned microbatches, over all groups."""
    if batch.micro_batch_indices is None or batch.micro_batch_lengths is None:
        raise ValueError(
            f"The batch has no planned microbatches: get it by shard_by_batch_size(..., {planned_by}=...)."
        )
    if (batch.elem_counts_per_gb is None) != (planned_by == DYNAMIC):
        other = PACKED if planned_by == DYNAMIC else DYNAMIC
        raise ValueError(f"The microbatches of this batch were planned by {other}, not by {planned_by}.")
    found = []
    first = 0
    for cuts, lengths in zip(batch.micro_batch_indices, batch.micro_batch_lengths, strict=True):
        found += [(first + start, first + end, length) for (start, end), length in zip(cuts, lengths, strict=True)]
        first = found[-1][1]
    if first != batch.size:
        raise ValueError(f"Microbatches were planned for {first} samples, and the batch has {batch.size}.")
    return found


def cut(
    batch: BatchedDataDict[Any], where: list[tuple[int, int, int]], sequence_dim: int | None
) -> Iterator[SlicedDataDict[Any]]:
    """The samples of each span, truncated to its length unless there is no ``sequence_dim``."""
    for start, end, length in where:
        microbatch = batch.slice(start, end)
        if sequence_dim is not None:
            microbatch.truncate_tensors(sequence_dim, length)
        yield microbatch


def equal(batch: BatchedDataDict[Any], samples: int) -> range:
    """Where microbatches of ``samples`` start, checked: every shard has as many."""
    samples = whole("microbatch_size", samples, at_least=1)
    size = batch.size
    if batch.elem_counts_per_gb is not None:
        raise ValueError(
            "After packing, shards have different numbers of samples, so ranks would have different numbers of "
            "microbatches and wait for each other for ever: use make_microbatch_iterator_for_packable_sequences()."
        )
    if batch.shard_sizes is not None:
        least, most = min(batch.shard_sizes), max(batch.shard_sizes)
        if -(-least // samples) != -(-most // samples):
            raise ValueError(
                f"Shards of {least} to {most} samples have different numbers of microbatches of {samples}, so ranks "
                f"would wait for each other for ever: use pad_to_multiple before sharding."
            )
    elif not size:
        raise ValueError("An empty batch has no microbatches: it has 0 samples.")
    elif size % samples:
        raise ValueError(
            f"{size} samples are no multiple of microbatch_size={samples}: use pad_to_multiple({samples})."
        )
    return range(0, size, samples)

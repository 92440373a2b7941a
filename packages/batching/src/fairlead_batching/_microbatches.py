# SPDX-License-Identifier: Apache-2.0
"""Microbatches of one shard: as planned for all shards, or of a fixed number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _interop, _leaf
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


def sequences(batch: BatchedDataDict[Any], dim: int, named: Iterable[str] | None) -> list[str]:
    """Return the keys of the leaves whose ``dim`` is the sequence: those named, else those as wide as ``input_key``."""
    dims = {key: getattr(leaf, "ndim", 0) for key, leaf in batch.data.items()}
    if named is not None:
        keys = [named] if isinstance(named, str) else list(named)
        if unknown := [key for key in keys if key not in dims]:
            raise ValueError(f"Unknown sequence_keys {unknown}; the batch has {sorted(dims)}.")
        if flat := [key for key in keys if dims[key] <= dim]:
            raise ValueError(f"Leaves {flat} in sequence_keys have no dim {dim}, so no sequences to truncate.")
        return keys
    key = batch.input_key
    if key is None or dims.get(key, 0) < 2:
        raise ValueError(
            f"It is unknown how wide sequences are: the batch has no array or tensor of (samples, width, ...) at the "
            f"plan's input_key, {key!r}. Name the leaves to truncate: sequence_keys=[...]."
        )
    width = batch.data[key].shape[1]
    return [name for name, leaf in batch.data.items() if dims[name] > dim and leaf.shape[dim] == width]


def cut(
    batch: BatchedDataDict[Any], where: list[tuple[int, int, int]], dim: int = 1, keys: Iterable[str] = ()
) -> Iterator[SlicedDataDict[Any]]:
    """Yield the samples of each span, with ``dim`` of the leaves ``keys`` truncated to its length."""
    for start, end, length in where:
        microbatch = batch.slice(start, end)
        for key in keys:
            microbatch.data[key] = _leaf.truncate(microbatch.data[key], dim, length)
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

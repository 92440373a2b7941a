# SPDX-License-Identifier: Apache-2.0
"""Microbatches of one shard: as planned for all shards, or of a fixed number of samples."""

from collections.abc import Iterable
from typing import Any, Literal

from ._args import SequencePackingArgs, as_int
from ._samples import Samples

PlannedBy = Literal["dynamic_batching_args", "sequence_packing_args"]
Span = tuple[int, int, int]  # start, end, and padded length or tokens


def find_spans(batch: Samples[Any], planned_by: PlannedBy) -> list[Span]:
    """Return all planned microbatches of a shard, over all groups."""
    plan = batch.plan
    cuts, lengths = plan.micro_batch_indices, plan.micro_batch_lengths
    if cuts is None or lengths is None:
        raise ValueError(
            f"The batch has no planned microbatches: get it by shard_by_batch_size(..., {planned_by}=...)."
        )
    actual = "sequence_packing_args" if isinstance(plan.args, SequencePackingArgs) else "dynamic_batching_args"
    if actual != planned_by:
        raise ValueError(f"The microbatches of this batch were planned by {actual}, not by {planned_by}.")
    spans: list[Span] = []
    first = 0
    for group_cuts, group_lengths in zip(cuts, lengths, strict=True):
        spans += [
            (first + start, first + end, length) for (start, end), length in zip(group_cuts, group_lengths, strict=True)
        ]
        first = spans[-1][1]
    if first != batch.size:
        raise ValueError(f"Microbatches were planned for {first} samples, and the batch has {batch.size}.")
    return spans


def find_equal_spans(batch: Samples[Any], samples: int, name: str = "microbatch_size") -> list[Span]:
    """Return parts of ``samples`` samples each, after checking that every shard has as many."""
    size, samples = batch.size, as_int(name, samples, at_least=1)
    if batch.elem_counts_per_gb is not None:
        raise ValueError(
            "After packing, shards have different numbers of samples, so ranks would have different numbers of "
            "microbatches and wait for each other for ever: use make_microbatch_iterator_for_packable_sequences()."
        )
    if sizes := batch.plan.shard_sizes:
        least, most = min(sizes), max(sizes)
        if -(-least // samples) != -(-most // samples):
            raise ValueError(
                f"Shards of {least} to {most} samples have different numbers of microbatches of {samples}, so ranks "
                f"would wait for each other for ever: use pad_to_multiple before sharding."
            )
    elif not size:
        raise ValueError("An empty batch has no microbatches: it has 0 samples.")
    elif size % samples:
        raise ValueError(f"{size} samples are not a multiple of {name}={samples}: use pad_to_multiple({samples}).")
    return [(start, min(start + samples, size), 0) for start in range(0, size, samples)]


def find_sequence_keys(batch: Samples[Any], dim: int, named: Iterable[str] | None) -> list[str]:
    """Return the keys of the leaves whose ``dim`` is the sequence: those named, else those as wide as ``input_key``."""
    dims = {key: getattr(leaf, "ndim", 0) for key, leaf in batch.data.items()}
    if named is not None:
        keys = [named] if isinstance(named, str) else list(named)
        if unknown := [key for key in keys if key not in dims]:
            raise ValueError(f"Unknown sequence_keys {unknown}; the batch has {sorted(dims)}.")
        if flat := [key for key in keys if dims[key] <= dim]:
            raise ValueError(f"Leaves {flat} in sequence_keys have no dim {dim}, so no sequences to truncate.")
        return keys
    input_key = batch.plan.args.input_key if batch.plan.args else None
    if input_key is None or dims.get(input_key, 0) < 2:
        raise ValueError(
            f"The width of sequences is unknown: the batch has no array or tensor of (samples, width, ...) at the "
            f"plan's input_key, {input_key!r}. Name the leaves to truncate: sequence_keys=[...]."
        )
    width = batch[input_key].shape[1]
    return [name for name, leaf in batch.data.items() if dims[name] > dim and leaf.shape[dim] == width]

# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which shard and microbatch. All shards are planned together, so their microbatches match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from . import _leaf
from ._args import Args, DynamicBatchingArgs, SequencePackingArgs, as_int, read_args
from ._leaf import IntArray
from ._packing.packer import get_packer

Cuts = list[list[list[int]]]  # per group, per microbatch: [start, end] within the group's part of the shard
Lengths = list[list[int]]  # per group, per microbatch: padded length, or tokens of the bin


@dataclass(frozen=True)
class ShardPlan:
    """The samples of all shards, shard after shard: position i holds sample ``order[i]``.

    The lists have one entry per shard. Without microbatches, ``cuts`` is None. Dynamic batching sets ``input_key``,
    the leaf with the sequences.
    """

    order: IntArray
    sizes: list[int]
    cuts: list[Cuts] | None = None
    lengths: Sequence[Lengths] = ()
    packed: bool = False
    input_key: str | None = None


def plan_shards(
    leaves: Mapping[str, Any],
    shards: int,
    batch_size: int | None,
    allow_uneven_shards: bool,
    dynamic: DynamicBatchingArgs | Mapping[str, Any] | None,
    packing: SequencePackingArgs | Mapping[str, Any] | None,
) -> ShardPlan:
    """Return the plan for the samples of ``leaves``; for arguments and errors see `shard_by_batch_size`."""
    shards = as_int("shards", shards, at_least=1)
    if dynamic is not None and packing is not None:
        raise ValueError("dynamic_batching_args and sequence_packing_args were both given: choose one.")
    size = _leaf.count_samples(leaves)
    group = _group_size(size, shards, batch_size, allow_uneven_shards)
    if dynamic is not None:
        dynamic = read_args(DynamicBatchingArgs, dynamic)
        return _plan_dynamic(*_read_lengths(leaves, dynamic), group, shards, dynamic)
    if packing is not None:
        packing = read_args(SequencePackingArgs, packing)
        return _plan_packed(_read_lengths(leaves, packing)[1], group, shards, packing)
    # In uneven shards the leading ones have one sample more.
    pieces = np.array_split(np.arange(size).reshape(-1, group), shards, axis=1)
    return ShardPlan(np.concatenate([piece.ravel() for piece in pieces]), [piece.size for piece in pieces])


def _group_size(size: int, shards: int, batch_size: int | None, allow_uneven_shards: bool) -> int:
    """Return how many samples are split over the shards at a time.

    Raises:
        ValueError: there are no samples, or they cannot be split like this.
    """
    if not size:
        raise ValueError("An empty batch cannot be sharded: it has 0 samples.")
    group = size if batch_size is None else as_int("batch_size", batch_size, at_least=1)
    if allow_uneven_shards:
        if group != size:
            raise ValueError(f"allow_uneven_shards needs batch_size to be the size, {size}, or None; got {batch_size}.")
        return group
    if size % group:
        raise ValueError(f"{size} samples are not a multiple of batch_size={group}: use pad_to_multiple({group}).")
    if group % shards:
        what = f"batch_size={group} is" if batch_size is not None else f"{size} samples are"
        advice = f"pad_to_multiple({shards})" if batch_size is None else f"a batch_size that is a multiple of {shards}"
        raise ValueError(f"{what} not a multiple of shards={shards}: use {advice}, or allow_uneven_shards=True.")
    return group


def _read_lengths(leaves: Mapping[str, Any], args: Args) -> tuple[IntArray, IntArray]:
    """Return the lengths of all samples, and their padded lengths, after checking both."""
    for name in ("input_key", "input_lengths_key"):
        if (key := getattr(args, name)) not in leaves:
            raise ValueError(f"Unknown {name} {key!r}; the batch has {sorted(leaves)}.")
    sequences = leaves[args.input_key]
    if isinstance(sequences, list) or sequences.ndim < 2:
        found = "a list" if isinstance(sequences, list) else f"shape {tuple(sequences.shape)}"
        raise ValueError(f"{args.input_key!r} must be an array or tensor of (samples, width, ...), found {found}.")
    width = int(sequences.shape[1])
    lengths = _leaf.to_integers(args.input_lengths_key, leaves[args.input_lengths_key])
    if lengths.min() < 0 or lengths.max() > width:
        index = int(np.flatnonzero((lengths < 0) | (lengths > width))[0])
        raise ValueError(
            f"{args.input_lengths_key!r} says that sample {index} has {lengths[index]} tokens; "
            f"{args.input_key!r} has width {width}."
        )
    if isinstance(args, DynamicBatchingArgs):
        holder, multiple, most = "", args.sequence_length_round, width
    else:
        holder, multiple, most = "a bin of ", args.sequence_length_pad_multiple, np.iinfo(np.int64).max
    padded = np.minimum(-(-lengths // multiple) * multiple, most)
    if (longest := int(padded.max())) > args.max_tokens_per_microbatch:
        index = int(padded.argmax())
        raise ValueError(
            f"Sample {index} of {args.input_key!r} has {lengths[index]} tokens by {args.input_lengths_key!r}, padded "
            f"{longest}, more than {holder}max_tokens_per_microbatch={args.max_tokens_per_microbatch}."
        )
    return lengths, padded


def _plan_dynamic(lengths: IntArray, padded: IntArray, group: int, shards: int, args: DynamicBatchingArgs) -> ShardPlan:
    """Sort each group by length, deal it to the shards in turn, and cut all shards at the same positions."""
    limit = args.max_tokens_per_microbatch
    if group < shards:
        raise ValueError(
            f"{group} samples cannot give each of {shards} shards a microbatch: pad_to_multiple({shards})."
        )
    groups = len(lengths) // group
    # numpy sorts 16-bit numbers by radix, which is several times faster.
    keys = lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
    ranked = keys.reshape(groups, group).argsort(axis=1, kind="stable") + np.arange(0, len(lengths), group)[:, None]
    dealt = [ranked[:, shard::shards] for shard in range(shards)]
    # Lengths ascend, so the longest sample of all shards at a position is the last one dealt for it.
    last = np.minimum(np.arange(shards - 1, group + shards - 1, shards), group - 1)
    longest_at = padded[ranked[:, last]].tolist()
    starts = [_find_cuts(at, limit, only_some_have_last=bool(group % shards)) for at in longest_at]
    widths = [[at[end - 1] for end in [*own, len(at)]] for own, at in zip(starts, longest_at, strict=True)]
    return ShardPlan(
        order=np.concatenate([piece.ravel() for piece in dealt]),
        sizes=[piece.size for piece in dealt],
        # A shard may lack the last position.
        cuts=[[_pair([*own, piece.shape[1]]) for own in starts] for piece in dealt],
        lengths=[[list(own) for own in widths] for _ in dealt],
        input_key=args.input_key,
    )


def _pair(ends: Iterable[int]) -> list[list[int]]:
    """Return ``[start, end]`` of consecutive parts, given their ends."""
    return [list(pair) for pair in pairwise([0, *ends])]


def _find_cuts(longest_at: list[int], limit: int, only_some_have_last: bool) -> list[int]:
    """Return where microbatches after the first start; a last position that only some shards have is not one."""
    starts = [0]
    for position, length in enumerate(longest_at):
        if (position + 1 - starts[-1]) * length > limit:
            starts.append(position)
    final = len(longest_at) - 1
    if only_some_have_last and starts[-1] == final:
        if 2 * longest_at[-1] > limit or starts[-2:-1] == [final - 1]:
            raise ValueError(
                f"The shards cannot have the same number of microbatches: only some have a sample {final}, of padded "
                f"length {longest_at[-1]}, and max_tokens_per_microbatch={limit} does not hold it together with the "
                f"sample before. Use pad_to_multiple to make shards even, or more tokens."
            )
        starts[-1] -= 1
    return starts[1:]


def _plan_packed(padded: IntArray, group: int, shards: int, args: SequencePackingArgs) -> ShardPlan:
    """Pack each group into a multiple of ``shards`` bins, and deal these to the shards in turn."""
    limit = args.max_tokens_per_microbatch
    packer = get_packer(args.algorithm, limit, min_bin_count=shards, bin_count_multiple=shards)
    tokens = padded.tolist()

    def count_tokens(bin_: list[int]) -> int:
        return sum(map(tokens.__getitem__, bin_))

    groups = []
    for first in range(0, len(padded), group):
        groups.append([[first + index for index in bin_] for bin_ in packer.pack(padded[first : first + group])])
        if args.microbatch_order == "largest_first":
            groups[-1].sort(key=count_tokens, reverse=True)
    dealt = [[bins[shard::shards] for bins in groups] for shard in range(shards)]
    samples = [[index for bins in mine for bin_ in bins for index in bin_] for mine in dealt]
    return ShardPlan(
        order=np.concatenate(samples),
        sizes=[len(part) for part in samples],
        cuts=[[_pair(accumulate(map(len, bins))) for bins in mine] for mine in dealt],
        lengths=[[[count_tokens(bin_) for bin_ in bins] for bins in mine] for mine in dealt],
        packed=True,
    )

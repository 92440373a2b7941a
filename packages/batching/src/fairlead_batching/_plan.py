# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which shard and microbatch. All shards are planned at once, so their numbers agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._args import DynamicBatchingArgs, SequencePackingArgs
from ._checks import IntArray
from ._packing.packer import get_packer

Cuts = list[list[list[int]]]  # per group, per microbatch: [start, end] within the group's piece
Lengths = list[list[int]]  # per group, per microbatch: padded length, or tokens of the bin


@dataclass(frozen=True)
class ShardPlan:
    """Position i of all shards laid end to end holds sample ``order[i]``; the lists have one entry per shard."""

    order: IntArray
    sizes: list[int]
    cuts: list[Cuts] | None = None
    lengths: list[Lengths] | None = None
    counts: list[list[int]] | None = None


def group_size(size: int, shards: int, batch_size: int | None, allow_uneven_shards: bool) -> int:
    """How many samples are split over the shards at a time, checked.

    Raises:
        ValueError: there are no samples, or they cannot be split so.
    """
    if not size:
        raise ValueError("An empty batch cannot be sharded: it has 0 samples.")
    group = size if batch_size is None else batch_size
    if allow_uneven_shards:
        if group != size:
            raise ValueError(f"allow_uneven_shards needs batch_size to be the size, {size}, or None; got {batch_size}.")
        return group
    if size % group:
        raise ValueError(f"{size} samples are no multiple of batch_size={group}: use pad_to_multiple({group}).")
    if group % shards:
        what = f"batch_size={group} is" if batch_size is not None else f"{size} samples are"
        advice = f"pad_to_multiple({shards})" if batch_size is None else f"a batch_size that is a multiple of {shards}"
        raise ValueError(f"{what} no multiple of shards={shards}: use {advice}, or allow_uneven_shards=True.")
    return group


def plain(size: int, group: int, shards: int) -> ShardPlan:
    """Each group in ``shards`` pieces; if that leaves a rest, of the only group, leading shards take one more."""
    if group % shards:
        sizes = [size // shards + (shard < size % shards) for shard in range(shards)]
        return ShardPlan(np.arange(size), sizes)
    order = np.arange(size).reshape(size // group, shards, group // shards).swapaxes(0, 1)
    return ShardPlan(order.ravel(), [size // shards] * shards)


def dynamic(lengths: IntArray, width: int, group: int, shards: int, args: DynamicBatchingArgs) -> ShardPlan:
    """Sorted by length within each group, dealt in turn, and cut alike for all shards."""
    limit, multiple = args.max_tokens_per_microbatch, args.sequence_length_round
    padded = _rounded_up(lengths, multiple)
    np.minimum(padded, width, out=padded)
    if (longest := int(padded.max())) > limit:
        index = int(padded.argmax())
        raise ValueError(
            f"Sample {index} of {args.input_key!r} has {lengths[index]} tokens by {args.input_lengths_key!r}, padded "
            f"{longest}, more than max_tokens_per_microbatch={limit}."
        )
    if group < shards:
        raise ValueError(
            f"{group} samples cannot give each of {shards} shards a microbatch: pad_to_multiple({shards})."
        )
    groups = len(lengths) // group
    # Sorting 16-bit numbers is a radix sort, several times faster.
    keys = lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
    ranked = keys.reshape(groups, group).argsort(axis=1, kind="stable") + np.arange(0, len(lengths), group)[:, None]
    dealt = [ranked[:, shard::shards] for shard in range(shards)]
    # Ascending, so the longest over all shards at a position is the last one dealt for it.
    last = np.minimum(np.arange(shards - 1, group + shards - 1, shards), group - 1)
    longest_at = padded[ranked[:, last]].tolist()
    cuts: Cuts = []
    widths: Lengths = []
    for at in longest_at:
        starts = _cut(at, limit, joined=bool(group % shards))
        ends = [*starts[1:], len(at)]
        cuts.append([[start, end] for start, end in zip(starts, ends, strict=True)])
        widths.append([at[end - 1] for end in ends])
    return ShardPlan(
        order=np.concatenate([piece.ravel() for piece in dealt]),
        sizes=[piece.size for piece in dealt],
        cuts=[[_fitted(group_cuts, piece.shape[1]) for group_cuts in cuts] for piece in dealt],
        lengths=[[list(group_widths) for group_widths in widths] for _ in dealt],
    )


def _fitted(cuts: list[list[int]], samples: int) -> list[list[int]]:
    """A copy for a shard of ``samples``, which may lack the last."""
    fitted = [[start, end] for start, end in cuts]
    fitted[-1][1] = samples
    return fitted


def _cut(longest_at: list[int], limit: int, joined: bool) -> list[int]:
    """Where microbatches start. ``joined``: only some shards have the last position, so it may not stand alone."""
    starts = [0]
    for position, length in enumerate(longest_at):
        if (position + 1 - starts[-1]) * length > limit:
            starts.append(position)
    final = len(longest_at) - 1
    if joined and starts[-1] == final:
        if 2 * longest_at[-1] > limit or starts[-2:-1] == [final - 1]:
            raise ValueError(
                f"The shards cannot have the same number of microbatches: only some have a sample {final}, of padded "
                f"length {longest_at[-1]}, and it fits no microbatch of max_tokens_per_microbatch={limit} together "
                f"with the one before. Use pad_to_multiple, so that shards are even, or more tokens."
            )
        starts[-1] -= 1
    return starts


def packed(lengths: IntArray, group: int, shards: int, args: SequencePackingArgs) -> ShardPlan:
    """Packed in bins within each group; a multiple of ``shards`` bins, dealt in turn."""
    limit = args.max_tokens_per_microbatch
    taken = _rounded_up(lengths, args.sequence_length_pad_multiple)
    if (most := int(taken.max())) > limit:
        index = int(taken.argmax())
        raise ValueError(
            f"Sample {index} of {args.input_key!r} has {lengths[index]} tokens by {args.input_lengths_key!r}, padded "
            f"{most}, more than a bin of max_tokens_per_microbatch={limit}."
        )
    packer = get_packer(args.algorithm, limit, min_bin_count=shards, bin_count_multiple=shards)
    orders: list[list[int]] = [[] for _ in range(shards)]
    cuts: list[Cuts] = [[] for _ in range(shards)]
    tokens: list[Lengths] = [[] for _ in range(shards)]
    counts: list[list[int]] = [[] for _ in range(shards)]
    for first in range(0, len(lengths), group):
        here = taken[first : first + group].tolist()
        bins = packer.pack(here)
        if args.microbatch_order == "largest_first":
            bins.sort(key=lambda bin_: -sum(here[index] for index in bin_))
        for shard in range(shards):
            mine = bins[shard::shards]
            ends = np.cumsum([len(bin_) for bin_ in mine]).tolist()
            orders[shard] += [first + index for bin_ in mine for index in bin_]
            cuts[shard].append([[start, end] for start, end in zip([0, *ends[:-1]], ends, strict=True)])
            tokens[shard].append([sum(here[index] for index in bin_) for bin_ in mine])
            counts[shard].append(ends[-1])
    order = np.array([index for part in orders for index in part], dtype=np.int64)
    return ShardPlan(order, [len(part) for part in orders], cuts, tokens, counts)


def _rounded_up(lengths: IntArray, multiple: int) -> IntArray:
    return -(-lengths // multiple) * multiple

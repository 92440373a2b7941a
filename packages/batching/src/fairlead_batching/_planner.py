# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which shard and microbatch. All shards are planned together, so their microbatches match."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ._args import Algorithm, DynamicBatchingArgs, MicrobatchArgs, SequencePackingArgs, as_int, read_args
from ._leaves import operations
from ._leaves.interop import IntArray
from ._packing import algorithms
from ._packing.algorithms import Costs
from ._packing.packer import get_packer
from ._plan import Cuts, Lengths, ShardPlan, check_lengths, round_up

ShardBins = list[algorithms.Bins]  # for each shard, its bins of samples
Parts = tuple[tuple[IntArray, ...], list[Cuts], list[Lengths]]  # for each shard, its samples and microbatches


def plan_shards(
    lengths: int | Iterable[int],
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
    sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    *,
    width: int | None = None,
) -> ShardPlan:
    """Return the plan that `BatchedDataDict.shard_by_batch_size` would make, from the lengths of the samples alone.

    Args:
        lengths: the length of each sample in tokens. Without microbatches their number is enough.
        shards, batch_size, allow_uneven_shards, dynamic_batching_args, sequence_packing_args: as for
            `BatchedDataDict.shard_by_batch_size`.
        width: the width of the tensor with the sequences, which padded lengths never exceed.

    Raises:
        TypeError: a number is not whole.
        ValueError: as for `BatchedDataDict.shard_by_batch_size`; or microbatches need lengths, and a number was given.

    >>> args = {"max_tokens_per_microbatch": 8, "input_key": "tokens", "input_lengths_key": "length"}
    >>> plan = plan_shards([6, 2, 3, 5], shards=2, dynamic_batching_args={**args, "sequence_length_round": 2})
    >>> [[part.tolist() for part in shard] for shard in plan.microbatches]
    [[[1], [3]], [[2], [0]]]
    """
    shards = as_int("shards", shards, at_least=1)
    args = read_args(dynamic_batching_args, sequence_packing_args)
    if isinstance(lengths, (int, np.integer)):
        numbers, size = None, as_int("lengths", lengths, at_least=0)
    else:
        numbers = operations.to_integers("lengths" if args is None else args.input_lengths_key, lengths)
        size = numbers.size
    group = _group_size(size, shards, batch_size, allow_uneven_shards)
    if args is None:
        # In uneven shards the leading ones have one sample more.
        pieces = np.array_split(np.arange(size).reshape(-1, group), shards, axis=1)
        return ShardPlan(tuple(piece.ravel() for piece in pieces), lengths=numbers)
    if numbers is None:
        raise ValueError(f"Microbatches are planned from the length of each sample; found only their number, {size}.")
    check_lengths(numbers, width, args.input_key, args.input_lengths_key)
    if isinstance(args, SequencePackingArgs):
        holder, padded = "a bin of ", round_up(numbers, args.sequence_length_pad_multiple)
    else:
        holder, padded = "", round_up(numbers, args.sequence_length_round)
        if width is not None:
            padded = np.minimum(padded, width)
    if (longest := int(padded.max())) > args.max_tokens_per_microbatch:
        index = int(padded.argmax())
        raise ValueError(
            f"Sample {index} of {args.input_key!r} has {numbers[index]} tokens by {args.input_lengths_key!r}, padded "
            f"{longest}, more than {holder}max_tokens_per_microbatch={args.max_tokens_per_microbatch}."
        )
    costs = _compute_costs(numbers, args)
    if isinstance(args, SequencePackingArgs):
        parts = _plan_packed(padded, costs, group, shards, args)
    else:
        parts = _plan_dynamic(numbers, padded, costs, group, shards, args.max_tokens_per_microbatch)
    return ShardPlan(*parts, args, numbers, costs)


def _group_size(size: int, shards: int, batch_size: int | None, allow_uneven_shards: bool) -> int:
    """Return how many samples are split over the shards at a time."""
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


def _compute_costs(lengths: IntArray, args: MicrobatchArgs) -> Costs | None:
    """Return the cost of each sample; None if the arguments have no cost."""
    if args.cost is None:
        return None
    linear, quadratic = args.cost
    return linear * lengths + quadratic * lengths.astype(np.float64) ** 2


def _plan_dynamic(
    lengths: IntArray, padded: IntArray, costs: Costs | None, group: int, shards: int, limit: int
) -> Parts:
    """Sort each group by length, deal it to the shards in rows, and cut all shards at the same positions."""
    if group < shards:
        raise ValueError(
            f"{group} samples cannot give each of {shards} shards a microbatch: pad_to_multiple({shards})."
        )
    groups = len(lengths) // group
    # numpy sorts 16-bit numbers by radix, which is several times faster.
    keys = lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
    ranked = keys.reshape(groups, group).argsort(axis=1, kind="stable") + np.arange(0, len(lengths), group)[:, None]
    # Lengths ascend, so the longest sample of all shards at a position is the last one dealt for it.
    last = np.minimum(np.arange(shards - 1, group + shards - 1, shards), group - 1)
    longest_at = padded[ranked[:, last]].tolist()
    if costs is not None:
        deals = (_deal_rows(ranked, costs, shards), ranked)
        ranked = min(deals, key=lambda deal: max(math.fsum(costs[deal[:, n::shards].ravel()]) for n in range(shards)))
    dealt = [ranked[:, shard::shards] for shard in range(shards)]
    starts = [_find_cuts(widest, limit, only_some_have_last=bool(group % shards)) for widest in longest_at]
    widths = [[widest[end - 1] for end in [*own, len(widest)]] for own, widest in zip(starts, longest_at, strict=True)]
    return (
        tuple(piece.ravel() for piece in dealt),
        # A shard may lack the last position.
        [[_pair([*own, piece.shape[1]]) for own in starts] for piece in dealt],
        [[list(own) for own in widths] for _ in dealt],
    )


def _deal_rows(ranked: IntArray, costs: Costs, shards: int) -> IntArray:
    """Return the samples with those of a row in another order: the most expensive to the cheapest shard so far."""
    dealt = ranked.copy()
    totals = np.zeros(shards)
    starts = range(0, ranked.shape[1], shards)
    rows = [row[start : start + shards] for row in dealt for start in starts]
    # The most expensive row of all groups comes first. One may be incomplete: the leading shards have its samples.
    for row in sorted(rows, key=lambda row: float(costs[row].max()), reverse=True):
        cheapest = np.argsort(totals[: len(row)], kind="stable")
        row[cheapest] = row[np.argsort(-costs[row], kind="stable")]
        totals[: len(row)] += costs[row]
    return dealt


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


def _plan_packed(padded: IntArray, costs: Costs | None, group: int, shards: int, args: SequencePackingArgs) -> Parts:
    """Pack each group into a multiple of ``shards`` bins, and give each shard as many of them."""
    if costs is not None:
        groups = _deal_by_cost(padded.reshape(-1, group), costs.reshape(-1, group), shards, args)
    else:
        groups = [_deal_bins(own, shards, args) for own in padded.reshape(-1, group)]
    firsts = range(0, len(padded), group)
    of_groups = [
        [[[first + index for index in bin_] for bin_ in bins] for bins in own]
        for first, own in zip(firsts, groups, strict=True)
    ]
    dealt = list(zip(*of_groups, strict=True))  # the same for each shard, and then for each group
    tokens = padded.tolist()
    return (
        tuple(np.array([index for bins in mine for bin_ in bins for index in bin_]) for mine in dealt),
        [[_pair(accumulate(map(len, bins))) for bins in mine] for mine in dealt],
        [[[sum(map(tokens.__getitem__, bin_)) for bin_ in bins] for bins in mine] for mine in dealt],
    )


def _deal_bins(padded: IntArray, shards: int, args: SequencePackingArgs) -> ShardBins:
    """Return the bins of each shard without regard to costs: those of the packer, dealt in turn."""
    bins = get_packer(args.algorithm, args.max_tokens_per_microbatch, shards, shards).pack(padded)
    if args.microbatch_order == "largest_first":
        bins.sort(key=lambda bin_: int(padded[bin_].sum()), reverse=True)
    return [bins[shard::shards] for shard in range(shards)]


def _deal_by_cost(padded: IntArray, costs: Costs, shards: int, args: SequencePackingArgs) -> list[ShardBins]:
    """Return the bins of each shard, for each group: shards cost the same, and no more than without a cost."""
    plain = [_deal_bins(own, shards, args) for own in padded]
    totals, plain_totals = np.zeros(shards), np.zeros(shards)
    groups: list[ShardBins] = []
    for own, each, of_group in zip(padded, costs, plain, strict=True):
        bins = of_group
        with contextlib.suppress(ValueError):  # too few sequences for as many bins on all shards
            dealt = _fill_bins(own, each, shards, args)
            bins = dealt if len(dealt[0]) <= len(of_group[0]) else of_group
        sums = _sum_costs(bins, each)
        # The most expensive part of this group goes to the shard that is the cheapest so far.
        order = np.empty(shards, dtype=np.int64)
        order[np.argsort(totals, kind="stable")] = np.argsort(-sums, kind="stable")
        groups.append([bins[part] for part in order.tolist()])
        totals += sums[order]
        plain_totals += _sum_costs(of_group, each)
    chosen = groups if totals.max() <= plain_totals.max() else plain
    return [_sort_bins(dealt, each) for dealt, each in zip(chosen, costs, strict=True)]


def _sum_costs(dealt: ShardBins, costs: Costs) -> Costs:
    """Return the cost of each shard, whatever the order of its samples."""
    return np.array([math.fsum(costs[[index for bin_ in bins for index in bin_]]) for bins in dealt])


def _sort_bins(dealt: ShardBins, costs: Costs) -> ShardBins:
    """Return the bins of each shard, the most expensive first."""
    return [sorted(bins, key=lambda bin_: float(costs[bin_].sum()), reverse=True) for bins in dealt]


def _fill_bins(padded: IntArray, costs: Costs, shards: int, args: SequencePackingArgs) -> ShardBins:
    """Deal the samples to the shards, the most expensive first to the cheapest, and return the bins of each shard."""
    ranked = np.argsort(-costs, kind="stable")
    dealt = np.array(algorithms.deal_longest_first(costs[ranked].tolist(), shards)[1])
    samples = [ranked[dealt == shard] for shard in range(shards)]
    # Balanced bins are as few, but it would take long to search for their number.
    counted_by: Algorithm = "first_fit_decreasing" if args.algorithm == "balanced" else args.algorithm
    counter = get_packer(counted_by, args.max_tokens_per_microbatch)
    count = max(len(counter.pack(padded[mine])) for mine in samples)
    packer = get_packer(args.algorithm, args.max_tokens_per_microbatch, count, count)
    return [[mine[bin_].tolist() for bin_ in packer.pack(padded[mine])] for mine in samples]

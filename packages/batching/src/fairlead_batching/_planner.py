# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which shard and microbatch. All shards are planned together, so their microbatches match."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ._args import DynamicBatchingArgs, MicrobatchArgs, SequencePackingArgs, as_int, read_args
from ._leaves import operations
from ._leaves.interop import IntArray
from ._packing import algorithms
from ._packing.algorithms import Costs, exchange_shards, fill_evenly, put_at, split_evenly
from ._packing.packer import get_packer
from ._plan import Cuts, Lengths, ShardPlan, check_lengths, round_up

# Beyond this number of samples x bins, the bins of a shard are not evened out.
_MOST_WORK = 1 << 29
# Splits are equally good if their most expensive shard costs at most this many means.
_BALANCED = 1.01
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
    if not callable(args.cost):
        linear, quadratic = args.cost
        return linear * lengths + quadratic * lengths.astype(np.float64) ** 2
    try:
        costs = np.asarray(args.cost(lengths.copy()), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cost must return a number for each length of {args.input_lengths_key!r}: {error}") from error
    if costs.shape != lengths.shape:
        raise ValueError(
            f"cost must return one number for each of the {lengths.size} lengths of {args.input_lengths_key!r}, found "
            f"shape {costs.shape}: it is called once, with all lengths in an array."
        )
    if not (usable := np.isfinite(costs) & (costs >= 0)).all():
        index = int(np.flatnonzero(~usable)[0])
        raise ValueError(
            f"The cost of sample {index}, {lengths[index]} tokens by {args.input_lengths_key!r}, is {costs[index]}: "
            f"cost must return finite numbers of at least 0."
        )
    return costs


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
        deals = (_exchange_in_rows(ranked, costs, shards), ranked)
        ranked = min(deals, key=lambda deal: max(math.fsum(costs[deal[:, n::shards].ravel()]) for n in range(shards)))
    dealt = [ranked[:, shard::shards] for shard in range(shards)]
    starts = [_find_cuts(at, limit, only_some_have_last=bool(group % shards)) for at in longest_at]
    widths = [[at[end - 1] for end in [*own, len(at)]] for own, at in zip(starts, longest_at, strict=True)]
    return (
        tuple(piece.ravel() for piece in dealt),
        # A shard may lack the last position.
        [[_pair([*own, piece.shape[1]]) for own in starts] for piece in dealt],
        [[list(own) for own in widths] for _ in dealt],
    )


def _exchange_in_rows(ranked: IntArray, costs: Costs, shards: int) -> IntArray:
    """Return the samples of each group with those of a row in another order, so that all shards cost the same."""
    groups, group = ranked.shape
    samples = np.pad(ranked, ((0, 0), (0, -group % shards)), constant_values=-1).reshape(groups, -1, shards)
    of_shard = split_evenly(np.where(samples < 0, 0.0, costs[samples]))
    exchanged = put_at(of_shard, samples)
    # The last row may be incomplete: the leading shards have its samples.
    return exchanged[..., np.argsort(exchanged[0, -1] < 0, kind="stable")].reshape(groups, -1)[:, :group]


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
    groups, group = costs.shape
    if group < shards:
        raise ValueError(f"{group} sequences cannot fill {shards} bins without leaving one empty: fewer shards.")
    ranked = np.argsort(-costs, axis=1, kind="stable")
    descending = np.pad(np.take_along_axis(costs, ranked, 1), ((0, 0), (0, -group % shards)))
    of_place = split_evenly(descending.reshape(groups, -1, shards)).reshape(groups, -1)[:, :group]
    plain: list[ShardBins] = []
    with contextlib.suppress(ValueError):  # without a cost there is no plan
        plain = [_sort_bins(_deal_bins(own, shards, args), each) for own, each in zip(padded, costs, strict=True)]
    chosen: list[tuple[ShardBins, Costs]] = []
    for number, own in enumerate(costs):
        candidates: list[ShardBins] = []
        _, dealt = algorithms.deal_longest_first(descending[number, :group].tolist(), shards)
        for places in (of_place[number], np.array(dealt)):
            with contextlib.suppress(*[ValueError] * bool(plain or candidates)):
                of_sample = put_at(ranked[number], places)
                candidates.append(_fill_bins(of_sample, padded[number], own, shards, args))
        if plain:
            candidates += [_exchange_bins(plain[number], own), plain[number]]
        measured = [(bins, _sum_costs(bins, own)) for bins in candidates]
        if plain:
            # The plain bins are among them, so no shard gets more bins than without a cost.
            measured = [one for one in measured if one[1].max() <= measured[-1][1].max()]
        chosen.append(min(measured, key=lambda one: (len(one[0][0]), max(one[1].max(), _BALANCED * one[1].mean()))))
    sums: Costs = np.stack([each for _, each in chosen])
    orders = np.argsort(exchange_shards(sums), axis=1)
    if plain:
        without: Costs = np.stack([_sum_costs(bins, own) for bins, own in zip(plain, costs, strict=True)])
        if np.take_along_axis(sums, orders, 1).sum(axis=0).max() > without.sum(axis=0).max():
            return plain
    return [[bins[shard] for shard in order] for (bins, _), order in zip(chosen, orders.tolist(), strict=True)]


def _sum_costs(dealt: ShardBins, costs: Costs) -> Costs:
    """Return the cost of each shard, whatever the order of its samples."""
    return np.array([math.fsum(costs[[index for bin_ in bins for index in bin_]]) for bins in dealt])


def _sort_bins(dealt: ShardBins, costs: Costs) -> ShardBins:
    """Return the bins of each shard, the most expensive first."""
    return [sorted(bins, key=lambda bin_: float(costs[bin_].sum()), reverse=True) for bins in dealt]


def _exchange_bins(dealt: ShardBins, costs: Costs) -> ShardBins:
    """Return the same bins, dealt so that all shards cost about the same."""
    (bins,) = _sort_bins([[bin_ for own in dealt for bin_ in own]], costs)
    of_bin = split_evenly(np.array([costs[bin_].sum() for bin_ in bins]).reshape(1, -1, len(dealt))).ravel()
    return [[bins[at] for at in np.flatnonzero(of_bin == shard)] for shard in range(len(dealt))]


def _fill_bins(
    of_sample: IntArray, padded: IntArray, costs: Costs, shards: int, args: SequencePackingArgs
) -> ShardBins:
    """Return the bins of each shard, given the shard of each sample: as many for all, the most expensive first."""
    limit = args.max_tokens_per_microbatch
    balanced = args.algorithm == "balanced"
    packer = get_packer("first_fit_decreasing" if balanced else args.algorithm, limit)
    counts = np.bincount(of_sample, minlength=shards)
    samples = np.split(np.lexsort((-costs, of_sample)), np.cumsum(counts)[:-1])
    packed = [packer.pack(padded[mine]) for mine in samples]
    count = max(map(len, packed))
    if counts.min() < count:
        raise ValueError(
            f"{counts.min()} sequences cannot fill {count} bins without leaving one empty, and another shard needs as "
            f"many: use pad_to_multiple({shards}), or more tokens."
        )
    if balanced and of_sample.size * count <= _MOST_WORK:
        _even_out(packed, [padded[mine] for mine in samples], [costs[mine] for mine in samples], limit, count)
    filled = []
    for mine, bins in zip(samples, packed, strict=True):
        split = algorithms.split_to(bins, padded[mine].tolist(), count)
        filled.append([mine[bin_].tolist() for bin_ in split])
    return _sort_bins(filled, costs)


def _even_out(
    packed: list[algorithms.Bins], lengths: list[IntArray], costs: list[Costs], limit: int, count: int
) -> None:
    """Replace the bins of each shard by ``count`` bins that cost the same, where all sequences find room in them."""
    most = max(map(len, lengths))
    # Shards may differ by a sample. One without length or cost is put anywhere, and left out again.
    all_lengths = np.stack([np.pad(mine, (0, most - len(mine))) for mine in lengths])
    all_costs = np.stack([np.pad(mine, (0, most - len(mine))) for mine in costs])
    of_sequence, fits = fill_evenly(all_costs, all_lengths, limit, count)
    for number, mine in enumerate(lengths):
        own = of_sequence[number, : len(mine)]
        sizes = np.bincount(own, minlength=count)
        if fits[number] and sizes.all():
            bins = np.split(np.argsort(own, kind="stable"), np.cumsum(sizes)[:-1])
            packed[number] = [bin_.tolist() for bin_ in bins]

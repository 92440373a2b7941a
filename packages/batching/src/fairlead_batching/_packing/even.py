# SPDX-License-Identifier: Apache-2.0
"""An even split of costs over shards, and over the bins of each shard. All shards are computed at the same time."""

from typing import Any

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def split_evenly(costs: Costs) -> Integers:
    """Return the shard of each sample, so that all shards cost about the same, in each group and in total.

    Every row of samples becomes a partial solution, which gives each shard one of them. The solutions with the largest
    spreads are merged in pairs, the most expensive shard of one with the cheapest of the other, until one is left
    (Karmarkar and Karp 1982, in the balanced form of Michiels, Korst and Aarts 2003). All pairs are merged at once.
    Costs are (groups, rows, shards), 0 where there is no sample; rows of similar costs give the best result.
    """
    groups, rows, shards = costs.shape
    first = np.argsort(-costs, axis=-1, kind="stable")
    within = _merge_all(np.take_along_axis(costs, first, -1))
    result = put_at(first, within.reshape(groups, rows, shards)).reshape(groups, -1)
    sums: Costs = np.stack([np.bincount(own, each.ravel(), shards) for own, each in zip(result, costs, strict=True)])
    exchanged = exchange_shards(sums)
    return np.take_along_axis(exchanged, result, 1).reshape(costs.shape)


def exchange_shards(sums: Costs) -> Integers:
    """Return the new number of each shard of each group, so that all shards cost about the same in total."""
    first = np.argsort(-sums, axis=1, kind="stable")
    # Each group is a partial solution, too.
    return put_at(first, _merge_all(np.take_along_axis(sums, first, 1)[None]).reshape(first.shape))


def put_at(places: Integers, values: Integers) -> Integers:
    """Return an array with each value at its place in the last axis, the reverse of `np.take_along_axis`."""
    result = np.empty_like(values)
    np.put_along_axis(result, places, values, -1)
    return result


def _merge_all(sums: Costs) -> Integers:
    """Merge all rows of each group, given with descending costs; return the column of the result for each cost."""
    steps: list[tuple[Any, int, Any]] = []
    while (rows := sums.shape[1]) > 1:
        widest = np.argsort(sums[..., -1] - sums[..., 0], axis=1, kind="stable")[..., None]
        sums = np.take_along_axis(sums, widest, 1)
        if odd := rows % 2:
            sums = np.concatenate([sums, np.zeros_like(sums[:, :1])], axis=1)
        merged = sums[:, 0::2] + sums[:, 1::2, ::-1]
        descending = np.argsort(-merged, axis=-1, kind="stable")
        sums = np.take_along_axis(merged, descending, -1)
        steps.append((widest, odd, descending))
    groups, _, shards = sums.shape
    columns = np.broadcast_to(np.arange(shards), sums.shape)
    for widest, odd, descending in reversed(steps):
        merged_columns = put_at(descending, columns)
        pairs = np.stack([merged_columns, merged_columns[..., ::-1]], axis=2).reshape(groups, -1, shards)
        columns = np.empty((groups, pairs.shape[1] - odd, shards), dtype=np.int64)
        np.put_along_axis(columns, np.broadcast_to(widest, columns.shape), pairs[:, : columns.shape[1]], 1)
    return columns


def fill_evenly(costs: Costs, lengths: Integers, capacity: int, count: int) -> tuple[Integers, Flags]:
    """Put the sequences of each shard, in descending order of costs, each into the shard's cheapest bin with room.

    Return the bin of each sequence, and for each shard whether all sequences found room.
    """
    shards, sequences = costs.shape
    everyone = np.arange(shards)
    loads, room = np.zeros((shards, count)), np.full((shards, count), capacity)
    fits = np.ones(shards, dtype=np.bool_)
    bins = np.empty((sequences, shards), dtype=np.int64)
    # Without a cost of their own, sequences would all go to the same bin.
    costs = np.maximum(costs, costs.max() * 1e-12 or 1.0)
    for number, (cost, length) in enumerate(zip(costs.T, lengths.T, strict=True)):
        open_loads = np.where(room >= length[:, None], loads, np.inf)
        cheapest = bins[number] = open_loads.argmin(axis=1)
        fits &= np.isfinite(open_loads[everyone, cheapest])
        loads[everyone, cheapest] += cost
        room[everyone, cheapest] -= length
    return bins.T, fits

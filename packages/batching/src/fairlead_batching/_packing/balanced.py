# SPDX-License-Identifier: Apache-2.0
"""Packing into bins that are as equal as possible, and splitting bins into more of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter

from .first_fit import Bins, first_fit_decreasing, sort_descending

# Differencing with many bins can merge long lists for every item: beyond this number of items x bins it is not tried.
_MOST_WORK = 1 << 21

# The total length of a bin, and its first and last items. Each item leads to the next one of its bin.
_Bin = tuple[int, int, int]


def balanced(lengths: Sequence[int], capacity: int, round_up: Callable[[int], int]) -> Bins:
    """Return the fewest bins that the search finds, with the largest bin as small as it can make it.

    ``round_up`` returns the next allowed number of bins. For each number tried, the items are distributed by the
    differencing method (Karmarkar and Karp 1982, in its form for many bins) and longest-first into the emptiest
    bin (Graham 1969), and the better result counts. First-fit decreasing bounds the number from above.
    """
    fallback = first_fit_decreasing(lengths, capacity)
    over_half = sum(2 * length > capacity for length in lengths)
    low = round_up(max(-(-sum(lengths) // capacity), over_half, 1))
    high = round_up(max(len(fallback), low))
    best = split_to(fallback, lengths, high) if len(fallback) < high <= len(lengths) else fallback
    tried = _deal(lengths, high)
    if _largest(tried, lengths) <= _largest(best, lengths):
        best = tried
    while low < high:
        middle = round_up((low + high) // 2)
        if middle >= high:  # no number in between is allowed
            middle = low
        tried = _deal(lengths, middle)
        if _largest(tried, lengths) <= capacity:
            best, high = tried, middle
        else:
            low = round_up(middle + 1)
    return best


def _deal(lengths: Sequence[int], count: int) -> Bins:
    """Return ``lengths`` in ``count`` bins without a capacity, as equal as either method makes them."""
    best = _longest_first(lengths, count)
    if len(lengths) * count <= _MOST_WORK:
        other = _differencing(lengths, count)
        if _largest(other, lengths) < _largest(best, lengths):
            best = other
    return best


def _largest(bins: Bins, lengths: Sequence[int]) -> int:
    return max(sum(lengths[index] for index in bin_) for bin_ in bins)


def _longest_first(lengths: Sequence[int], count: int) -> Bins:
    order = sort_descending(lengths)
    bins: Bins = [[index] for index in order[:count]]
    emptiest = [(lengths[index], 1, number) for number, index in enumerate(order[:count])]
    heapq.heapify(emptiest)
    for index in order[count:]:
        total, items, number = emptiest[0]
        bins[number].append(index)
        heapq.heapreplace(emptiest, (total + lengths[index], items + 1, number))
    return bins


def _differencing(lengths: Sequence[int], count: int) -> Bins:
    # A partial solution holds its non-empty bins, fullest first. The two with the largest spreads are merged, the
    # fullest bin of one with the emptiest of the other, until one is left.
    if count == 1:
        return [list(range(len(lengths)))]
    heap: list[tuple[int, int, tuple[_Bin, ...]]] = [
        (-length, index, ((length, index, index),)) for index, length in enumerate(lengths)
    ]
    heapq.heapify(heap)
    following = [-1] * len(lengths)  # a linked list, because lists of items would be copied at each merge
    serial = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heap[0][2]
        # Missing bins are empty ones. The emptiest bins of one solution are merged with the fullest of the other.
        overlap = max(0, len(one) + len(other) - count)
        alone, other_alone = len(one) - overlap, len(other) - overlap
        merged = [*one[:alone], *other[:other_alone]]
        for (total, first, last), (more, next_, end) in zip(one[alone:], reversed(other[other_alone:]), strict=True):
            following[last] = next_
            merged.append((total + more, first, end))
        merged.sort(key=itemgetter(0), reverse=True)
        spread = merged[0][0] - (merged[-1][0] if len(merged) == count else 0)
        # The garbage collector stops visiting tuples of numbers, unlike lists.
        heapq.heapreplace(heap, (-spread, serial, tuple(merged)))
        serial += 1
    bins: Bins = []
    for _, item, _ in heap[0][2]:
        bins.append([])
        while item >= 0:
            bins[-1].append(item)
            item = following[item]
    return bins


def split_to(bins: Bins, lengths: Sequence[int], count: int) -> Bins:
    """Return ``count`` bins by halving the fullest that can be halved; the order within a bin is kept."""
    number = itertools.count()

    def entry(bin_: list[int]) -> tuple[bool, int, int, list[int]]:
        return len(bin_) < 2, -sum(lengths[index] for index in bin_), next(number), bin_

    heap = [entry(bin_) for bin_ in bins]
    heapq.heapify(heap)
    while len(heap) < count:
        bin_ = heapq.heappop(heap)[-1]
        sums = list(itertools.accumulate(lengths[index] for index in bin_))
        cut = min(range(1, len(bin_)), key=lambda at: abs(2 * sums[at - 1] - sums[-1]))
        heapq.heappush(heap, entry(bin_[:cut]))
        heapq.heappush(heap, entry(bin_[cut:]))
    return [bin_ for *_, bin_ in sorted(heap, key=lambda item: item[2])]

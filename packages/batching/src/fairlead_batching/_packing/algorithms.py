# SPDX-License-Identifier: Apache-2.0
"""Packing into the first bin that has room, next-fit, and bins that are as equal as possible.

Lengths are whole numbers up to the capacity. Every function returns bins as lists of indices into ``lengths``.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random

import numpy as np

Bins = list[list[int]]

# Differencing with many bins can merge long lists for every item: beyond this number of items x bins it is not tried.
_MOST_WORK = 1 << 21

# The total length of a bin, and its first and last items. Each item leads to the next one of its bin.
_Bin = tuple[int, int, int]

# The total length of the fullest bin, the first item of each bin, and the next item of each item, -1 after the last.
# Lists of items would take longer to make than the distribution itself.
_Chains = tuple[int, Sequence[int], list[int]]


def _sort_descending(lengths: Sequence[int]) -> list[int]:
    """Return the indices from the longest to the shortest; the sort is stable."""
    order: list[int] = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return order


def concatenative(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack in the given order; a bin is closed when the next sequence does not fit (next-fit)."""
    bins: Bins = []
    room = -1
    for index, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack the longest first, each into the first bin with room: at most 11/9 of the fewest bins, plus 6/9."""
    return _first_fit(lengths, capacity, _sort_descending(lengths))


# Johnson and Garey's variant (1985) needed as many bins for lengths of sequences, in all measurements.
modified_first_fit_decreasing = first_fit_decreasing


def first_fit_shuffle(lengths: Sequence[int], capacity: int, seed: int) -> Bins:
    """Pack in an order shuffled by ``seed``, each into the first bin with room."""
    order = list(range(len(lengths)))
    Random(seed).shuffle(order)
    return _first_fit(lengths, capacity, order)


def _first_fit(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> Bins:
    # Two adjacent bins hold more than one capacity together; otherwise the second would not have been opened.
    most_bins = min(len(lengths), 2 * (sum(lengths) // capacity) + 1)
    # A tournament tree: a node holds the most room below it, so one descent finds the first bin with enough room.
    leaves = 1 << (most_bins - 1).bit_length()
    most = [capacity] * (2 * leaves)
    bins: Bins = []
    ordered = [lengths[index] for index in order]
    ordered.append(-1)
    position = 0
    while (length := ordered[position]) >= 0:
        node = 1
        while node < leaves:
            node += node
            if most[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bin_, room = bins[node - leaves], most[node]
        # Following sequences of the same length go to the same bin while it has room.
        while ordered[position] == length <= room:
            bin_.append(order[position])
            room -= length
            position += 1
        most[node] = room
        while node > 1:
            room, other = most[node], most[node ^ 1]
            node >>= 1
            room = max(room, other)
            if most[node] == room:
                break
            most[node] = room
    return bins


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
    best = split_to(fallback, lengths, high)
    tried = _deal(lengths, high)
    if tried[0] <= find_largest(best, lengths):
        best = _collect(tried)
    while low < high:
        middle = round_up((low + high) // 2)
        if middle >= high:  # no number in between is allowed
            middle = low
        tried = _deal(lengths, middle)
        if tried[0] <= capacity:
            best, high = _collect(tried), middle
        else:
            low = round_up(middle + 1)
    return best


def _deal(lengths: Sequence[int], count: int) -> _Chains:
    """Return ``lengths`` in ``count`` bins without a capacity, as equal as either method makes them."""
    best = _longest_first(lengths, count)
    least = max(-(-sum(lengths) // count), max(lengths))
    if len(lengths) * count <= _MOST_WORK and best[0] > least:
        best = min(best, _differencing(lengths, count), key=itemgetter(0))
    return best


def find_largest(bins: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Return the total length of the fullest bin."""
    return max(sum(map(lengths.__getitem__, bin_)) for bin_ in bins)


def _longest_first(lengths: Sequence[int], count: int) -> _Chains:
    order = _sort_descending(lengths)
    emptiest = list(zip(map(lengths.__getitem__, order), itertools.repeat(1), range(count), strict=False))
    heapq.heapify(emptiest)
    following = [-1] * len(lengths)
    last = order[:count]
    for index in order[count:]:
        total, items, number = emptiest[0]
        following[last[number]] = last[number] = index
        heapq.heapreplace(emptiest, (total + lengths[index], items + 1, number))
    return max(emptiest)[0], order[:count], following


def _differencing(lengths: Sequence[int], count: int) -> _Chains:
    # A partial solution holds its non-empty bins, fullest first. The two with the largest spreads are merged, the
    # fullest bin of one with the emptiest of the other, until one is left.
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
    bins = heap[0][2]
    return bins[0][0], [first for _, first, _ in bins], following


def _collect(chains: _Chains) -> Bins:
    _, starts, following = chains
    bins: Bins = []
    for item in starts:
        bins.append([])
        while item >= 0:
            bins[-1].append(item)
            item = following[item]
    return bins


def split_to(bins: Bins, lengths: Sequence[int], count: int) -> Bins:
    """Return ``count`` bins by halving the fullest that can be halved; the order within a bin is kept."""
    if len(bins) == count:
        return bins
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

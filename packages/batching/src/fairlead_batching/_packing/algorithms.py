# SPDX-License-Identifier: Apache-2.0
"""Packing into the first bin that has room, next-fit, and bins that are as equal as possible.

Lengths are whole numbers up to the capacity, and bins are lists of indices into ``lengths``.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random

import numpy as np
import numpy.typing as npt

Bins = list[list[int]]
Costs = npt.NDArray[np.float64]

# Differencing with many bins can merge long lists for every item: beyond this number of items x bins it is not tried.
_MOST_WORK = 1 << 21
# Nor is it for a fullest bin that no way to fill them can make emptier by more than this factor.
_EVEN = 1.003

# The total length of a bin, and its first and last items. Each item leads to the next one of its bin.
_Bin = tuple[int, int, int]


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

    ``round_up`` returns the next allowed number of bins. First-fit decreasing bounds the number from above.
    """
    order = _sort_descending(lengths)
    descending = [lengths[index] for index in order]
    over_half = sum(2 * length > capacity for length in lengths)
    low = high = round_up(max(-(-sum(lengths) // capacity), over_half, 1))
    largest, best = _deal(descending, low, capacity)
    bins: Bins = []
    if not _is_even(largest, descending, low, capacity):
        fallback = _first_fit(lengths, capacity, order)
        high = round_up(max(len(fallback), low))
        if high > low:
            largest, best = _deal(descending, high, capacity)
        bins = split_to(fallback, lengths, high)
        if largest > find_largest(bins, lengths):
            best = []
    while low < high:
        middle = round_up((low + high) // 2)
        if middle >= high:  # no number in between is allowed
            middle = low
        largest, numbers = _deal(descending, middle, capacity)
        if largest <= capacity:
            best, high = numbers, middle
        else:
            low = round_up(middle + 1)
    if best:
        bins = [[] for _ in range(high)]
        for index, number in zip(order, best, strict=True):
            bins[number].append(index)
    return bins


def _is_even(largest: float, descending: Sequence[int], count: int, capacity: int) -> bool:
    """Return whether the fullest of ``count`` bins fits, and is hardly fuller than in any other way to fill them."""
    return largest <= min(capacity, _EVEN * max(sum(descending) / count, descending[0]))


def _deal(descending: Sequence[int], count: int, capacity: int) -> tuple[float, list[int]]:
    """Return the total length of the fullest of ``count`` bins, which may exceed the capacity, and each item's bin."""
    # Longest-first (Graham 1969), or differencing (Karmarkar and Karp 1982, in its form for many bins) if it is better.
    best = deal_longest_first(descending, count)
    if len(descending) * count <= _MOST_WORK and not _is_even(best[0], descending, count, capacity):
        best = min(best, _differencing(descending, count), key=itemgetter(0))
    return best


def find_largest(bins: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Return the total length of the fullest bin."""
    return max(sum(map(lengths.__getitem__, bin_)) for bin_ in bins)


def deal_longest_first(descending: Sequence[float], count: int) -> tuple[float, list[int]]:
    """Deal each item to the bin that is the emptiest so far; of equal bins to the one with the fewest items."""
    emptiest: list[tuple[float, int, int]] = [(length, 1, number) for number, length in enumerate(descending[:count])]
    heapq.heapify(emptiest)
    numbers = list(range(len(emptiest)))
    for length in descending[count:]:
        total, items, number = emptiest[0]
        numbers.append(number)
        heapq.heapreplace(emptiest, (total + length, items + 1, number))
    return max(emptiest)[0], numbers


def _differencing(lengths: Sequence[int], count: int) -> tuple[int, list[int]]:
    # A partial solution holds its non-empty bins, fullest first. The two with the largest spreads are merged, the
    # fullest bin of one with the emptiest of the other, until one is left.
    heap: list[tuple[int, int, tuple[_Bin, ...]]] = [
        (-length, index, ((length, index, index),)) for index, length in enumerate(lengths)
    ]
    heapq.heapify(heap)
    following = [-1] * len(lengths)  # a linked list, because lists of items would be copied at each merge
    serial = len(heap)
    while len(heap) > 1:
        least, other = heapq.heappop(heap)[2], heap[0][2]
        # Missing bins are empty ones. The emptiest bins of one solution are merged with the fullest of the other.
        overlap = max(0, len(least) + len(other) - count)
        alone, other_alone = len(least) - overlap, len(other) - overlap
        merged = [*least[:alone], *other[:other_alone]]
        for (total, first, last), (more, next_, end) in zip(least[alone:], reversed(other[other_alone:]), strict=True):
            following[last] = next_
            merged.append((total + more, first, end))
        merged.sort(key=itemgetter(0), reverse=True)
        spread = merged[0][0] - (merged[-1][0] if len(merged) == count else 0)
        # The garbage collector stops visiting tuples of numbers, unlike lists.
        heapq.heapreplace(heap, (-spread, serial, tuple(merged)))
        serial += 1
    bins = heap[0][2]
    numbers = [0] * len(lengths)
    for number, (_, item, _) in enumerate(bins):
        while item >= 0:
            numbers[item] = number
            item = following[item]
    return bins[0][0], numbers


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
        cut = min(range(1, len(bin_)), key=lambda place: abs(2 * sums[place - 1] - sums[-1]))
        heapq.heappush(heap, entry(bin_[:cut]))
        heapq.heappush(heap, entry(bin_[cut:]))
    return [bin_ for *_, bin_ in sorted(heap, key=lambda item: item[2])]

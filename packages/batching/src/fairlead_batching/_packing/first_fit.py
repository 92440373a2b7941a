# SPDX-License-Identifier: Apache-2.0
"""Packing into the first bin that has room, and next-fit. Lengths are whole numbers up to the capacity.

Every function returns bins as lists of indices into ``lengths``, in the order in which they were filled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from random import Random

import numpy as np

Bins = list[list[int]]


def sort_descending(lengths: Sequence[int]) -> list[int]:
    """Return the indices from the longest to the shortest; the sort is stable."""
    order: list[int] = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
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
    return _first_fit(lengths, capacity, sort_descending(lengths))


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


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack as first-fit decreasing, but reserve room beside large sequences (Johnson and Garey 1985).

    Large is over 1/2 of the capacity, medium over 1/3, small over 1/6. At most 71/60 of the fewest bins, plus 1.
    """
    left = _Remaining(lengths)
    bins: Bins = []
    room: list[int] = []

    def put(number: int, index: int) -> None:
        left.take(index)
        bins[number].append(index)
        room[number] -= lengths[index]

    # Each large sequence gets a bin, the largest first.
    while (index := left.longest_up_to(capacity)) is not None and 2 * lengths[index] > capacity:
        bins.append([])
        room.append(capacity)
        put(-1, index)
    # Forwards: the longest medium sequence that fits.
    for number in range(len(bins)):
        index = left.longest_up_to(room[number])
        if index is not None and 3 * lengths[index] > capacity:
            put(number, index)
    # Backwards, over bins without one: the shortest small sequence, and the longest small one that then fits.
    for number in reversed(range(len(bins))):
        if len(bins[number]) > 1:
            continue
        pair = left.shortest_over(capacity / 6, count=2)
        if len(pair) < 2 or 3 * lengths[pair[1]] > capacity or lengths[pair[0]] + lengths[pair[1]] > room[number]:
            continue
        put(number, pair[0])
        index = left.longest_up_to(min(room[number], capacity // 3))
        if index is not None:
            put(number, index)
    # Forwards: any sequences that fit, the longest first.
    for number in range(len(bins)):
        while (index := left.longest_up_to(room[number])) is not None:
            put(number, index)
    rest = left.all()
    return bins + [[rest[i] for i in bin_] for bin_ in first_fit_decreasing([lengths[i] for i in rest], capacity)]


class _Remaining:
    """The sequences that are not packed yet, ascending by length. Path compression skips removed positions."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._order = sort_descending(lengths)[::-1]
        self._keys = [lengths[index] for index in self._order]
        self._place = {index: place for place, index in enumerate(self._order)}
        # below[p + 1] leads to one past the last remaining position <= p, above[p] to the first one >= p.
        self._below = list(range(len(lengths) + 1))
        self._above = list(range(len(lengths) + 1))

    def longest_up_to(self, length: int) -> int | None:
        place = _find(self._below, bisect_right(self._keys, length))
        return self._order[place - 1] if place else None

    def shortest_over(self, length: float, count: int) -> list[int]:
        found: list[int] = []
        place = _find(self._above, bisect_right(self._keys, length))
        while len(found) < count and place < len(self._order):
            found.append(self._order[place])
            place = _find(self._above, place + 1)
        return found

    def take(self, index: int) -> None:
        place = self._place[index]
        self._below[place + 1] = place
        self._above[place] = place + 1

    def all(self) -> list[int]:
        return self.shortest_over(-1, count=len(self._order))


def _find(leads_to: list[int], place: int) -> int:
    root = place
    while leads_to[root] != root:
        root = leads_to[root]
    while leads_to[place] != root:
        leads_to[place], place = root, leads_to[place]
    return root

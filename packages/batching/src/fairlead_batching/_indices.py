# SPDX-License-Identifier: Apache-2.0
"""Indices of samples: selections, spans, permutations. They are computed alike for batches here and in a store."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ._args import as_int
from ._leaf import IntArray, to_integers


def check(indices: Iterable[int], size: int) -> IntArray:
    """Return the indices; ValueError if there is no such sample."""
    where = to_integers("indices", indices)
    if where.size and (where.min() < 0 or where.max() >= size):
        wrong = where[(where < 0) | (where >= size)].tolist()
        raise ValueError(f"There are {size} samples, so none at {wrong[:10]}.")
    return where


def check_span(start: int, end: int, size: int) -> None:
    """Refuse a slice that is not within the samples."""
    if not 0 <= start <= end <= size:
        raise ValueError(f"There is no slice from {start} to {end} of {size} samples.")


def invert(indices: Iterable[int], size: int) -> IntArray:
    """Return the inverse of a permutation of all samples; ValueError if it is not one."""
    where = to_integers("indices", indices)
    if not np.array_equal(np.sort(where), np.arange(size)):
        raise ValueError(f"indices must hold each of 0 to {size - 1} once, found {where.size}: {where[:10].tolist()}.")
    return where.argsort()


def shuffle(seed: int, size: int) -> IntArray:
    """Return a random order of all samples that depends on the seed only."""
    return np.random.default_rng(as_int("seed", seed, at_least=0)).permutation(size)

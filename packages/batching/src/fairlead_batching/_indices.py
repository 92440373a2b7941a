# SPDX-License-Identifier: Apache-2.0
"""Indices of samples: selections, spans, permutations. They are computed alike for batches here and in a store."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ._args import as_int
from ._leaves import interop
from ._leaves.operations import BoolArray, IntArray, to_integers


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


def find_real(padding: BoolArray | None, mask: Any, size: int) -> IntArray:
    """Return the positions of the samples that are not padding: by their mask, or if that is None by the record of it.

    Raises:
        ValueError: there is no mask and no record, or the record is of another number of samples.
    """
    if mask is not None:
        values = interop.to_numpy(mask.bool()) if interop.is_tensor(mask) else np.asarray(mask)
        return np.flatnonzero(values.any(axis=tuple(range(1, values.ndim))))
    if padding is None:
        raise ValueError(
            "There is no record of which rows are padding. Pass the padded batch that has the same rows, "
            "drop_padding(like=padded), or drop rows by their mask, drop_padding(mask_key='sample_mask')."
        )
    if len(padding) != size:
        raise ValueError(f"The batch has {size} samples, but the record of padding has {len(padding)}.")
    return np.flatnonzero(~padding)

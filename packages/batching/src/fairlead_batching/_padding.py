# SPDX-License-Identifier: Apache-2.0
"""Dummy rows that are marked as such, and their removal."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _interop, _leaf
from ._checks import IntArray, whole

if TYPE_CHECKING:
    from ._samples import Samples

BoolArray = npt.NDArray[np.bool_]


def padded(batch: Samples[Any], n: int, mask_key: str) -> tuple[dict[str, Any], BoolArray]:
    """The leaves with copies of the last sample up to a multiple of ``n``, and which samples are such copies."""
    n = whole("n", n, at_least=1)
    size = batch.size
    if not size:
        raise ValueError("An empty batch cannot be padded: there is no sample to make dummy rows of.")
    extra = -size % n
    dummy = np.zeros(size + extra, dtype=np.bool_)
    dummy[:size] = False if batch.padding is None else batch.padding
    dummy[size:] = True
    # A copy of a sample is valid input for any model, which zeros are not.
    indices = np.minimum(np.arange(size + extra), size - 1)
    data = {}
    for key, leaf in batch.data.items():
        data[key] = _leaf.take(leaf, indices)
        if isinstance(leaf, list):
            data[key][size:] = [copy.deepcopy(leaf[-1]) for _ in range(extra)]
    if mask_key not in data:
        data[mask_key] = _ones(batch.data, size + extra)
    data[mask_key][size:] = [0] * extra if isinstance(data[mask_key], list) else 0
    return data, dummy


def _ones(leaves: dict[str, Any], size: int) -> Any:
    for leaf in leaves.values():
        if _interop.is_tensor(leaf):
            return _interop.ones(size, like=leaf)
    return np.ones(size, dtype=np.float32)


def real_rows(batch: Samples[Any], like: Samples[Any] | None, mask_key: str | None) -> IntArray:
    """The samples that are not dummy rows."""
    size = batch.size
    if mask_key is not None:
        if mask_key not in batch.data:
            raise ValueError(f"Unknown mask_key {mask_key!r}; the batch has {sorted(batch.data)}.")
        mask = batch.data[mask_key]
        values = _interop.nonzero(mask) if _interop.is_tensor(mask) else np.asarray(mask)
        return np.flatnonzero(values.any(axis=tuple(range(1, values.ndim))))
    record = batch.padding if like is None else like.padding
    if record is None:
        raise ValueError(
            "It is not known which rows are padding: the batch was made anew. Give the padded batch whose rows these "
            "are, drop_padding(like=padded), or drop rows by their mask, drop_padding(mask_key='sample_mask')."
        )
    if len(record) != size:
        raise ValueError(f"The batch has {size} samples, but padding is known of {len(record)}.")
    return np.flatnonzero(~record)

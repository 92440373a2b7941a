# SPDX-License-Identifier: Apache-2.0
"""Dummy rows: adding them, and finding the real rows among them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _interop, _leaf
from ._args import as_int
from ._leaf import BoolArray, IntArray


def pad(
    leaves: Mapping[str, Any], padding: BoolArray | None, n: int, mask_key: str
) -> tuple[dict[str, Any], BoolArray]:
    """Return the leaves with copies of the last sample up to a multiple of ``n``, and which samples are such copies."""
    n = as_int("n", n, at_least=1)
    size = _leaf.count_samples(leaves)
    if not size:
        raise ValueError("An empty batch cannot be padded: it has no sample to copy.")
    extra = -size % n
    dummy = np.ones(size + extra, dtype=np.bool_)
    dummy[:size] = False if padding is None else padding
    # A copy of a sample is valid input for any model; zeros are not.
    indices = np.minimum(np.arange(size + extra), size - 1)
    padded = {key: _leaf.take(leaf, indices) for key, leaf in leaves.items()}
    for key, leaf in leaves.items():
        if isinstance(leaf, list):
            padded[key][size:] = [copy.deepcopy(leaf[-1]) for _ in range(extra)]
    if mask_key not in padded:
        tensor = next(filter(_interop.is_tensor, leaves.values()), None)
        ones = np.ones(size + extra, dtype=np.float32)
        padded[mask_key] = ones if tensor is None else _interop.from_numpy(ones, like=tensor)
    padded[mask_key][size:] = [0] * extra if isinstance(padded[mask_key], list) else 0
    return padded, dummy


def find_real_rows(leaves: Mapping[str, Any], padding: BoolArray | None, mask_key: str | None) -> IntArray:
    """Return the indices of the samples that are not dummy rows, by ``padding`` unless there is a ``mask_key``."""
    size = _leaf.count_samples(leaves)
    if mask_key is not None:
        if mask_key not in leaves:
            raise ValueError(f"Unknown mask_key {mask_key!r}; the batch has {sorted(leaves)}.")
        mask = leaves[mask_key]
        values = _interop.to_numpy(mask.bool()) if _interop.is_tensor(mask) else np.asarray(mask)
        return np.flatnonzero(values.any(axis=tuple(range(1, values.ndim))))
    if padding is None:
        raise ValueError(
            "There is no record of which rows are padding. Pass the padded batch that has the same rows, "
            "drop_padding(like=padded), or drop rows by their mask, drop_padding(mask_key='sample_mask')."
        )
    if len(padding) != size:
        raise ValueError(f"The batch has {size} samples, but the record of padding has {len(padding)}.")
    return np.flatnonzero(~padding)

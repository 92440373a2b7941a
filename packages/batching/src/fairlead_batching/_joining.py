# SPDX-License-Identifier: Apache-2.0
"""Several batches as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _dtypes, _interop, _leaf
from ._padding import BoolArray


def joined(batches: Sequence[Mapping[str, Any]], sizes: Sequence[int], pad_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of all batches, given their numbers of samples; for errors see `from_batches`."""
    _check_keys(batches, sizes)
    keys = dict.fromkeys(key for batch in batches for key in batch)
    if unknown := set(pad_values) - set(keys):
        raise ValueError(f"Unknown keys in pad_value_dict: {sorted(unknown)}; batches have {sorted(keys)}.")
    return {
        key: _concatenated(key, [batch[key] for batch in batches if key in batch], pad_values.get(key, 0))
        for key in keys
    }


def joined_padding(paddings: Sequence[BoolArray | None], sizes: Sequence[int]) -> BoolArray | None:
    """Return which samples of all batches are dummy rows; None if no batch was padded."""
    if all(padding is None for padding in paddings):
        return None
    return np.concatenate([np.zeros(n, np.bool_) if p is None else p for p, n in zip(paddings, sizes, strict=True)])


def _check_keys(batches: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
    first = next((number for number, size in enumerate(sizes) if size), None)
    if first is None:
        return
    expected = set(batches[first])
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        # A batch without samples lacks nothing, whatever keys it has.
        different = set(batch) ^ expected if size else set(batch) - expected
        if different:
            one, other = sorted((first, number))
            raise ValueError(f"Batches {one} and {other} differ in keys: only one of them has {sorted(different)}.")


def _concatenated(key: str, leaves: Sequence[Any], pad_value: Any) -> Any:
    """Return all samples of all leaves; what is shorter along dim 1 is padded on the right.

    Raises:
        TypeError: they are not all lists, all arrays, or all tensors.
        ValueError: they have different numbers of dims, or differ in another dim than the first two; no dtype holds
            the values of all; or their dtype does not hold the pad value.
    """
    kinds = {_leaf.kind(key, leaf) for leaf in leaves}
    if len(kinds) > 1:
        raise TypeError(f"Leaf {key!r} is of several kinds in the batches to join: {sorted(kinds)}.")
    if kinds == {"list"}:
        return [value for leaf in leaves for value in leaf]
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if not all(shapes):
        raise ValueError(f"Leaf {key!r} has no dims, so no samples; its first dim must be the sample.")
    if len({(len(shape), shape[2:]) for shape in shapes}) > 1:
        raise ValueError(f"Leaf {key!r} cannot be joined: only dims 0 and 1 may differ, found shapes {shapes}.")
    arrays = kinds == {"numpy"}
    dtype = _dtypes.common(key, leaves)
    masked = any(isinstance(leaf, np.ma.MaskedArray) for leaf in leaves)
    if len({shape[1:] for shape in shapes}) == 1:
        if masked:
            return np.ma.concatenate(leaves)  # type: ignore[no-untyped-call]
        return np.concatenate(leaves) if arrays else _interop.concatenate(leaves)
    total = (sum(shape[0] for shape in shapes), max(shape[1] for shape in shapes), *shapes[0][2:])
    _dtypes.check_pad_value(key, pad_value, dtype)
    joined: Any = np.full(total, pad_value, dtype) if arrays else _interop.full(total, pad_value, dtype, leaves[0])
    if masked:
        joined = np.ma.array(joined)
    start = 0
    for leaf, shape in zip(leaves, shapes, strict=True):
        joined[start : start + shape[0], : shape[1]] = leaf
        start += shape[0]
    return joined

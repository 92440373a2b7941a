# SPDX-License-Identifier: Apache-2.0
"""One leaf of a batch: a numpy array, a torch tensor or a list, whose first dim is the sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _interop
from ._checks import IntArray


def kind(key: str, leaf: Any) -> str:
    """``"list"``, ``"numpy"`` or ``"torch"``.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(leaf, list):
        return "list"
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if _interop.is_tensor(leaf):
        return "torch"
    raise TypeError(f"Leaf {key!r} must be a list, a numpy array or a torch tensor, found {type(leaf).__name__}.")


def rows(key: str, leaf: Any) -> int:
    """How many samples the leaf has."""
    if kind(key, leaf) == "list":
        return len(leaf)
    if not leaf.ndim:
        raise ValueError(f"Leaf {key!r} has no dims, so no samples; its first dim must be the sample.")
    return int(leaf.shape[0])


def take(leaf: Any, indices: IntArray) -> Any:
    """The samples at ``indices``, copied in one gather."""
    if isinstance(leaf, list):
        return list(map(leaf.__getitem__, indices.tolist()))
    if isinstance(leaf, np.ndarray):
        return leaf.take(indices, axis=0)
    return _interop.take(leaf, indices)


def repeat(leaf: Any, times: int) -> Any:
    """Each sample ``times`` times, one after the other. What lists hold is copied, so that no two share an object."""
    if isinstance(leaf, list):
        return [copy.deepcopy(value) if number else value for value in leaf for number in range(times)]
    return take(leaf, np.repeat(np.arange(len(leaf)), times))


def truncate(leaf: Any, dim: int, length: int) -> Any:
    """A view of at most ``length`` along ``dim``; unchanged where it is a list or has no such dim."""
    if isinstance(leaf, list) or leaf.ndim <= dim:
        return leaf
    return leaf[(slice(None),) * dim + (slice(length),)]


def concatenate(key: str, leaves: Sequence[Any], pad_value: Any) -> Any:
    """All samples of all leaves; what is shorter along dim 1 is padded on the right.

    Raises:
        TypeError: they are not all lists, all arrays, or all tensors.
        ValueError: they have different numbers of dims, or differ in another dim than the first two.
    """
    kinds = {kind(key, leaf) for leaf in leaves}
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
    if len({shape[1:] for shape in shapes}) == 1:
        return np.concatenate(leaves) if arrays else _interop.concatenate(leaves)
    total = (sum(shape[0] for shape in shapes), max(shape[1] for shape in shapes), *shapes[0][2:])
    dtype = np.result_type(*leaves) if arrays else _interop.common_dtype(leaves)
    bounds = _bounds(dtype)
    if bounds is not None and not (bounds[0] <= pad_value <= bounds[1] and pad_value == int(pad_value)):
        raise ValueError(f"Leaf {key!r} cannot be padded with {pad_value!r}: its dtype is {dtype}.")
    joined: Any = np.full(total, pad_value, dtype) if arrays else _interop.full(total, pad_value, dtype, leaves[0])
    start = 0
    for leaf, shape in zip(leaves, shapes, strict=True):
        joined[start : start + shape[0], : shape[1]] = leaf
        start += shape[0]
    return joined


def _bounds(dtype: Any) -> tuple[int, int] | None:
    """The least and the largest of an integer dtype, of which bool counts as one; None of others."""
    if not isinstance(dtype, np.dtype):
        return _interop.bounds(dtype)
    if dtype.kind == "b":
        return 0, 1
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if dtype.kind in "iu" else None


def describe(leaf: Any) -> str:
    """In a few characters, whatever it is."""
    if isinstance(leaf, list):
        return f"list[{len(leaf)}]"
    if isinstance(leaf, np.ndarray) or _interop.is_tensor(leaf):
        module = "numpy" if isinstance(leaf, np.ndarray) else "torch"
        return f"{module} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__


def signature(leaf: Any) -> tuple[str, str, tuple[int, ...]]:
    """What all ranks have to agree on, but for sizes: kind, dtype and shape."""
    if isinstance(leaf, np.ndarray) or _interop.is_tensor(leaf):
        return type(leaf).__name__, str(leaf.dtype), tuple(leaf.shape)
    return type(leaf).__name__, "", ()

# SPDX-License-Identifier: Apache-2.0
"""One leaf of a batch: a numpy array, a torch tensor, a list or a `RaggedLeaf`, whose first dim is the sample."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import interop
from .interop import IntArray
from .ragged import RaggedLeaf


def kind(key: str, leaf: Any) -> str:
    """Return ``"list"``, ``"numpy"``, ``"torch"`` or ``"RaggedLeaf"``; TypeError for any other leaf."""
    interop.check_kind(key, leaf)
    if isinstance(leaf, RaggedLeaf):
        return "RaggedLeaf"
    if isinstance(leaf, list):
        return "list"
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if interop.is_tensor(leaf):
        return "torch"
    raise TypeError(
        f"Leaf {key!r} must be a list, a numpy array or a torch tensor, found {type(leaf).__name__}. A value that is "
        f"not per sample belongs into batch.meta."
    )


def count_samples(leaves: Mapping[str, Any]) -> int:
    """Return the number of samples that all leaves have; 0 without leaves."""
    sizes = {key: _rows(key, leaf) for key, leaf in leaves.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"Leaves have different numbers of samples: {sizes}. "
            f"A value that is not per sample belongs into batch.meta."
        )
    return next(iter(sizes.values()), 0)


def _rows(key: str, leaf: Any) -> int:
    if kind(key, leaf) in ("numpy", "torch") and not leaf.ndim:
        raise ValueError(f"Leaf {key!r} has no dims, so no samples; its first dim must be the sample.")
    return len(leaf)


def take(leaf: Any, indices: IntArray) -> Any:
    """Copy the samples at ``indices`` in one gather."""
    if isinstance(leaf, list):
        return list(map(leaf.__getitem__, indices.tolist()))
    if isinstance(leaf, np.ndarray):
        return leaf.take(indices, axis=0)
    return leaf.take(indices) if isinstance(leaf, RaggedLeaf) else interop.take(leaf, indices)


def cut(leaf: Any, start: int, end: int) -> Any:
    """Return the samples from ``start`` up to ``end``, as a view if the leaf is an array or a tensor."""
    return take(leaf, np.arange(start, end)) if isinstance(leaf, RaggedLeaf) else leaf[start:end]


def move(leaf: Any, device: Any) -> Any:
    """Return a tensor or ragged leaf on the device, any other leaf unchanged."""
    return leaf.to(device) if interop.is_tensor(leaf) or isinstance(leaf, RaggedLeaf) else leaf


def pad(leaf: Any, count: int) -> Any:
    """Return a leaf with ``count`` dummy samples after its own: copies of the last one, which are valid input."""
    size = len(leaf)
    if isinstance(leaf, list):
        return [*leaf, *repeat(leaf, np.full(count, size - 1))]
    return take(leaf, np.minimum(np.arange(size + count), size - 1))


def repeat(leaf: Any, indices: IntArray) -> Any:
    """Copy the samples at ``indices``, and the objects in lists, so that a change of one sample changes no other."""
    taken = take(leaf, indices)
    return list(map(copy.deepcopy, taken)) if isinstance(leaf, list) else taken


def truncate(leaf: Any, dim: int, length: int) -> Any:
    """Return a view of at most ``length`` along ``dim``; a list, or a leaf without that dim, is returned unchanged."""
    if isinstance(leaf, (list, RaggedLeaf)) or leaf.ndim <= dim:
        return leaf
    return leaf[(slice(None),) * dim + (slice(length),)]


def to_integers(name: str, values: Iterable[int] | Any) -> IntArray:
    """Return a list, array or tensor of whole numbers as an int64 array of one dim."""
    if interop.is_tensor(values):
        if not interop.has_numpy_dtype(values):
            raise ValueError(f"{name!r} must be whole numbers, found {interop.dtype_name(values)}.")
        values = interop.to_numpy(values)
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.ndim != 1:
        raise ValueError(f"{name!r} must have one dim, found shape {array.shape}.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name!r} must be whole numbers, found {array.dtype}.")
    if array.dtype == np.uint64 and (largest := array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name!r} must fit into int64, found {largest}.")
    return array.astype(np.int64, copy=False)


def describe(leaf: Any) -> str:
    """Return a short description of a leaf of any kind."""
    if isinstance(leaf, list):
        return f"list[{len(leaf)}]"
    if isinstance(leaf, np.ndarray):
        return f"numpy {leaf.dtype}{list(leaf.shape)}"
    if interop.is_tensor(leaf):
        return f"torch {interop.dtype_name(leaf)}{list(leaf.shape)}"
    if isinstance(leaf, RaggedLeaf):
        return f"RaggedLeaf[{len(leaf)}, {leaf.nbytes:,} bytes]"
    return type(leaf).__name__

# SPDX-License-Identifier: Apache-2.0
"""One leaf of a batch: a numpy array, a torch tensor or a list, whose first dim is the sample."""

from __future__ import annotations

import copy
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
    return len(leaf) if isinstance(leaf, np.ndarray) else _interop.rows(leaf)


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


def describe(leaf: Any) -> str:
    """In a few characters, whatever it is."""
    if isinstance(leaf, list):
        return f"list[{len(leaf)}]"
    if isinstance(leaf, np.ndarray) or _interop.is_tensor(leaf):
        module = "numpy" if isinstance(leaf, np.ndarray) else "torch"
        shape = list(leaf.shape) if module == "numpy" else _interop.known_shape(leaf)
        return f"{module} {str(leaf.dtype).removeprefix('torch.')}{shape}"
    return type(leaf).__name__


def signature(leaf: Any) -> tuple[str, str, str, tuple[int, ...]]:
    """Return what all ranks have to agree on, but for sizes: kind, dtype, device and shape."""
    if isinstance(leaf, np.ndarray):
        return type(leaf).__name__, str(leaf.dtype), "", tuple(leaf.shape)
    if _interop.is_tensor(leaf):
        return type(leaf).__name__, str(leaf.dtype), leaf.device.type, tuple(leaf.shape)
    return type(leaf).__name__, "", "", ()

# SPDX-License-Identifier: Apache-2.0
"""The pieces of sharded data: their numbering by coordinates, and the flat list made from nested data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._layout import IntArray, read_only


def piece_index(shape: Sequence[int], dims: Sequence[int]) -> IntArray:
    """Return, for every position in row-major order, the row-major index of its coordinate along ``dims``.

    >>> piece_index((2, 3), [1]).tolist(), piece_index((2, 3), [1, 0]).tolist()
    ([0, 1, 2, 0, 1, 2], [0, 2, 4, 1, 3, 5])
    """
    index = np.zeros((1,) * len(shape), dtype=np.int64)
    for dim in dims:
        coordinate = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        index = index * shape[dim] + coordinate
    return read_only(np.broadcast_to(index, shape).ravel())


def flatten_pieces(nested: Any, axes: Sequence[str], shape: Sequence[int]) -> list[Any]:
    """Return the pieces of ``nested``, which has one level of the given size for each axis, as a flat list."""
    level = [nested]
    for depth, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        for number, value in enumerate(level):
            if (length := _length(value)) != size:
                path = "".join(f"[{i}]" for i in np.unravel_index(number, shape[:depth]))
                where = f"at depth {depth}, axis {axis!r} (pieces{path})"
                if length is None:
                    raise TypeError(f"Expected a sequence of {size} pieces {where}, found a {type(value).__name__}.")
                raise ValueError(f"Wrong number of pieces {where}: expected {size}, found {length}.")
        level = [value[i] for value in level for i in range(size)]
    return level


def _length(value: Any) -> int | None:
    """Return how many pieces ``value`` holds; None if it is not a sequence."""
    # An object with keys is a mapping or a table: an index would mean a key or a column, not a position.
    if isinstance(value, (str, bytes, bytearray)) or hasattr(value, "keys"):
        return None
    try:
        return len(value) if hasattr(value, "__getitem__") else None
    except TypeError:  # an array or tensor without dims
        return None

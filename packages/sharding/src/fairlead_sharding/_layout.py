# SPDX-License-Identifier: Apache-2.0
"""From whatever the caller calls a layout to a validated array of distinct ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_LARGEST = int(np.iinfo(np.int64).max)
_MOST = 1 << 26  # ranks of a layout that is given as a shape: a few bytes do not make a process run out of memory
_NOT_INTEGERS = "Layout must contain only integer rank IDs"


def as_layout(layout: object) -> IntArray:
    """``layout`` as a read-only, C-contiguous int64 array of distinct, non-negative ranks.

    The array is always a copy. What int64 cannot represent exactly is refused with a `ValueError`.

    >>> as_layout([[0.0, 1.0], [2.0, 3.0]])
    array([[0, 1],
           [2, 3]])
    """
    array = _as_array(layout)
    if array.size == 0:
        raise ValueError(f"Layout is empty (shape {array.shape}), but a sharding needs at least one rank.")
    ranks = _as_int64(array)
    if ranks.ndim == 0:
        raise ValueError(f"Layout has no dimensions: put the single rank {ranks} into a list.")
    if (smallest := ranks.min()) < 0:
        raise ValueError(f"Layout must not contain negative rank IDs, got {smallest}.")
    _check_distinct(ranks)
    ranks.flags.writeable = False
    return ranks


def counting(shape: tuple[int, ...], start: int) -> IntArray:
    """The layout of ``shape`` whose ranks count up from ``start``, the last axis fastest."""
    last = start + math.prod(shape) - 1
    if last > _LARGEST:
        raise ValueError(_beyond(last))
    if (ranks := math.prod(shape)) > _MOST:
        raise ValueError(f"A sharding has at most {_MOST} ranks, but shape {shape} has {ranks}.")
    return np.arange(start, last + 1, dtype=np.int64).reshape(shape)


def is_counting(ranks: IntArray) -> bool:
    """Whether ``ranks``, in row-major order, count up by one."""
    flat = ranks.ravel()
    # The first test alone settles most other layouts. Ranks are not negative: no difference overflows.
    return bool(flat[-1] - flat[0] == flat.size - 1 and (flat[1:] - flat[:-1] == 1).all())


def _as_array(layout: object) -> npt.NDArray[Any]:
    try:
        if hasattr(layout, "__array__"):  # numpy arrays, and whatever converts itself to one
            return np.asarray(layout)
        np.array(layout)  # raises on ragged input, which an array of objects would swallow
        # Left to itself numpy turns [True, 2] into integers and [2**53 + 1, 0.5] into floats; as objects,
        # every rank keeps the type it came with.
        return np.array(layout, dtype=object)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"Could not create NumPy array from layout: {error}") from error


def _as_int64(array: npt.NDArray[Any]) -> IntArray:
    kind = array.dtype.kind
    if kind == "O":
        return np.array([_as_rank(value) for value in array.flat], dtype=np.int64).reshape(array.shape)
    if kind == "f":
        # The widest float there is: it holds every int64, so that the comparisons are exact.
        wide = array.astype(np.longdouble)
        whole = np.isfinite(wide) & (np.trunc(wide) == wide)
        if not whole.all():
            raise ValueError(f"{_NOT_INTEGERS}, got {array[~whole][0]}.")
        too_large = array[np.abs(wide) >= 2.0**63]
    elif kind in "iu":
        too_large = array[array > _LARGEST]
    else:
        raise ValueError(f"{_NOT_INTEGERS}, got an array of {array.dtype}.")
    if too_large.size:
        raise ValueError(_beyond(too_large[0]))
    return np.array(array, dtype=np.int64, order="C")


def _as_rank(value: object) -> int:
    whole = value.is_integer() if isinstance(value, (float, np.floating)) else isinstance(value, (int, np.integer))
    if not whole or isinstance(value, bool):
        raise ValueError(f"{_NOT_INTEGERS}, got {value!r}.")
    rank = int(value)  # type: ignore[call-overload]
    if abs(rank) > _LARGEST:
        raise ValueError(_beyond(value))
    return int(rank)


def _beyond(rank: object) -> str:
    return f"Rank {rank} is beyond int64, whose largest value is {_LARGEST}."


def _check_distinct(ranks: IntArray) -> None:
    if is_counting(ranks):
        return
    ordered = np.sort(ranks, axis=None)
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if again.size:
        shown = ", ".join(map(str, again[:8])) + (", ..." if again.size > 8 else "")
        raise ValueError(f"Duplicate ranks found in layout: {shown}. Each rank must appear exactly once.")

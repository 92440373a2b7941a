# SPDX-License-Identifier: Apache-2.0
"""What several modules ask of their arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _interop

IntArray = npt.NDArray[np.int64]


def whole(name: str, value: Any, *, at_least: int) -> int:
    """``value`` as an int; anything that is no whole number, or less than ``at_least``, is misuse."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}.")
    return number


def made_whole(frozen: Any, *names: str) -> None:
    """Makes ints, 1 or more, of fields of a frozen dataclass: a number of few bits would overflow when counted with."""
    for name in names:
        object.__setattr__(frozen, name, whole(name, getattr(frozen, name), at_least=1))


def whole_numbers(name: str, values: Iterable[int] | Any) -> IntArray:
    """A list, array or tensor of whole numbers as an int64 array of one dim."""
    if _interop.is_tensor(values):
        if not _interop.has_numpy_dtype(values):
            raise ValueError(f"{name!r} must be whole numbers, found {_interop.dtype_name(values)}.")
        values = _interop.to_numpy(values)
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

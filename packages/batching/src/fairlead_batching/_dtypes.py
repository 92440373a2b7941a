# SPDX-License-Identifier: Apache-2.0
"""Which dtype holds the values of several leaves, and whether it holds a pad value. Nothing is changed silently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _interop

_NUMBERS = "biufc"


def common(key: str, leaves: Sequence[Any]) -> Any:
    """Return the dtype of all leaves together.

    Raises:
        ValueError: there is none, or a whole number of some leaf would become another number in it.
    """
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
    if len(dtypes) == 1:
        return dtypes[0]
    if isinstance(dtypes[0], np.dtype) and len({_family(dtype) for dtype in dtypes} - {"O"}) > 1:
        raise ValueError(f"Leaf {key!r} cannot be joined: found dtypes {[str(dtype) for dtype in dtypes]}.")
    try:
        dtype = np.result_type(*dtypes) if isinstance(dtypes[0], np.dtype) else _interop.common_dtype(dtypes)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"Leaf {key!r} cannot be joined: {error}. Convert it to one dtype first.") from error
    for leaf in leaves:
        if leaf.dtype != dtype and (lost := _lost(leaf, dtype)) is not None:
            raise ValueError(
                f"Leaf {key!r} cannot be joined: {dtype}, the dtype of {[str(dtype) for dtype in dtypes]} together, "
                f"does not hold {lost} of a leaf of {leaf.dtype}. Convert it to one dtype first."
            )
    return dtype


def _family(dtype: np.dtype[Any]) -> str:
    # Dtypes of other libraries, such as ml_dtypes.bfloat16, are numbers that numpy calls void.
    return "number" if dtype.kind in _NUMBERS or dtype.isbuiltin == 2 else dtype.kind


def _lost(leaf: Any, dtype: Any) -> int | None:
    """Return a whole number of the leaf that the dtype does not hold, if there is one."""
    if isinstance(dtype, np.dtype):
        if leaf.dtype.kind not in "iu" or dtype.kind not in "fc":
            return None
        values = np.asarray(leaf)
        with np.errstate(over="ignore"):
            held = values.astype(dtype).real
    else:
        both = _interop.integers(leaf, dtype)
        if both is None:
            return None
        values, held = both
    limit = float(int(np.iinfo(values.dtype).max) + 1)
    with np.errstate(invalid="ignore"):
        # Converting what is beyond the limits back would give any number.
        lost = (held >= limit) | (held < -limit) | (held.astype(values.dtype) != values)
    return int(values[lost][0]) if lost.any() else None


def check_pad_value(key: str, value: Any, dtype: Any) -> None:
    """Check that a leaf of a dtype can be padded with a value.

    Raises:
        ValueError: it cannot, or not without changing the value.
    """
    if not (_array_holds(value, dtype) if isinstance(dtype, np.dtype) else _tensor_holds(value, dtype)):
        raise ValueError(
            f"Leaf {key!r} cannot be padded with {value!r}: its dtype is {dtype}. "
            f"Give pad_value_dict[{key!r}] a value that this dtype holds."
        )


def _array_holds(value: Any, dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "iu":
        return _is_whole(value, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if dtype.kind == "b":
        return _is_whole(value, 0, 1)
    if dtype.kind in "fc":
        parts = _parts(value, dtype.kind)
        most = float(np.finfo(dtype).max)
        return parts is not None and all(not math.isfinite(part) or -most <= part <= most for part in parts)
    if dtype.kind == "O" or dtype.isbuiltin == 2:
        return True
    given = np.asarray(value).dtype
    return (given.kind == dtype.kind or given.kind + dtype.kind == "UT") and np.can_cast(given, dtype, "safe")


def _tensor_holds(value: Any, dtype: Any) -> bool:
    limits = _interop.limits(dtype)
    if limits is None:
        return False
    kind, least, most = limits
    if kind in "bi":
        return _is_whole(value, least, most)
    parts = _parts(value, kind)
    return parts is not None and all(
        least <= part <= most if math.isfinite(part) else kind == "c" or _interop.keeps(part, dtype) for part in parts
    )


def _is_whole(value: Any, least: float, most: float) -> bool:
    try:
        return bool(least <= value <= most and value == int(value))
    except (TypeError, ValueError):  # None, a string, an array
        return False


def _parts(value: Any, kind: str) -> list[float] | None:
    """Return a number as a float, for a complex dtype as two; None if it is none."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        if kind == "f":
            return None if isinstance(value, (complex, np.complexfloating)) else [float(value)]
        return [complex(value).real, complex(value).imag]
    except (TypeError, ValueError, OverflowError):
        return None

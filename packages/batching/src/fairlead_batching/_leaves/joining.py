# SPDX-License-Identifier: Apache-2.0
"""Several batches as one: the padding and the concatenation of each leaf. No value changes silently."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import interop, operations
from .interop import BoolArray
from .ragged import RaggedLeaf


def join(batches: Sequence[Mapping[str, Any]], sizes: Sequence[int], pad_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of all batches, given their numbers of samples; for errors see `from_batches`."""
    check_keys(batches, sizes)
    keys = dict.fromkeys(key for batch in batches for key in batch)
    if unknown := set(pad_values) - set(keys):
        raise ValueError(f"Unknown keys in pad_value_dict: {sorted(unknown)}; batches have {sorted(keys)}.")
    return {
        key: _concatenate(key, [batch[key] for batch in batches if key in batch], pad_values.get(key, 0))
        for key in keys
    }


def join_padding(paddings: Sequence[BoolArray | None], sizes: Sequence[int]) -> BoolArray | None:
    """Return which samples of all batches are dummy rows; None if no batch was padded."""
    if all(padding is None for padding in paddings):
        return None
    return np.concatenate([np.zeros(n, np.bool_) if p is None else p for p, n in zip(paddings, sizes, strict=True)])


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that are not per sample, of all batches."""
    first: dict[str, tuple[int, Any]] = {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            earlier, known = first.setdefault(key, (number, value))
            if not interop.is_same(known, value):
                raise ValueError(
                    f"Batches {earlier} and {number} have different meta[{key!r}]: {known!r:.100} and "
                    f"{value!r:.100}. Set it to one value, or delete it, before joining."
                )
    return {key: value for key, (_, value) in first.items()}


def check_keys(batches: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
    """Refuse batches with different keys; one without samples may lack any key."""
    first = next((number for number, size in enumerate(sizes) if size), None)
    if first is None:
        return
    expected = set(batches[first])
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        different = set(batch) ^ expected if size else set(batch) - expected
        if different:
            low, other = sorted((first, number))
            raise ValueError(f"Batches {low} and {other} differ in keys: only one of them has {sorted(different)}.")


def _concatenate(key: str, leaves: Sequence[Any], pad_value: Any) -> Any:
    """Return all samples of all leaves, padded on the right where a leaf is shorter along dim 1."""
    kinds = {operations.kind(key, leaf) for leaf in leaves}
    if len(kinds) > 1:
        raise TypeError(f"Leaf {key!r} is of several kinds in the batches to join: {sorted(kinds)}.")
    if kinds == {"list"}:
        return [value for leaf in leaves for value in leaf]
    if kinds == {"RaggedLeaf"}:
        return RaggedLeaf.concat(leaves)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if len({(len(shape), shape[2:]) for shape in shapes}) > 1:
        raise ValueError(f"Leaf {key!r} cannot be joined: only dims 0 and 1 may differ, found shapes {shapes}.")
    arrays = kinds == {"numpy"}
    dtype = _common_dtype(key, leaves)
    if len({shape[1:] for shape in shapes}) == 1:
        return np.concatenate(leaves) if arrays else interop.require_torch().cat(leaves)
    total = (sum(shape[0] for shape in shapes), max(shape[1] for shape in shapes), *shapes[0][2:])
    joined = _fill(key, total, pad_value, dtype, leaves[0])
    start = 0
    for leaf, shape in zip(leaves, shapes, strict=True):
        joined[start : start + shape[0], : shape[1]] = leaf
        start += shape[0]
    return joined


def _common_dtype(key: str, leaves: Sequence[Any]) -> Any:
    """Return the dtype of all leaves, for strings the longest; ValueError if they differ."""
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
    if len(dtypes) == 1:
        return dtypes[0]
    if {getattr(dtype, "kind", "") for dtype in dtypes} in ({"U"}, {"S"}):
        return np.result_type(*dtypes)
    names = [str(dtype) for dtype in dtypes]
    raise ValueError(f"Leaf {key!r} cannot be joined: found dtypes {names}. Convert it to one dtype first.")


def _fill(key: str, shape: Sequence[int], value: Any, dtype: Any, like: Any) -> Any:
    """Return an array or tensor full of a value to pad with; ValueError if the dtype does not hold it."""
    if not _is_held(value, dtype, like):
        raise ValueError(
            f"Leaf {key!r} cannot be padded with {value!r}: its dtype is {dtype}. "
            f"Give pad_value_dict[{key!r}] a value that this dtype holds."
        )
    return interop.full(shape, value, dtype, like)


def append(key: str, leaf: Any, value: Any) -> Any:
    """Return an array or tensor with one more row, which is full of ``value``."""
    return _concatenate(key, [leaf, _fill(key, (1, *leaf.shape[1:]), value, leaf.dtype, leaf)], value)


def _is_held(value: Any, dtype: Any, like: Any) -> bool:
    """Return whether an array or tensor of the dtype holds the value, but for rounding within its range."""
    of_numpy = isinstance(dtype, np.dtype)
    if of_numpy and dtype.kind not in "biufc":
        given = np.asarray(value).dtype
        alike = given.kind == dtype.kind or given.kind + dtype.kind == "UT"
        return dtype.kind == "O" or dtype.isbuiltin == 2 or (alike and np.can_cast(given, dtype, "safe"))
    # Comparisons with a numpy scalar are in its own dtype, which may not hold the other value.
    number = value.item() if hasattr(value, "item") else value
    try:
        with np.errstate(over="ignore"):
            (stored,) = interop.full((1,), number, dtype, like).tolist()
        if stored == number or (stored != stored and number != number):
            return True
        limits: Any = np.finfo(dtype) if of_numpy else interop.require_torch().finfo(dtype)
        size = abs(number) if isinstance(stored, complex) else number
        return bool(float(limits.min) <= size <= float(limits.max))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # The library refuses the value, or the dtype is one of whole numbers, which have no limits of floats.
        return False

# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of flattening, splitting and selecting, on a layout and its names.

Each function returns the new layout and names. None looks at a rank: distinct ranks stay distinct.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ._axes import as_int, as_names, find, find_all
from ._layout import IntArray

Named = tuple[IntArray, tuple[str, ...]]


def flatten(layout: IntArray, names: Sequence[str], into: str, axes: Sequence[str]) -> Named:
    """Merge ``axes``, row-major in the order given, into one axis where the outermost of them stood."""
    merged = find_all(names, axes)
    before = range(min(merged))
    after = [dim for dim in range(min(merged), layout.ndim) if dim not in merged]
    new_names = as_names([*(names[dim] for dim in before), into, *(names[dim] for dim in after)])
    shape = [*(layout.shape[dim] for dim in before), -1, *(layout.shape[dim] for dim in after)]
    return layout.transpose(*before, *merged, *after).reshape(shape), new_names


def split(layout: IntArray, names: Sequence[str], axis: str, sizes: Mapping[str, int]) -> Named:
    """Put several axes, row-major, in the place of ``axis``; one size may be -1, the rest."""
    dim = find(names, axis)
    found = layout.shape[dim]
    if not sizes:
        raise ValueError(f"Splitting axis {axis!r} needs at least one new axis and its size.")
    what = "The size of axis {!r} (or -1 for what remains)"
    given = [size if size == -1 else as_int(size, what.format(name), 1) for name, size in sizes.items()]
    if given.count(-1) > 1:
        raise ValueError(f"Only one size may be -1 when splitting axis {axis!r}, got {dict(sizes)}.")
    remaining = found // math.prod(size for size in given if size != -1)
    new_sizes = [remaining if size == -1 else size for size in given]
    if math.prod(new_sizes) != found:
        raise ValueError(f"Axis {axis!r} of size {found} cannot be split into {dict(sizes)}.")
    new_names = as_names([*names[:dim], *sizes, *names[dim + 1 :]])
    return layout.reshape(*layout.shape[:dim], *new_sizes, *layout.shape[dim + 1 :]), new_names


def select(layout: IntArray, names: Sequence[str], coords: Mapping[str, int | slice]) -> Named:
    """numpy's basic indexing by axis name: an integer drops its axis, a slice keeps it."""
    index: list[int | slice] = [slice(None)] * layout.ndim
    for dim, (axis, wanted) in zip(find_all(names, coords), coords.items(), strict=True):
        size = layout.shape[dim]
        if isinstance(wanted, slice):
            _check_slice(wanted, axis, size)
        else:
            wanted = as_int(wanted, f"The coordinate along axis {axis!r}")
            if not -size <= wanted < size:
                raise outside(axis, wanted, size)
        index[dim] = wanted
    kept = tuple(name for name, wanted in zip(names, index, strict=True) if isinstance(wanted, slice))
    return layout[tuple(index)], kept


def outside(axis: str, coordinate: int, size: int) -> IndexError:
    return IndexError(f"Coordinate {coordinate} is outside axis {axis!r} of size {size}.")


def _check_slice(wanted: slice, axis: str, size: int) -> None:
    try:
        selected = range(*wanted.indices(size))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wanted} cannot be applied to axis {axis!r}: {error}.") from error
    if not selected:
        raise ValueError(f"{wanted} selects nothing of axis {axis!r} of size {size}; a sharding needs a rank.")

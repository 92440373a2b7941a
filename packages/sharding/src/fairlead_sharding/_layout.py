# SPDX-License-Identifier: Apache-2.0
"""The array of ranks and its axes, as pure functions: validation, lookup, indexing, numbering, text."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_LARGEST = int(np.iinfo(np.int64).max)
# The most ranks of a layout that is given as a shape: a short input must not exhaust the memory of the process.
_MOST = 1 << 26
_NOT_INTEGERS = "Layout must contain only integer rank IDs"
_MAX_LINES = 16  # of a grid of ranks in text


def as_names(names: object) -> tuple[str, ...]:
    """Return ``names`` as a tuple of distinct, non-empty axis names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"Axis names must be a sequence of strings, got {names!r}.")
    checked = tuple(names)
    for position, name in enumerate(checked):
        if not isinstance(name, str) or not name:
            raise ValueError(f"Axis names must be non-empty strings, got {name!r} in {list(checked)}.")
        if name in checked[:position]:
            raise ValueError(f"Duplicate axis name: {name!r} in {list(checked)}.")
    return checked


def as_axes(axes: str | Iterable[str]) -> tuple[str, ...]:
    """Return one or several axis names as a tuple. (Iterating over a single name would yield its letters.)

    >>> as_axes("dp"), as_axes(["dp", "tp"])
    (('dp',), ('dp', 'tp'))
    """
    if not isinstance(axes, Iterable):
        raise ValueError(f"Axes must be a name or several, got {axes!r}.")
    return (axes,) if isinstance(axes, str) else tuple(axes)


def find_axis(names: Sequence[str], axis: object) -> int:
    """Return the dimension that ``axis`` names."""
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    raise ValueError(f"Invalid axis name: {axis!r}. Valid names are: {list(names)}")


def find_axes(names: Sequence[str], axes: Iterable[object]) -> tuple[int, ...]:
    """Return the dimensions that ``axes`` name, in the order given; each may be named once."""
    dims = tuple(find_axis(names, axis) for axis in axes)
    if len(set(dims)) != len(dims):
        raise ValueError(f"An axis is named twice: {[names[dim] for dim in dims]}.")
    return dims


def as_int(value: object, what: str, least: int | None = None) -> int:
    """Return ``value`` as an int if it is an integer of any library; booleans and floats are refused."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{what} must be an integer, got {value!r}.")
    if least is not None and number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}.")
    return number


def as_coords(names: Sequence[str], coords: Mapping[str, object]) -> dict[int, int]:
    """Return ``{axis: coordinate}`` as ``{dimension: coordinate}``; every axis is checked before any coordinate."""
    dims = find_axes(names, coords)
    values = [as_int(value, f"The coordinate along axis {axis!r}") for axis, value in coords.items()]
    return dict(zip(dims, values, strict=True))


def as_layout(layout: object) -> IntArray:
    """Return ``layout`` as a read-only, C-contiguous int64 array of distinct, non-negative ranks.

    The array is always a copy. A value that int64 cannot represent exactly raises `ValueError`.

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
    return read_only(ranks)


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def make_layout(shape: tuple[int, ...], start: int) -> IntArray:
    """Return the layout of ``shape`` whose ranks count up from ``start``, the last axis fastest."""
    last = start + math.prod(shape) - 1
    if last > _LARGEST:
        raise _overflow(last)
    if (ranks := math.prod(shape)) > _MOST:
        raise ValueError(f"A sharding has at most {_MOST} ranks, but shape {shape} has {ranks}.")
    return np.arange(start, last + 1, dtype=np.int64).reshape(shape)


def is_counting(ranks: IntArray) -> bool:
    """Return whether ``ranks``, in row-major order, count up by one."""
    flat = ranks.ravel()
    # The first comparison rules out most other layouts. Ranks are not negative, so no difference overflows.
    return bool(flat[-1] - flat[0] == flat.size - 1 and (flat[1:] - flat[:-1] == 1).all())


def _as_array(layout: object) -> npt.NDArray[Any]:
    try:
        if hasattr(layout, "__array__"):  # numpy arrays, and objects that convert themselves to one
            return np.asarray(layout)
        np.array(layout)  # raises on ragged input, which an array of objects would accept
        # By default numpy turns [True, 2] into integers and [2**53 + 1, 0.5] into floats. In an array of objects
        # every rank keeps its own type.
        return np.array(layout, dtype=object)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"Could not create NumPy array from layout: {error}") from error


def _as_int64(array: npt.NDArray[Any]) -> IntArray:
    if array.dtype.kind not in "iufO":
        raise ValueError(f"{_NOT_INTEGERS}, got an array of {array.dtype}.")
    if array.dtype.kind in "iu" and array.max() <= _LARGEST:
        return np.array(array, dtype=np.int64, order="C")
    return np.array([_as_rank(value) for value in array.ravel().tolist()], dtype=np.int64).reshape(array.shape)


def _as_rank(value: object) -> int:
    whole = value.is_integer() if isinstance(value, (float, np.floating)) else isinstance(value, (int, np.integer))
    if not whole or isinstance(value, bool):
        raise ValueError(f"{_NOT_INTEGERS}, got {value!r}.")
    if abs(rank := int(value)) > _LARGEST:  # type: ignore[call-overload]
        raise _overflow(value)
    return int(rank)


def _overflow(rank: object) -> ValueError:
    return ValueError(f"Rank {rank} is beyond int64, whose largest value is {_LARGEST}.")


def _check_distinct(ranks: IntArray) -> None:
    if is_counting(ranks):
        return
    ordered = np.sort(ranks, axis=None)
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if again.size:
        shown = ", ".join(map(str, again[:8])) + (", ..." if again.size > 8 else "")
        raise ValueError(f"Duplicate ranks found in layout: {shown}. Each rank must appear exactly once.")


def select(
    layout: IntArray, names: Sequence[str], coords: Mapping[str, int | slice]
) -> tuple[IntArray, tuple[str, ...]]:
    """Index by axis name as numpy's basic indexing does: an integer drops its axis, a slice keeps it."""
    index: list[int | slice] = [slice(None)] * layout.ndim
    for dim, (axis, wanted) in zip(find_axes(names, coords), coords.items(), strict=True):
        size = layout.shape[dim]
        if isinstance(wanted, slice):
            try:
                selected = range(*wanted.indices(size))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{wanted} cannot be applied to axis {axis!r}: {error}.") from error
            if not selected:
                raise ValueError(f"{wanted} selects nothing of axis {axis!r} of size {size}; a sharding needs a rank.")
        else:
            wanted = as_int(wanted, f"The coordinate along axis {axis!r}")
            if not -size <= wanted < size:
                raise coordinate_error(axis, wanted, size)
        index[dim] = wanted
    remaining = tuple(name for name, wanted in zip(names, index, strict=True) if isinstance(wanted, slice))
    return layout[tuple(index)], remaining


def coordinate_error(axis: str, coordinate: int, size: int) -> IndexError:
    return IndexError(f"Coordinate {coordinate} is outside axis {axis!r} of size {size}.")


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


def render_table(header: list[str], row: Callable[[int], list[str]], size: int, limit: int) -> str:
    """Return a table of at most ``limit`` of ``size`` rows."""
    return _align([header, *(["..."] * len(header) if i is None else row(i) for i in _choose(size, limit))])


def _choose(size: int, limit: int) -> list[int | None]:
    """Return at most ``limit`` of ``size`` indices to show; None stands for the ones left out of the middle."""
    if size <= limit:
        return list(range(size))
    tail = limit // 2
    return [*range(limit - tail), None, *range(size - tail, size)]


def _align(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` as text in right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def render_grids(layout: IntArray, names: Sequence[str]) -> Iterator[str]:
    """Yield one grid of the last two axes, with its title, for each coordinate along the leading axes."""
    *leading, row_axis, column_axis = ["", *names] if layout.ndim == 1 else names
    shape = layout.shape[: len(leading)]
    for number in _choose(math.prod(shape), 8):
        if number is None:
            yield "...\n..."
            continue
        place = np.unravel_index(number, shape) if shape else ()
        title = ", ".join(f"{name}={coordinate}" for name, coordinate in zip(leading, place, strict=True))
        cells = _cells(np.atleast_2d(layout[place]), row_axis, column_axis)
        yield f"{title}\n{_align(cells)}".lstrip("\n")


def _cells(grid: IntArray, row_axis: str, column_axis: str) -> list[list[str]]:
    columns = _choose(grid.shape[1], _MAX_LINES)
    cells = [["", *("..." if c is None else f"{column_axis}={c}" for c in columns)]]
    for r in _choose(grid.shape[0], _MAX_LINES):
        label = "..." if r is None else f"{row_axis}={r}" if row_axis else ""
        cells.append([label, *("..." if r is None or c is None else str(grid[r, c]) for c in columns)])
    return cells

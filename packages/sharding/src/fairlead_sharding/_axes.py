# SPDX-License-Identifier: Apache-2.0
"""Axis names and coordinates: validation, and the dimension that a name stands for."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence


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

# SPDX-License-Identifier: Apache-2.0
"""Conversions: to text and HTML, and to and from plain data and the meshes of torch and jax.

A conversion imports its library when called. Large layouts and tables are shortened in text.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ._layout import IntArray, as_int, as_layout, make_layout

_MAX_LINES = 16


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


def render_text(layout: IntArray, names: Sequence[str]) -> str:
    grids = (f"{title}\n{_align(cells)}".lstrip("\n") for title, cells in _grids(layout, names))
    return "\n\n".join([_headline(layout, names), *grids])


def render_html(layout: IntArray, names: Sequence[str]) -> str:
    parts = [f"<p>{escape(_headline(layout, names))}</p>"]
    for title, cells in _grids(layout, names):
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        parts.append(f"<table><caption>{escape(title)}</caption>{table}</table>")
    return "".join(parts)


def _headline(layout: IntArray, names: Sequence[str]) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, layout.shape, strict=True))
    return f"{sizes} ({layout.size} rank{'s' if layout.size > 1 else ''})"


def _grids(layout: IntArray, names: Sequence[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the title and cells of one grid of the last two axes for each coordinate along the leading axes."""
    *leading, row_axis, column_axis = ["", *names] if layout.ndim == 1 else names
    shape = layout.shape[: len(leading)]
    for number in _choose(math.prod(shape), 8):
        if number is None:
            yield "...", [["..."]]
            continue
        at = np.unravel_index(number, shape) if shape else ()
        title = ", ".join(f"{name}={coordinate}" for name, coordinate in zip(leading, at, strict=True))
        yield title, _cells(np.atleast_2d(layout[at]), row_axis, column_axis)


def _cells(grid: IntArray, row_axis: str, column_axis: str) -> list[list[str]]:
    columns = _choose(grid.shape[1], _MAX_LINES)
    cells = [["", *("..." if c is None else f"{column_axis}={c}" for c in columns)]]
    for r in _choose(grid.shape[0], _MAX_LINES):
        label = "..." if r is None else f"{row_axis}={r}" if row_axis else ""
        cells.append([label, *("..." if r is None or c is None else str(grid[r, c]) for c in columns)])
    return cells


def to_dict(layout: IntArray, names: Sequence[str], start: int | None) -> dict[str, Any]:
    ranks = {"ranks": layout.ravel().tolist()} if start is None else {"start": start}
    return {"names": list(names), "shape": list(layout.shape), **ranks}


def from_dict(data: Mapping[str, Any]) -> tuple[IntArray, Sequence[str]]:
    try:
        shape = tuple(as_int(size, "A size in the shape", 1) for size in data["shape"])
        if "start" in data and "ranks" in data:
            raise ValueError("The dict of a sharding has start and ranks: give one of them.")
        if "start" in data:
            return make_layout(shape, as_int(data["start"], "The first rank", 0)), data["names"]
        return as_layout(data["ranks"]).reshape(shape), data["names"]
    except KeyError as missing:
        raise ValueError(f"The dict of a sharding lacks {missing}; it has {list(data)}.") from None
    except TypeError as error:
        raise ValueError(f"This is not the dict of a sharding ({error}): {data!r}") from None


def to_device_mesh(layout: IntArray, names: Sequence[str], device_type: str) -> Any:
    torch = _require("torch", "to_device_mesh")
    mesh = _require("torch.distributed.device_mesh", "to_device_mesh")
    return mesh.DeviceMesh(device_type, torch.tensor(layout.tolist()), mesh_dim_names=tuple(names))


def from_device_mesh(mesh: Any) -> tuple[object, Sequence[str]]:
    if not mesh.mesh_dim_names:
        raise ValueError(f"The mesh has no dimension names; make it with mesh_dim_names=(...): {mesh}")
    return mesh.mesh.tolist(), mesh.mesh_dim_names


def to_jax_mesh(layout: IntArray, names: Sequence[str], devices: Sequence[Any]) -> Any:
    jax_sharding = _require("jax.sharding", "to_jax_mesh")
    if (largest := layout.max()) >= len(devices):
        raise ValueError(f"Rank {largest} has no device: only {len(devices)} devices were given.")
    # Assigned one by one, because numpy would unpack a device that looks like a sequence.
    grid = np.empty(layout.shape, dtype=object)
    for position, rank in np.ndenumerate(layout):
        grid[position] = devices[int(rank)]
    return jax_sharding.Mesh(grid, tuple(names))


def _require(module: str, caller: str) -> Any:
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{caller}() needs {library}, which cannot be imported ({error}): pip install {library}"
        raise ImportError(message, name=library) from error

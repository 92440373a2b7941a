# SPDX-License-Identifier: Apache-2.0
"""Layouts and tables as plain text and HTML, shortened when they are large."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

import numpy as np

from ._layout import IntArray

_MAX_GRIDS = 8
_MAX_LINES = 16


def render_table(header: list[str], row: Callable[[int], list[str]], size: int, limit: int) -> str:
    """Return a table of at most ``limit`` of ``size`` rows."""
    rows = (["..."] * len(header) if i is None else row(i) for i in _choose(size, limit))
    return _align([header, *rows])


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
    parts = [_headline(layout, names)]
    for title, cells in _grids(layout, names):
        parts.append(f"{title}\n{_align(cells)}" if title else _align(cells))
    return "\n\n".join(parts)


def render_html(layout: IntArray, names: Sequence[str]) -> str:
    parts = [f"<p>{escape(_headline(layout, names))}</p>"]
    for title, cells in _grids(layout, names):
        parts.append(f"<table><caption>{escape(title)}</caption>")
        for row in cells:
            parts.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
        parts.append("</table>")
    return "".join(parts)


def _headline(layout: IntArray, names: Sequence[str]) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, layout.shape, strict=True))
    return f"{sizes} ({layout.size} rank{'s' if layout.size > 1 else ''})"


def _grids(layout: IntArray, names: Sequence[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the title and cells of one grid of the last two axes for each coordinate along the leading axes."""
    *leading, row_axis, column_axis = ["", *names] if layout.ndim == 1 else names
    shape = layout.shape[: len(leading)]
    for number in _choose(math.prod(shape), _MAX_GRIDS):
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

# SPDX-License-Identifier: Apache-2.0
"""Layouts and tables for people to read: plain text and HTML, shortened when large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from ._layout import IntArray

_MAX_GRIDS = 8
_MAX_LINES = 16


def shown(size: int, limit: int) -> list[int | None]:
    """The indices of ``size`` things to show, at most ``limit``; None stands for those left out between."""
    if size <= limit:
        return list(range(size))
    tail = limit // 2
    return [*range(limit - tail), None, *range(size - tail, size)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """``rows`` in right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def render_text(layout: IntArray, names: Sequence[str]) -> str:
    parts = [_headline(layout, names)]
    for title, cells in _grids(layout, names):
        parts.append(f"{title}\n{table(cells)}" if title else table(cells))
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
    """One grid of the last two axes for every coordinate along the leading ones, with its title."""
    *leading, row_axis, column_axis = ["", *names] if layout.ndim == 1 else names
    shape = layout.shape[: len(leading)]
    for number in shown(math.prod(shape), _MAX_GRIDS):
        if number is None:
            yield "...", [["..."]]
            continue
        at = np.unravel_index(number, shape) if shape else ()
        title = ", ".join(f"{name}={coordinate}" for name, coordinate in zip(leading, at, strict=True))
        yield title, _cells(np.atleast_2d(layout[at]), row_axis, column_axis)


def _cells(grid: IntArray, row_axis: str, column_axis: str) -> list[list[str]]:
    columns = shown(grid.shape[1], _MAX_LINES)
    cells = [["", *("..." if c is None else f"{column_axis}={c}" for c in columns)]]
    for r in shown(grid.shape[0], _MAX_LINES):
        label = "..." if r is None else f"{row_axis}={r}" if row_axis else ""
        cells.append([label, *("..." if r is None or c is None else str(grid[r, c]) for c in columns)])
    return cells

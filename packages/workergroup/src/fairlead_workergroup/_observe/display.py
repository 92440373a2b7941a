# SPDX-License-Identifier: Apache-2.0
"""The display of values as HTML tables in a notebook, and progress bars on a terminal."""

import dataclasses
import html
import reprlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MOST_ROWS = 40
MOST_CHARACTERS = 200

_T = TypeVar("_T")


def table_html(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table with a caption; a long table has its first and its last rows."""

    def line(tag: str, values: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(_text(value))}</{tag}>" for value in values) + "</tr>"

    body = "".join(line("td", row) for row in shorten_rows(rows, len(header)))
    return f"<p>{html.escape(caption)}</p><table>{line('th', header)}{body}</table>"


def shorten_rows(rows: Sequence[Sequence[Any]], columns: int) -> list[Sequence[Any]]:
    """Return the rows of a table; of more than `MOST_ROWS` rows, the first and the last ones with dots between them."""
    half = MOST_ROWS // 2
    return list(rows) if len(rows) <= MOST_ROWS else [*rows[:half], ("...",) * columns, *rows[-half:]]


def record_html(record: Any) -> str:
    """Return a dataclass instance as an HTML table with a row for each field."""
    rows = [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]
    return table_html(type(record).__name__, ("field", "value"), rows)


class Records(list[_T]):
    """A list of instances of one dataclass, which a notebook shows as a table with a column for each field."""

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no entries</p>"
        names = [field.name for field in dataclasses.fields(self[0])]  # type: ignore[arg-type]
        return table_html(
            f"{len(self)} {type(self[0]).__name__}", names, [[getattr(one, name) for name in names] for one in self]
        )


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10**6 else str(value)
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


# A bar appears when the work takes longer than this.
QUIET_S = 1.0


class Bar(AbstractContextManager["Bar"]):
    """A progress bar, which appears on a terminal after one second and names the ranks that it waits for."""

    def __init__(self, what: str, total: int | None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[slow]}"),
        )
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task(what, total=total, slow="")
        self._began = time.monotonic()
        self._shown = False

    def show(self, done: int, *, waiting_for: Sequence[int] = ()) -> None:
        """Show the amount of work that is done, and the ranks that have not finished."""
        names = ", ".join(map(str, waiting_for[:8])) + (", ..." if len(waiting_for) > 8 else "")
        slow = f"waiting for ranks {names}" if names else ""
        self._progress.update(self._task, completed=done, slow=slow)
        if not self._shown and self._console.is_terminal and time.monotonic() - self._began > QUIET_S:
            self._progress.start()
            self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

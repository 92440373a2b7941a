# SPDX-License-Identifier: Apache-2.0
"""The state of a ledger as text for people. It uses rich if rich is installed."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._audit import explain_group
from ._book import Book
from ._statistics import Statistics

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Picture", "draw_ledger"]

STATES = ("pending", "leased", "sealed", "claimed", "trained", "applied", "dropped")
COLORS = {"pending": "yellow", "leased": "blue", "sealed": "cyan", "dropped": "red"}
BAR, OLDEST = 40, 3
Rows = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A title, bars by section and lines of text."""

    title: str
    sections: tuple[tuple[str, Rows], ...]
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.title]
        for name, rows in self.sections:
            parts += [name, *(f"  {label:9} {count:9,} {bar}".rstrip() for label, count, bar in _scale(rows))]
        return "\n".join([*parts, *self.lines])

    def __rich__(self) -> "Group":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Text | Table] = [Text(self.title, "bold")]
        for name, rows in self.sections:
            table = Table("", "", "", title=name, title_justify="left", box=None, show_header=False)
            table.columns[1].justify = "right"
            for label, count, bar in _scale(rows):
                table.add_row(Text(label), f"{count:,}", Text(bar, COLORS.get(label, "green")))
            parts.append(table)
        return Group(*parts, *map(Text, self.lines))

    def print(self) -> None:
        """Print in color with rich, or as plain text without it."""
        try:
            from rich.console import Console
        except ImportError:
            sys.stdout.write(f"{self}\n")
            return
        Console(highlight=False, markup=False).print(self)


def _scale(rows: Rows) -> Iterable[tuple[str, int, str]]:
    most = max((count for _, count in rows), default=0)
    return [(label, count, "█" * -(-count * BAR // (most or 1))) for label, count in rows]


def as_rows(counts: Mapping[int, int] | Mapping[str, int]) -> Rows:
    """Return counts with their names as text."""
    return tuple((str(name), count) for name, count in counts.items())


def draw_ledger(book: Book, numbers: Statistics, at: int) -> Picture:
    """Return the groups in each state, the staleness of claims, drops by reason and the three oldest groups."""
    sections = [("groups", tuple((state, getattr(numbers, state)) for state in STATES))]
    for name, counts in (
        ("claimed groups by staleness", numbers.staleness),
        ("dropped groups by reason", numbers.drops),
    ):
        if counts:
            sections.append((name, as_rows(counts)))
    waiting = (record for record in book.records.values() if record.state != "trained")
    oldest = sorted(waiting, key=lambda record: (record.oldest, record.ordinal))[:OLDEST]
    lines = tuple(explain_group(book, record.ordinal, record.state, at) for record in oldest)
    title = f"Ledger at version {numbers.version}, room() is {numbers.room:,}"
    return Picture(title, tuple(sections), lines)

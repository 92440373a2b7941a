# SPDX-License-Identifier: Apache-2.0
"""Tables for people, as text."""

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

# A message or a page about thousands of tensors has to stay readable.
MOST_ROWS = 40


def table_text(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 160) -> str:
    """Return a caption and a table as text; of many rows, the first ones."""
    table = Table(*header, box=box.SIMPLE, pad_edge=False)
    for row in rows[:MOST_ROWS]:
        table.add_row(*row)
    with io.StringIO() as file:
        Console(file=file, width=width, highlight=False, markup=False).print(table)
        lines = [line.rstrip() for line in file.getvalue().splitlines()]
    more = [f"and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else []
    return "\n".join([caption, *(line for line in lines if line), *more])

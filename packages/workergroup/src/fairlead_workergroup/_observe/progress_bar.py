# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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

# SPDX-License-Identifier: Apache-2.0
"""A progress bar for what may take long; nothing unless it does, and unless somebody looks."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Bar"]

QUIET_S = 1.0


class Bar:
    """Shown on a terminal once it takes over a second; names the ranks it waits for.

    Args:
        what: what goes on.
        total: how much there is to do; None if that is not known.
    """

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
        """How much is done, and which ranks are not."""
        names = ", ".join(map(str, waiting_for[:8])) + (", ..." if len(waiting_for) > 8 else "")
        slow = f"waiting for ranks {names}" if names else ""
        self._progress.update(self._task, completed=done, slow=slow)
        if not self._shown and self._console.is_terminal and time.monotonic() - self._began > QUIET_S:
            self._progress.start()
            self._shown = True

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

# SPDX-License-Identifier: Apache-2.0
"""Bars on the terminal, once something takes over a second."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Bars"]

QUIET_S = 1.0
WIDTH = 60


class Bars:
    """A bar per thing that is made; quiet when standard error is not a terminal, or nothing takes long.

    Args:
        shown: whether to show anything at all.
    """

    def __init__(self, *, shown: bool = True) -> None:
        console = Console(stderr=True)
        self._quiet = not shown or not console.is_terminal
        self._began = time.monotonic()
        self._started = False
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=console,
            transient=True,
        )

    def update(self, name: str, done: int, total: int, detail: str = "") -> None:
        """How far one thing is.

        Args:
            name: of the thing; the first time a bar is added.
            done: of `total`; a bar of one that is not done pulses.
            total: for instance of nodes.
            detail: what is being done just now.
        """
        if self._quiet:
            return
        # Not as markup, which a line of uv's may look like.
        line = escape(detail.strip()[:WIDTH])
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(escape(name), total=total, detail=line)
        if total == 1 and not done:
            self._progress.update(self._tasks[name], total=None, detail=line)
        else:
            self._progress.update(self._tasks[name], completed=done, total=total, detail=line)
        if not self._started and time.monotonic() - self._began > QUIET_S:
            self._progress.start()
            self._started = True

    def line(self, name: str) -> Callable[[str], None]:
        """For what a command prints: the detail of one bar."""
        return lambda text: self.update(name, 0, 1, text)

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._progress.stop()

# SPDX-License-Identifier: Apache-2.0
"""Bars on the terminal, once something takes over a second."""

import threading
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
        self._shown = shown
        self._began = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        # Several builds tell of themselves at once, each from its own thread.
        self._lock = threading.Lock()
        # Made when first needed: what is there already is found in less time than rich takes to begin.
        self._progress: Progress | None = None

    def update(self, name: str, done: int, total: int, detail: str = "") -> None:
        """How far one thing is.

        Args:
            name: of the thing; the first time a bar is added.
            done: of `total`; a bar of one that is not done pulses.
            total: for instance of nodes.
            detail: what is being done just now.
        """
        if not self._shown or time.monotonic() - self._began < QUIET_S:
            return
        with self._lock:
            self._update(name, done, total, detail)

    def _update(self, name: str, done: int, total: int, detail: str) -> None:
        if self._progress is None:
            console = Console(stderr=True)
            self._shown = console.is_terminal
            if not self._shown:
                return
            self._progress = _progress(console)
            self._progress.start()
        # Not as markup, which a line of uv's may look like.
        line = escape(detail.strip()[:WIDTH])
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(escape(name), total=total, detail=line)
        pulses = total == 1 and not done
        self._progress.update(self._tasks[name], completed=done, total=None if pulses else total, detail=line)

    def line(self, name: str) -> Callable[[str], None]:
        """For what a command prints: the detail of one bar."""
        return lambda text: self.update(name, 0, 1, text)

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
        console=console,
        transient=True,
    )

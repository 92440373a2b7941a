# SPDX-License-Identifier: Apache-2.0
"""Progress bars on the terminal for work that takes over a second."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

QUIET_S = 1.0
WIDTH = 60


class Bars(AbstractContextManager["Bars"]):
    """One bar for each environment; none if standard error is not a terminal or the work is short."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._began = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        # Several builds report at once, each from its own thread.
        self._lock = threading.Lock()
        # Created when it is needed: finding an environment takes less time than starting rich.
        self._progress: Progress | None = None

    def update(self, name: str, done: int, total: int, detail: str = "") -> None:
        """Report progress.

        Args:
            name: the name of the bar, which is added at the first report.
            done: the number of steps that are done.
            total: the number of all steps, for instance nodes. A bar of one step pulses until it is done.
            detail: the current step.
        """
        if not self._shown or time.monotonic() - self._began < QUIET_S:
            return
        with self._lock:
            if self._progress is None:
                console = Console(stderr=True)
                self._shown = console.is_terminal
                if not self._shown:
                    return
                self._progress = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(bar_width=20),
                    MofNCompleteColumn(),
                    TimeElapsedColumn(),
                    TextColumn("{task.fields[detail]}", style="dim"),
                    console=console,
                    transient=True,
                )
                self._progress.start()
            # Escaped, as a line of uv may look like markup.
            line = escape(detail.strip()[:WIDTH])
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(escape(name), total=total, detail=line)
            pulses = total == 1 and not done
            self._progress.update(self._tasks[name], completed=done, total=None if pulses else total, detail=line)

    def line(self, name: str) -> Callable[[str], None]:
        """Return a function that shows a printed line as the detail of one bar."""
        return lambda text: self.update(name, 0, 1, text)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

# SPDX-License-Identifier: Apache-2.0
"""A status line on the terminal for work that takes over a second."""

import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.markup import escape
from rich.status import Status as Line

QUIET_S = 1.0
WIDTH = 80


class Status(AbstractContextManager["Status"]):
    """One line that says what is being done; none if standard error is not a terminal or the work is short."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._began = time.monotonic()
        # Created when it is needed: finding an environment takes less time than starting rich.
        self._line: Line | None = None

    def update(self, text: str) -> None:
        """Show the current step of the work."""
        if not self._shown or time.monotonic() - self._began < QUIET_S:
            return
        # Escaped, as a line of uv may look like markup.
        text = escape(text.strip()[:WIDTH])
        if self._line is None:
            console = Console(stderr=True)
            self._shown = console.is_terminal
            self._line = console.status(text)
            if self._shown:
                self._line.start()
        self._line.update(text)

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.stop()

# SPDX-License-Identifier: Apache-2.0
"""Shows a status line on the terminal for waits of over a second."""

import time

from rich.console import Console
from rich.text import Text

QUIET_S = 1.0


class Waiting:
    """Shows why and for how long the program waits. Writes nothing if standard error is not a terminal.

    Args:
        doing: the current activity, as a participle ("Waiting for 2 slices").

    >>> with Waiting("reserving") as waiting:
    ...     waiting.show("for nodes", limit_s=60.0)
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._status = self._console.status("")

    def show(self, what: str, limit_s: float) -> None:
        """Show the current reason for waiting, and the limit in seconds."""
        waited = time.monotonic() - self._began
        if waited < QUIET_S or not self._console.is_terminal:
            return
        # Text, so that a name is not parsed as markup.
        self._status.update(Text(f"{self._doing}: {what}, {waited:.0f} of {limit_s:g} s"))
        self._status.start()

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

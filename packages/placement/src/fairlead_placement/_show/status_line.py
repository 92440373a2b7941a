# SPDX-License-Identifier: Apache-2.0
"""A status line on the terminal, once something takes over a second."""

import time

from rich.console import Console
from rich.text import Text

__all__ = ["Waiting"]

QUIET_S = 1.0


class Waiting:
    """Shows what is waited for and since when; quiet when standard error is not a terminal.

    Args:
        doing: for what it is waited.

    >>> with Waiting("reserving") as waiting:
    ...     waiting.show("for nodes", limit_s=60.0)
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._shown = False

    def show(self, what: str, limit_s: float) -> None:
        """Say what is waited for now, and for how many seconds at most."""
        waited = time.monotonic() - self._began
        if waited < QUIET_S or not self._console.is_terminal:
            return
        # As Text: what looks like markup in a name is not.
        self._status.update(Text(f"{self._doing}: {what}, {waited:.0f} of {limit_s:g} s"))
        if not self._shown:
            self._status.start()
            self._shown = True

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._status.stop()

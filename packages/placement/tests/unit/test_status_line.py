# SPDX-License-Identifier: Apache-2.0
"""The status line during a wait."""

import io
import re

import pytest
from rich.console import Console

from fairlead_placement.extension import Waiting


@pytest.fixture
def show_line(monkeypatch):
    """Return a function that waits once, on a terminal or not, and returns what was written."""

    def wait(*, terminal: bool, quiet_s: float = 0.0) -> str:
        written = io.StringIO()
        console = Console(file=written, force_terminal=terminal, width=80)
        monkeypatch.setattr("fairlead_placement._show.Console", lambda stderr: console)
        monkeypatch.setattr("fairlead_placement._show.QUIET_S", quiet_s)
        with Waiting("Reserving [red]train[/x]") as waiting:
            waiting.show("others hold what it needs", 180)
        return written.getvalue()

    return wait


def test_on_a_terminal(show_line):
    """One line says what is waited for, for how long and how long at most; names are not parsed as markup."""
    line = re.escape("Reserving [red]train[/x]: others hold what it needs, ") + r"\d+ of 180 s"
    assert re.search(line, show_line(terminal=True))


def test_quiet(show_line):
    """Nothing is written in the first second, nor if standard error is not a terminal."""
    assert show_line(terminal=True, quiet_s=600.0) == ""
    assert show_line(terminal=False) == ""

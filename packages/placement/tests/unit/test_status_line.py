# SPDX-License-Identifier: Apache-2.0
"""The status line of something slow."""

import io

import pytest
from rich.console import Console

from fairlead_placement._show import Waiting


@pytest.fixture
def shown(monkeypatch):
    """Waits once, on something that is a terminal or is not, and gives what was written there."""

    def wait(*, terminal: bool, quiet_s: float = 0.0) -> str:
        written = io.StringIO()
        console = Console(file=written, force_terminal=terminal, width=80)
        monkeypatch.setattr("fairlead_placement._show.Console", lambda stderr: console)
        monkeypatch.setattr("fairlead_placement._show.QUIET_S", quiet_s)
        with Waiting("Reserving [red]train[/x]") as waiting:
            waiting.show("others hold what it needs", 180)
        return written.getvalue()

    return wait


def test_on_a_terminal(shown):
    """It says what is waited for, since when and how long at most, on one line; names are no markup."""
    assert "Reserving [red]train[/x]: others hold what it needs, 0 of 180 s" in shown(terminal=True)


def test_quiet(shown):
    """Nothing is written in the first second, and nothing ever where nobody looks."""
    assert shown(terminal=True, quiet_s=1.0) == ""
    assert shown(terminal=False) == ""

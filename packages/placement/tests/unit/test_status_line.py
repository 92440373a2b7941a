# SPDX-License-Identifier: Apache-2.0
"""The status line during a wait."""

import io
import re
import sys
import time

from fairlead_placement.extension import Waiting


def wait_once(monkeypatch, *, is_terminal, pause_s):
    """Return what a wait writes to standard error."""
    monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Waiting("Reserving [red]train[/x]") as waiting:
        time.sleep(pause_s)
        waiting.show("others hold what it needs", 180)
    return sys.stderr.getvalue()


def test_on_a_terminal(monkeypatch):
    """One line says what is waited for, for how long and how long at most; names are not parsed as markup."""
    line = re.escape("Reserving [red]train[/x]: others hold what it needs, ") + r"\d+ of 180 s"
    assert re.search(line, wait_once(monkeypatch, is_terminal=True, pause_s=1.1))


def test_quiet(monkeypatch):
    """Nothing is written in the first second, nor if standard error is not a terminal."""
    assert wait_once(monkeypatch, is_terminal=True, pause_s=0.0) == ""
    assert wait_once(monkeypatch, is_terminal=False, pause_s=1.1) == ""

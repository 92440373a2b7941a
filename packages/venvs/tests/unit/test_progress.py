# SPDX-License-Identifier: Apache-2.0
"""The status line."""

from fairlead_venvs._progress import Status


def test_a_status_on_a_terminal(monkeypatch, capsys):
    """Work that takes long shows its step on a terminal, and what looks like markup is shown as it is."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("fairlead_venvs._progress.QUIET_S", 0.0)
    with Status() as status:
        status.update("Resolved [bold]x")
        assert str(status._line.status).endswith("Resolved \\[bold]x")
    with Status(shown=False) as hidden:
        hidden.update("Resolved")
    assert hidden._line is None

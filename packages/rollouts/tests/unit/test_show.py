# SPDX-License-Identifier: Apache-2.0
"""A ledger shown to people, and on the command line."""

import subprocess
import sys

from fairlead_rollouts import IndexStream, Ledger, LedgerConfig
from fairlead_rollouts.__main__ import main

CONFIG = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=1)
TEXT = """\
Ledger at version 1, room() is 1
groups
  pending           0
  leased            2 ████████████████████████████████████████
  finished          1 ████████████████████
"""


def test_show(finish, tmp_path, capsys):
    """`show` prints states and the oldest groups; the command line prints a snapshot or the file."""
    ledger = Ledger(CONFIG, IndexStream(100, seed=0), file=tmp_path / "ledger")
    finish(ledger, ledger.lease(4)[1:])
    ledger.claim(1, 2)
    ledger.advance(1, trained=1)
    ledger.lease(1)
    ledger.show()
    printed = capsys.readouterr().out
    assert printed.startswith(TEXT)
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("Prompt")] == ["0", "3", "4"]
    ledger.prepare(1, tmp_path)
    ledger.close()
    assert main(["show", str(tmp_path)]) == main(["show", str(tmp_path / "ledger")]) == 0
    printed = capsys.readouterr().out
    assert "Snapshot of step 1 at version 1\n" in printed
    assert "The next prompt is 5. Every prompt below 0 is applied or dropped." in printed
    assert "A resume can begin after any step from 0 to 1." in printed
    assert "6 durable samples of open groups are listed." in printed


def test_snapshot_without_an_open_prompt(finish, tmp_path, capsys):
    """If every prompt is applied or dropped, the next prompt is the bound."""
    ledger = Ledger(CONFIG, IndexStream(100, seed=0))
    finish(ledger, ledger.lease(2))
    ledger.drop([0, 1], reason="tested")
    ledger.prepare(0, tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    assert "The next prompt is 2. Every prompt below 2 is applied or dropped." in capsys.readouterr().out


def test_a_missing_snapshot(tmp_path):
    """The command line names what it cannot read."""
    command = [sys.executable, "-m", "fairlead_rollouts", "show", str(tmp_path / "missing")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "it cannot be read: No such file" in result.stderr

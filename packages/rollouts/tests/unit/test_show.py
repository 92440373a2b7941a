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


def make(finish, **options):
    """Five groups: two are trained, one is finished, and two are in generation."""
    ledger = Ledger(CONFIG, IndexStream(100, seed=0), **options)
    first = ledger.lease(4)
    finish(ledger, first[1:])
    ledger.claim(1, 2)
    ledger.advance(1, trained=1)
    ledger.lease(1)
    return ledger


def test_show(finish, capsys):
    """`show` prints the states, the staleness and the three oldest groups that are not trained."""
    ledger = make(finish)
    ledger.show()
    printed = capsys.readouterr().out
    assert printed.startswith(TEXT)
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("Prompt")] == ["0", "3", "4"]
    assert printed.splitlines()[-3] == ledger.explain(0)


def test_the_command_line(finish, tmp_path, capsys):
    """`python -m fairlead_rollouts show` prints a snapshot or the file of a ledger, and names what it cannot read."""
    ledger = make(finish, file=tmp_path / "ledger")
    ledger.prepare(1, tmp_path)
    ledger.close()
    assert main(["show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Snapshot of step 1 at version 1\n" in printed
    assert "The next prompt is 5. Every prompt below 0 is applied or dropped." in printed
    assert main(["show", str(tmp_path / "ledger")]) == 0
    printed = capsys.readouterr().out
    assert "A resume can begin after any step from 0 to 1." in printed
    assert "6 durable samples of open groups are listed." in printed
    command = [sys.executable, "-m", "fairlead_rollouts", "show", str(tmp_path / "missing")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "it cannot be read: No such file" in result.stderr

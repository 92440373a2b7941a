# SPDX-License-Identifier: Apache-2.0
"""Where the commands are, without Ray."""

import subprocess
import sys


def test_where_the_commands_are():
    """`python -m fairlead_workergroup` names the package that has the commands, and fails."""
    done = subprocess.run([sys.executable, "-m", "fairlead_workergroup", "why"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "python -m fairlead_inspect" in done.stderr

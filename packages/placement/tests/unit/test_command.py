# SPDX-License-Identifier: Apache-2.0
"""The command line, as far as it needs no cluster."""

import os
import subprocess
import sys

import pytest

from fairlead_placement import PlacementError
from fairlead_placement.extension import run_command


def _fail(error):
    def command():
        raise error

    return command


def test_statuses(capsys):
    """Ctrl-C and errors about the cluster have exit statuses of their own; other errors are not hidden."""
    assert run_command(lambda: 1) == 1
    assert run_command(_fail(KeyboardInterrupt())) == 130
    assert run_command(_fail(PlacementError("No cluster."))) == 3
    assert capsys.readouterr().err == "No cluster.\n"
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_closed_pipe():
    """Output into a pipe that was closed ends with a status, and nothing on standard error."""
    script = (
        "import sys; from fairlead_placement.extension import Output, run_command\n"
        "sys.exit(run_command(lambda: Output().print_json(['x' * 100] * 100_000) or 0))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")

# SPDX-License-Identifier: Apache-2.0
"""Observers that raise, and where the commands are, without Ray."""

import os
import subprocess
import sys
import time

import pytest

from fairlead_workergroup import CallTimeoutError
from fairlead_workergroup.spi import CallObserver

from ..local import Group, no_ray  # noqa: F401  a fixture of all tests


class Waiting:
    def wait_for(self, gate):
        while not os.path.exists(gate):
            time.sleep(0.005)


class Failing(CallObserver):
    """An observer that fails at the end of a call."""

    def __init__(self):
        self.told = []

    def begin(self, name, began, futures):
        self.told.append((name, len(futures)))
        return len(self.told)

    def end(self, numbers, *, failed=False):
        raise OSError("no memory")

    def mark(self, text):
        self.told.append(text)


def test_observer_that_fails(caplog, gate):
    """An observer that raises is reported once and dropped; calls go on without it."""
    observer, opened = Failing(), __file__
    with Group(Waiting, workers=2) as group:
        group.call("wait_for", opened).result()  # which nobody observes
        group.observe_calls(observer)
        with pytest.raises(ValueError, match="observed by"):
            group.observe_calls(Failing())
        call = group.call("wait_for", gate)
        with pytest.raises(CallTimeoutError):  # which this observer leaves as it is
            call.result(timeout=0.05)
        assert observer.told == [("wait_for", 2)]
        assert not caplog.records
        gate.touch()
        assert call.result() == [None] * 2
        assert group.call("wait_for", opened).result() == [None] * 2
        group._sender.observed.mark("rank 1 lost")
    assert observer.told == [("wait_for", 2)]
    assert caplog.text.count("does not observe the calls of its group any more") == 1


def test_where_the_commands_are():
    """`python -m fairlead_workergroup` names the package that has the commands, and fails."""
    done = subprocess.run([sys.executable, "-m", "fairlead_workergroup", "why"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "python -m fairlead_inspect" in done.stderr

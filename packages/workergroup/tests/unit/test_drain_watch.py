# SPDX-License-Identifier: Apache-2.0
"""The watch for draining nodes takes the time of their end into account, without Ray."""

import threading
from types import SimpleNamespace

import pytest

from fairlead_workergroup._elastic import drain


class Group:
    """Stands for a group that can be referred to weakly."""


class Roster:
    """Two ranks on one node."""

    def __init__(self):
        members = [SimpleNamespace(rank=rank, slot=SimpleNamespace(node_id="a")) for rank in range(2)]
        self.now = SimpleNamespace(members=members)
        self.end_begun, self.is_over, self.name_prefix = threading.Event(), False, "policy"


@pytest.fixture
def watch(monkeypatch):
    """Return a function that looks twice at a node that drains; the first replacement takes some time.

    The clock stands still except for the replacement.
    """
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(drain, "time", SimpleNamespace(time=lambda: clock.now))

    def run(left_s, takes_s, error=None):
        ends = {"a": clock.now + left_s, "b": 0.0}
        monkeypatch.setattr(drain, "drain_deadlines", lambda: ends)
        group, roster, calls = Group(), Roster(), []

        def change(operation, deadline):
            clock.now += takes_s
            calls.append((list(operation.ranks), operation.end.left()))
            ends.clear()
            roster.is_over = error is not None
            if error is not None:
                raise error

        watch = drain.DrainWatch(group, roster, SimpleNamespace(change=change), 60.0)
        assert watch.is_left()
        watch.look()
        watch.look()  # another one finds nothing, or comes too soon after an error
        roster.end_begun.set()
        assert not watch.is_left()
        return calls

    return run


def test_in_time(watch, caplog):
    """The replacement may take the time of the notice, or its own time without one."""
    ((ranks, timeout),) = watch(100.0, 0.0)
    assert ranks == [0, 1]
    assert 50 < timeout <= 100
    assert watch(float("inf"), 0.0) == [([0, 1], None)]
    assert "would end" not in caplog.text


def test_too_late(watch, caplog):
    """A replacement that takes longer than the notice says so."""
    watch(0.5, 1.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("The replacement of rank(s) 0, 1 of 'policy' ended 0.5 s after")
    assert "the notice left 0.5 s" in record.getMessage()


def test_after_its_time(watch, caplog):
    """A node that is there after its time may stay for any time."""
    assert watch(-1.0, 0.0) == [([0, 1], None)]
    assert "the notice left 0.0 s" in caplog.text


def test_silence_after_the_end(watch, caplog):
    """When the group or its Ray has ended, a replacement that fails or is late is not reported."""
    watch(0.5, 1.0, error=RuntimeError("Ray has not been started yet"))
    assert not caplog.records

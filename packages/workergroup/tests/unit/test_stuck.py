# SPDX-License-Identifier: Apache-2.0
"""The notes about stuck workers that are not where the others wait, from what their nodes report, without Ray."""

import pytest

from fairlead_workergroup._observe.stuck import find_method_frames

from ..faults import let_nodes_report
from ..observed import make_observer


def stuck(method="step", function="all_reduce", line=3):
    """Return what a node reports about a worker that is stuck; without a function, it has no stacks."""
    stacks = f'Current thread 0x1 (most recent call first):\n  File "/lib/dist.py", line {line} in {function}\n'
    stacks = stacks + '  File "/x/fairlead_workergroup/_remote/host.py", line 9 in delegate\n' if function else ""
    times = {"running_s": 9.0, "since_progress_s": 9.0}
    return {"method": method, "gone": False, "stuck": True, "stacks": stacks, "note": "", **times}


IDLE = {"method": None, "gone": False, "stuck": False}
DEAD = {"gone": True}


@pytest.fixture
def notes(monkeypatch):
    """Return a function that returns the notes about the stuck workers among those that the nodes report."""

    def look(*rows):
        let_nodes_report(monkeypatch, dict(enumerate(rows)))
        found = make_observer(len(rows)).find_stuck(1.0, dump_stacks=True)
        assert [one.rank for one in found] == [rank for rank, row in enumerate(rows) if row.get("stuck")]
        return [one.note for one in found]

    return look


def test_choice_of_odd_ranks(notes):
    """Dead ranks, other lines and other methods are odd; without stacks the method decides; a majority is needed."""
    assert notes(stuck(), stuck(), DEAD) == ["1 others wait at the same place; not there: rank 2 dead"] * 2
    assert notes(stuck(), stuck(), stuck(line=4)) == [
        *["1 others wait at the same place; not there: rank 2 at /lib/dist.py:4 in all_reduce"] * 2,
        "2 others wait at /lib/dist.py:3 in all_reduce, this rank does not",
    ]
    bare = stuck(function="")
    assert notes(bare, bare, stuck("load", "")) == [
        *["1 others wait at the same place; not there: rank 2 in 'load'"] * 2,
        "2 others wait at 'step', this rank does not",
    ]
    for nobody in ([IDLE], [stuck()], [stuck(), stuck()], [stuck(), stuck(), stuck(line=4), stuck(line=5)]):
        assert set(notes(*nobody)) <= {""}
    assert notes(stuck(), stuck(), IDLE, IDLE) == ["", ""]


def test_frames_of_other_threads():
    """If no thread runs a method, the frames are those of the first thread; a text without frames has none."""
    two = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n\nThread 0x2 (most recent call first):\n'
    assert find_method_frames(two + '  File "b.py", line 2 in g h\n') == (("b.py", "2", "g h"),)
    assert find_method_frames("") == ()

# SPDX-License-Identifier: Apache-2.0
"""Tests of statuses in a notebook."""

import pytest

from fairlead_workergroup import Outcome, StuckWorker, WorkerUsage

from ..faults import let_nodes_report
from ..observed import make_observer


@pytest.mark.parametrize(
    ("record", "cells"),
    [
        (WorkerUsage(1, 12.5, 10, None, 4), ["cpu_percent</td><td>12.5<", "gpu_memory_bytes</td><td><"]),
        (Outcome(1, {"dp": 0, "tp": 1}, "<b>"), ["coords</td><td>dp=0, tp=1<", "value</td><td>&lt;b&gt;<"]),
        (Outcome(1, {}, error=ValueError("<x>")), ["error</td><td>ValueError(&#x27;&lt;x&gt;&#x27;)<"]),
        (StuckWorker(1, {}, "ab", 7, "<lambda>", 1.0, 2.0), ["method</td><td>&lt;lambda&gt;<"]),
    ],
)
def test_a_record(record, cells):
    """A value is shown as a table of its fields; texts are escaped."""
    shown = record._repr_html_()
    assert shown.startswith(f"<p>{type(record).__name__}</p><table>")
    for cell in cells:
        assert cell in shown


@pytest.fixture
def look(monkeypatch):
    """Return a function that returns the statuses and the stuck ones of as many workers as given, all in `<step>`."""
    row = {"gone": False, "stuck": False, "method": "<step>", "message": "x" * 999}

    def look(count):
        let_nodes_report(monkeypatch, dict.fromkeys(range(count), row))
        observer = make_observer(count)
        return observer.read_status(1.0), observer.find_stuck(1.0, dump_stacks=False)

    return look


def test_a_list_of_records(look):
    """A list has a column for each field and a row for each record; a long list shows both ends."""
    statuses, stuck = look(3)
    shown = statuses._repr_html_()
    assert shown.startswith("<p>3 WorkerStatus</p>")
    assert (shown.count("<tr>"), shown.count("<th>rank</th>")) == (4, 1)
    assert "<td>local-0-2</td><td>worker=2</td><td>busy</td>" in shown
    assert shown.count("<td>&lt;step&gt;</td>") == 3
    assert "x" * 201 not in shown
    many, _ = look(50)
    shown = many._repr_html_()
    assert shown.count("<tr>") == 40 + 2
    assert ("local-0-19<" in shown, "local-0-20<" in shown, "local-0-49<" in shown) == (True, False, True)
    assert many == list(many)
    assert stuck._repr_html_() == "<p>no entries</p>"

# SPDX-License-Identifier: Apache-2.0
"""Tests of statuses and statistics in a notebook."""

import pytest

from fairlead_workergroup import CallStatistics, GroupStatistics, Outcome, StuckWorker, WorkerStatus, WorkerUsage
from fairlead_workergroup._observe.display import MOST_ROWS, Records


@pytest.mark.parametrize(
    ("record", "cells"),
    [
        (GroupStatistics(calls=3, requests=4_000_000), ["calls</td><td>3<", "requests</td><td>4,000,000<"]),
        (CallStatistics(8, 1, 2, 3, 4, 0.00123456), ["requests</td><td>8<", "submit_s</td><td>0.00123<"]),
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


def test_a_list_of_records():
    """A list has a column for each field and a row for each record; a long list shows both ends."""
    statuses = [
        WorkerStatus(rank, f"w<{rank}>", {"dp": rank}, "idle", "ab" * 28, 7, message="x" * 999) for rank in range(100)
    ]
    shown = Records(statuses[:3])._repr_html_()
    assert shown.startswith("<p>3 WorkerStatus</p>")
    assert (shown.count("<tr>"), shown.count("<th>rank</th>")) == (4, 1)
    assert "<td>w&lt;2&gt;</td><td>dp=2</td><td>idle</td>" in shown
    assert "x" * 201 not in shown
    many = Records(statuses)._repr_html_()
    assert many.count("<tr>") == MOST_ROWS + 2
    assert "w&lt;99&gt;" in many
    assert Records(statuses) == statuses
    assert Records([])._repr_html_() == "<p>no entries</p>"

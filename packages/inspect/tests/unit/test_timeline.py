# SPDX-License-Identifier: Apache-2.0
"""The trace of any job: a track for each actor, spans that overlap on tracks of their own, and marks."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, NODE, NOW, actor_id, ranks_of

from fairlead_inspect._timeline import make_timeline
from fairlead_inspect.model import Call


def span(name, owner, began, ended=None, *, pid=1, node=NODE, failed=False):
    state = "FAILED" if failed else "RUNNING" if ended is None else "FINISHED"
    over = None if ended is None else NOW + ended
    return Call(f"task-{name}-{began}", name, owner, state, NOW + began, pid, node, ended=over)


def draw(*spans):
    """Return the finished trace as the name of each track with its spans: name, start and duration in seconds."""
    trace = make_timeline(ranks_of([ALL_REDUCE] * 3), spans)
    events = json.loads(json.dumps(trace))["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    tracks = {name: [] for name in names.values()}
    for one in events:
        if one["ph"] == "X":
            tracks[names[one["pid"], one["tid"]]].append((one["name"], one["ts"] / 1e6, one["dur"] / 1e6))
    return tracks, events


def test_ranks_have_tracks():
    """Each rank has a track, in their order; what has not ended lasts until the look, and is marked."""
    tracks, events = draw(
        span("Worker.train", actor_id(2), -40), span("Worker.__init__", actor_id(2), -50, -45), span("f", "", -30, -20),
        span("Worker.train", actor_id(0), -44, -4, failed=True),
    )  # fmt: skip
    assert tracks == {
        "Worker rank 0": [("Worker.train", 6.0, 40.0)],
        "Worker rank 2": [("Worker.__init__", 0.0, 5.0), ("Worker.train (running)", 10.0, 40.0)],
        "tasks, pid 1": [("f", 20.0, 10.0)],
    }
    assert [one["args"]["running"] for one in events if one["name"].endswith("(running)")] == [True]
    (failed,) = [one for one in events if one["ph"] == "i"]
    assert (failed["name"], failed["ts"]) == ("Worker.train failed", 46e6)
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["node n1 (10.0.0.1)"]


def test_overlapping_calls():
    """Calls of an async actor overlap, so each is on a track that is free."""
    serving = [
        span("Worker.serve", actor_id(1), -9, -5),
        span("Worker.serve", actor_id(1), -8),
        span("Worker.stop", actor_id(1), -4),
    ]
    tracks, _ = draw(*serving)
    assert {name: len(there) for name, there in tracks.items()} == {"Worker rank 1": 2, "Worker rank 1 (2)": 1}


def test_unknown_actor_and_node():
    """An actor that Ray has forgotten, on a node that has left, has a track too; secrets of names are redacted."""
    tracks, events = draw(span("go --token=abc", "ab" * 16, -9, -5, node="gone"))
    assert tracks == {"actor abababab": [("go --token=***", 0.0, 4.0)]}
    assert any(one["args"]["name"] == "node gone (not alive)" for one in events if one["ph"] == "M")


def test_nothing():
    """Without spans the trace is empty."""
    assert draw() == ({}, [])

# SPDX-License-Identifier: Apache-2.0
"""What programs use of a look: its arguments, the label of a process, and the report."""

import os
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, QUEUE, ranks_of, worker_sets

from fairlead_inspect import diagnose, label, look, write_report

# The variable that frameworks set.
LABEL = "FAIRLEAD_INSPECT_LABEL"


@pytest.fixture
def labelled(monkeypatch):
    """The variable of labels, which has its earlier value after the test."""
    monkeypatch.setenv(LABEL, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "local"}, "would start a cluster of its own"),
        ({"window_s": 0}, "window_s must be a positive number of seconds, got 0"),
        ({"timeout_s": "5"}, "timeout_s must be a positive number of seconds, got '5'"),
        ({"timeout_s": True}, "timeout_s must be a positive number of seconds, got True"),
        ({"address": "nowhere"}, "nowhere"),
    ],
)
def test_look_refuses(options, message):
    """A wrong argument is refused before anything is attached to."""
    with pytest.raises(ValueError, match=message):
        look(**options)
    assert not ray.is_initialized()


@pytest.mark.usefixtures("labelled")
def test_label():
    """The worker set of a process is that of its label, with its rank; the label of the latest call counts."""
    label(rank=0, group="first")
    given = label(rank=2, group="policy", world_size=3, coords={"dp": 2})
    assert given == {LABEL: os.environ[LABEL]}
    seen = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE])
    ranks = zip(seen.actors, (1, 0, 2), strict=True)
    labels = {one.pid: label(rank=rank, group="policy", world_size=3) for one, rank in ranks}
    processes = tuple(replace(one, environ=labels.get(one.pid, {})) for one in seen.processes)
    (policy,) = worker_sets(replace(seen, processes=processes))
    known = [policy[name] for name in ("key", "source", "confidence", "world_size")]
    assert known == ["policy", "label", "certain", 3]
    actors = [one.actor_id for one in seen.actors]
    members = [(member["rank"], member["key"]) for member in policy["members"]]
    assert members == [(0, actors[1]), (1, actors[0]), (2, actors[2])]


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": -1}, TypeError, "rank must be a whole number"),
        ({"rank": True}, TypeError, "rank must be a whole number"),
        ({"group": ""}, TypeError, "group must be the name"),
        ({"world_size": 3}, ValueError, "rank 3 is beyond the world size 3"),
        ({"coords": {"dp": "1"}}, TypeError, "dp must be a whole number"),
        ({"group": "g" * 1100}, ValueError, "1024 are read"),
    ],
)
def test_label_refuses(options, error, message):
    """A label that could not be read is refused, and not set."""
    with pytest.raises(error, match=message):
        label(**{"rank": 3, "group": "policy", **options})
    assert os.environ[LABEL] == ""


def test_report(tmp_path):
    """The page has the verdict and the stacks, and texts of the job are inert. It loads nothing, and runs nothing."""
    hung = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE])
    evil = "train.py --api-key hunter2 <script>alert(1)</script> \x1b[31m </pre>"
    snapshot = pickle.loads(pickle.dumps(replace(hung, jobs=(replace(hung.jobs[0], entrypoint=evil),))))
    write_report(snapshot, diagnose(snapshot), tmp_path / "why.html")
    text = (tmp_path / "why.html").read_text(encoding="utf-8")
    assert "rank 2 of Worker" in text
    assert "hunter2" not in text
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", text)
    assert "\x1b" not in text
    assert "next_batch" in text
    assert text.count("</pre>") == 1

# SPDX-License-Identifier: Apache-2.0
"""What Fairlead's groups add to a look: ranks, coordinates, who waits for others, and steps."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from seen import IDLE, LOOP, QUEUE, actor_id, fleet_of, label_of, process

from fairlead_inspect import _command, diagnose
from fairlead_inspect._show import draw_findings, to_json

MEET = LOOP  # a function of the job, which no rule knows to wait for other ranks


def labelled(stacks, labels, **given):
    """Return a job whose actors have labels of a group, and the driver does not wait for them."""
    return replace(fleet_of(stacks, driver_waits=False, **given), labels=labels)


@pytest.fixture
def hung():
    """A group of four, of which rank 3 waits in a queue, and the others in a function of the job."""
    labels = {actor_id(at): label_of(at, 4, waiting=at != 3, step=7, dp=at // 2, tp=at % 2) for at in range(4)}
    return labelled([MEET, MEET, MEET, QUEUE], labels)


def shown(snapshot, **how):
    file = io.StringIO()
    Console(file=file, width=160).print(draw_findings(snapshot, diagnose(snapshot), **how))
    return file.getvalue()


def test_late_rank(hung):
    """The rank that does not wait is late. Its group, rank and coordinates are certain, and its step is evidence."""
    (late,) = diagnose(hung)
    assert (late.kind, late.fleet, late.ranks, late.confidence, late.blames) == (
        "late",
        "policy",
        (3,),
        "certain",
        True,
    )
    assert (late.waiting.count, late.waiting.ranks) == (3, (0, 1, 2))
    assert ("group", "its last step is 7") in [(one.source, one.text) for one in late.evidence]
    assert "rank 3 (dp=1, tp=1) of policy on 10.0.0.1" in shown(hung)
    (fleet,) = to_json(hung, (late,))["jobs"][0]["worker_sets"]
    assert (fleet["key"], fleet["source"], fleet["world_size"]) == ("policy", "group", 4)
    assert [one["coords"] for one in fleet["members"]][2:] == [{"dp": 1, "tp": 0}, {"dp": 1, "tp": 1}]


def test_without_labels(hung):
    """Nothing but the record of the workers says that a function of the job waits for other ranks."""
    assert [one for one in diagnose(replace(hung, labels={})) if one.blames] == []


def test_common_coordinates():
    """Of several ranks those coordinates are shown that all of them have in common."""
    labels = {actor_id(at): label_of(at, 6, waiting=at < 4, dp=at // 2, tp=at % 2) for at in range(6)}
    assert "ranks 4-5 (dp=2) of policy" in shown(labelled([MEET] * 4 + [QUEUE] * 2, labels))


def test_idle_worker(hung):
    """A record that is older than the look does not count: a worker that runs nothing waits for no one."""
    (first, *others) = hung.processes
    looked = replace(hung, processes=(replace(process(first.pid, IDLE), environ=first.environ), *others))
    assert [one.ranks for one in diagnose(looked) if one.blames] in ([], [(3,)])
    assert all(0 not in one.waiting.ranks for one in diagnose(looked))


def test_two_groups_in_one_job():
    """Members of two groups are two fleets, whatever their environment says."""
    labels = {actor_id(at): label_of(at % 2, 2, group="ab"[at // 2], waiting=at == 0) for at in range(4)}
    found = diagnose(labelled([MEET, QUEUE, QUEUE, QUEUE], labels))
    assert [(one.fleet, one.ranks) for one in found if one.blames] == [("a", (1,))]


def test_processes(hung, monkeypatch, capsys):
    """`ps` shows coordinates and steps, and calls the members that wait for others collective."""
    monkeypatch.setattr("fairlead_inspect._command.look_here", lambda **_: hung)
    monkeypatch.setenv("COLUMNS", "200")
    assert _command.main(["ps", "--here"]) == 0
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("policy")}
    assert [*rows] == ["0", "1", "2", "3"]
    assert "3 (dp=1, tp=1)" in rows["3"]
    assert "collective, still" in rows["0"]
    assert "user, still" in rows["3"]
    assert "  7  " in rows["3"]

# SPDX-License-Identifier: Apache-2.0
"""What Fairlead's groups add to a look: ranks, coordinates, who waits for others, and steps."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from seen import IDLE, LOOP, QUEUE, actor_id, label_of, process, ranks_of, run, worker_sets

from fairlead_inspect import diagnose

MEET = LOOP  # a function of the job, which no rule knows to wait for other ranks


def labelled(stacks, labels, **given):
    """Return a job whose actors have labels of a group, and the driver does not wait for them."""
    return replace(ranks_of(stacks, driver_waits=False, **given), labels=labels)


@pytest.fixture
def hung():
    """A group of four, of which rank 3 waits in a queue, and the others in a function of the job."""
    labels = {actor_id(at): label_of(at, 4, waiting=at != 3, step=7, dp=at // 2, tp=at % 2) for at in range(4)}
    return labelled([MEET, MEET, MEET, QUEUE], labels)


def test_late_rank(hung):
    """The rank that does not wait is late. Its group, rank and coordinates are certain, and its step is evidence."""
    (late,) = diagnose(hung)
    assert (late.kind, late.worker_set, late.ranks, late.confidence, late.blames) == (
        "late",
        "policy",
        (3,),
        "certain",
        True,
    )
    assert (late.waiting.count, late.waiting.ranks) == (3, (0, 1, 2))
    assert ("group", "its last step is 7") in [(one.source, one.text) for one in late.evidence]
    assert "rank 3 (dp=1, tp=1) of policy on 10.0.0.1" in run(hung, "why")[1]
    (policy,) = worker_sets(hung)
    assert (policy["key"], policy["source"], policy["world_size"]) == ("policy", "group", 4)
    assert [member["coords"] for member in policy["members"]][2:] == [{"dp": 1, "tp": 0}, {"dp": 1, "tp": 1}]


def test_without_labels(hung):
    """Nothing but the record of the workers says that a function of the job waits for other ranks."""
    assert [one for one in diagnose(replace(hung, labels={})) if one.blames] == []


def test_idle_worker(hung):
    """A record that is older than the look does not count: a worker that runs nothing waits for no one."""
    (first, *others) = hung.processes
    looked = replace(hung, processes=(replace(process(first.pid, IDLE), environ=first.environ), *others))
    assert [one.ranks for one in diagnose(looked) if one.blames] in ([], [(3,)])
    assert all(0 not in one.waiting.ranks for one in diagnose(looked))


def test_two_groups_in_one_job():
    """Members of two groups are two worker sets, whatever their environment says."""
    labels = {actor_id(at): label_of(at % 2, 2, group="ab"[at // 2], waiting=at == 0) for at in range(4)}
    found = diagnose(labelled([MEET, QUEUE, QUEUE, QUEUE], labels))
    assert [(one.worker_set, one.ranks) for one in found if one.blames] == [("a", (1,))]


def test_processes(hung):
    """`ps` shows coordinates and steps, and calls the members that wait for others collective."""
    status, shown = run(hung, "ps")
    assert status == 0
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("policy")}
    assert [*rows] == ["0", "1", "2", "3"]
    assert "3 (dp=1, tp=1)" in rows["3"]
    assert "collective, still" in rows["0"]
    assert "user, still" in rows["3"]
    assert "  7  " in rows["3"]

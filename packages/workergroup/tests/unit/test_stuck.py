# SPDX-License-Identifier: Apache-2.0
"""The notes about stuck workers that are not where the others wait, from what their nodes report, without Ray."""

from dataclasses import replace

import pytest
from ray.util.placement_group import PlacementGroup

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._membership.core import Core
from fairlead_workergroup._membership.places import lay_out
from fairlead_workergroup._model import GroupState, Member, Restart
from fairlead_workergroup._status import ObservedGroup

from ..faults import let_nodes_report


def make_group(count):
    """Return what observes workers that do not exist."""
    group = PlacementGroup.empty()
    at = {"node_idx": 0, "node_id": "a", "node_ip": "", "node_rank": 0}
    slots = [Slot(placement_group=group, bundle_index=rank, local_rank=rank, **at) for rank in range(count)]
    sharding = NamedSharding.from_shape(worker=count)
    places = [replace(place, coords={"worker": place.rank}) for place in lay_out(slots, prefix="local")]
    group = ObservedGroup()
    group._core = core = Core("local", places, sharding, policy=Restart())
    members = [Member(place, actor_id=f"{place.rank:032x}", node_id="a", pid=1) for place in places]
    core.commit(GroupState(0, 0, sharding, tuple(members), phase="serving"))
    return group


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
        found = make_group(len(rows)).detect_stuck_workers(1.0)
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

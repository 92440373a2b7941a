# SPDX-License-Identifier: Apache-2.0
"""Replacements without Ray: the time of their parts when a node is about to end, and those that fail."""

from types import SimpleNamespace

import pytest
from ray.util.placement_group import PlacementGroup

from fairlead_placement import HeadTimeoutError, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._elastic.replace import Replace
from fairlead_workergroup._membership import steps
from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.model import Started
from fairlead_workergroup._membership.operations import RestartPolicy, Start
from fairlead_workergroup._membership.phases import Phase
from fairlead_workergroup._membership.roster import Roster
from fairlead_workergroup._start.layout import lay_out
from fairlead_workergroup._world import Deadline
from fairlead_workergroup.exceptions import LateWorker, WorkerFailureError

START_S = 120.0


def make_slot(node_id, index):
    return Slot(
        placement_group=PlacementGroup.empty(),
        bundle_index=index,
        node_idx=0,
        node_id=node_id,
        node_ip=node_id,
        node_rank=0,
        local_rank=index,
    )


class Crew:
    """Two workers that start at once, of which rank 0 is busy; it notes what happens."""

    policy = RestartPolicy(on_failure=False, max_restarts=0, scope="worker")

    def __init__(self, roster, room):
        self.roster, self.room, self.left, self.moved = roster, room, {}, []

    def find_lost(self):
        return {}

    def check_alike(self, what):
        pass

    def acquire(self, before, plan, undo, deadline):
        self.left["start"] = deadline.left()
        return SimpleNamespace(places=before.places, moved=plan.move[: self.room])

    def start(self, staged, ranks, undo, deadline, check):
        self.moved.append(list(ranks))
        made = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "00"))
        now = self.roster.now
        return [Started(made, staged.places[rank], now.processes[rank]) for rank in ranks]

    def facts(self, staged):
        return [SimpleNamespace(since=lambda before: {}) for _ in staged.places]

    def check_head(self):
        pass

    def end(self, ranks):
        return []

    def publish(self):
        pass

    commit = settle = end


class Requests:
    """The requests to the workers, and the methods of the user."""

    timeout_s = START_S

    def __init__(self):
        self.left, self.values = {}, {}

    def quiesce(self, members, deadline, check, *, all_calls):
        self.left["idle"] = deadline.left()
        return (LateWorker(0, {}, "a", 7, "step", 1.0),)

    def send_facts(self, member, changes, deadline, *, alone):
        pass

    def on_restart(self, ranks, values, deadline):
        self.values = values
        return []

    def hand_over(self, ranks, deadline, check, *, give_up):
        return {rank: f"state of {rank}" for rank in ranks}


def start(room=2):
    places = lay_out([make_slot("a", rank) for rank in range(2)], prefix="policy")
    roster, requests = Roster("policy", places, NamedSharding.from_shape(worker=2)), Requests()
    crew = Crew(roster, room)
    membership = Membership(roster, crew, requests, requests)
    membership.change(Start())
    crew.moved.clear()
    return crew, requests, membership


@pytest.fixture
def evacuate():
    """Return a function that replaces two workers, of which rank 0 is busy; it returns what happened."""

    def run(notice_s, room=2):
        crew, requests, membership = start(room)
        operation = Replace((0, 1), Deadline.after(notice_s), partly=True)
        membership.change(operation, Deadline.after(START_S))
        return {**crew.left, **requests.left}, crew.moved, requests.values

    return run


def test_idle_ranks_hand_over_within_the_notice(evacuate):
    """A busy rank has half of the notice, so that the others have the other half for their handover."""
    left, moved, values = evacuate(100.0)
    assert 40 < left["idle"] <= 50
    assert (moved, values) == ([[0, 1]], {1: "state of 1"})


@pytest.mark.parametrize("notice_s", [3.0, 0.01])
def test_short_notice(evacuate, notice_s):
    """Processes take their time to start, also when the node ends meanwhile, and an idle rank is still asked."""
    left, moved, values = evacuate(notice_s)
    assert START_S - 20 < left["start"] <= START_S
    assert 0 < left["idle"] <= steps.IDLE_S
    assert (moved, values) == ([[0, 1]], {1: "state of 1"})


def test_no_notice(evacuate):
    """Without a time, the calls before may take as long as in any replacement."""
    left, *_ = evacuate(None)
    assert START_S - 20 < left["idle"] <= left["start"] <= START_S


def test_room_for_some(evacuate):
    """An evacuation moves as many ranks as there is room for."""
    _, moved, _ = evacuate(None, room=1)
    assert moved == [[0]]


def test_silent_head(monkeypatch):
    """If the head is silent when old processes are about to end, none of them ends, and all ranks keep theirs."""
    crew, _, membership = start()

    def check_head():
        raise HeadTimeoutError("no answer")

    monkeypatch.setattr(crew, "check_head", check_head)
    monkeypatch.setattr(crew, "end", lambda ranks: pytest.fail("a process was ended"))
    with pytest.raises(HeadTimeoutError):
        membership.change(Replace((1,)), Deadline.after(START_S))
    now = crew.roster.now
    assert (now.epoch, now.lost, membership.phase, crew.moved) == (0, {}, Phase.SERVING, [])


def test_processes_that_do_not_end(monkeypatch):
    """Ranks whose old processes were told to end are lost, also if some are still there."""
    crew, _, membership = start()
    monkeypatch.setattr(crew, "end", lambda ranks: ["pid 7 on node a"])
    with pytest.raises(WorkerFailureError, match="pid 7 on node a"):
        membership.change(Replace((1,)), Deadline.after(START_S))
    now = crew.roster.now
    assert (now.epoch, list(now.lost), membership.phase, crew.moved) == (0, [1], Phase.SERVING, [])

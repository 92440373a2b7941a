# SPDX-License-Identifier: Apache-2.0
"""The time that the parts of a replacement have when a node is about to end, without Ray."""

import contextlib
from types import SimpleNamespace

import pytest

from fairlead_workergroup._elastic import replace
from fairlead_workergroup.exceptions import LateWorker, ResizeTimeoutError

START_S = 120.0


def make_slot(node_id, index):
    return SimpleNamespace(node_id=node_id, node_idx=node_id, bundle_index=index)


class Roster:
    """Two ranks on one node."""

    def __init__(self):
        slots = [make_slot("a", rank) for rank in range(2)]
        members = [SimpleNamespace(rank=rank, slot=slot, place=None) for rank, slot in enumerate(slots)]
        self.now = SimpleNamespace(members=members, is_broken=False, epoch=0)
        self.name_prefix, self.report = "policy", lambda change: None

    def snapshot(self):
        return Snapshot(self.now)

    check_alive = snapshot


class Snapshot(SimpleNamespace):
    """The members, by rank."""

    def __init__(self, now):
        super().__init__(**vars(now))

    def __getitem__(self, rank):
        return self.members[rank]


@pytest.fixture
def evacuate(monkeypatch):
    """Return a function that replaces two workers, of which rank 0 is busy; it returns what happened."""

    def run(notice_s, room=2):
        left, moved = {}, []

        def start_in(slots, deadline):
            left["start"] = deadline.left()
            return [SimpleNamespace(number=-1 - index) for index, _ in enumerate(slots)]

        def wait_until_idle(operation, members, **_):
            left["idle"] = operation.deadline.left()
            raise ResizeTimeoutError(operation.what, 1.0, [LateWorker(0, {}, "a", 7, "step", 1.0)], "")

        def on_handover(ranks):
            return {rank: f"state of {rank}" for rank in ranks}

        monkeypatch.setattr(replace, "wait_until_idle", wait_until_idle)
        roster = Roster()
        free = [make_slot("b", index) for index in range(room)]
        restarter = SimpleNamespace(
            change=lambda *_: contextlib.nullcontext(),
            take_turn=lambda *_: contextlib.nullcontext(),
            find_lost=dict,
            replace=lambda ranks, use, values: moved.append((ranks, sorted(use()), values)),
            methods=SimpleNamespace(on_handover=on_handover),
        )
        resources = SimpleNamespace(claim_free=lambda slots, count, partly: slots[:count])
        spec = SimpleNamespace(start_timeout_s=START_S, slots=lambda: free, concurrent=False)
        standbys = SimpleNamespace(
            check_alike=lambda what: None,
            check_slots=lambda slots: None,
            take=lambda places: {},
            give_back=lambda standbys: None,
            start_in=start_in,
        )
        sender = SimpleNamespace(restarter=restarter, roster=roster)
        launcher = SimpleNamespace(spec=spec, resources=resources)
        replace.Replacer(sender, launcher, standbys).evacuate([0, 1], notice_s)
        return left, moved

    return run


def test_idle_ranks_hand_over_within_the_notice(evacuate):
    """A busy rank has half of the notice, so that the others have the other half for their handover."""
    left, moved = evacuate(100.0)
    assert 40 < left["idle"] <= 50
    assert moved == [([0, 1], [0, 1], {1: "state of 1"})]


@pytest.mark.parametrize("notice_s", [3.0, 0.01])
def test_short_notice(evacuate, notice_s):
    """Processes take their time to start, also when the node ends meanwhile, and an idle rank is still asked."""
    left, moved = evacuate(notice_s)
    assert START_S - 20 < left["start"] <= START_S
    assert 0 < left["idle"] <= replace.IDLE_S
    assert moved == [([0, 1], [0, 1], {1: "state of 1"})]


def test_no_notice(evacuate):
    """Without a time, the calls before may take as long as in any replacement."""
    left, _ = evacuate(None)
    assert START_S - 20 < left["idle"] <= left["start"] <= START_S


def test_room_for_some(evacuate):
    """An evacuation moves as many ranks as there is room for, and is refused only if there is none."""
    _, moved = evacuate(None, room=1)
    assert [ranks for ranks, *_ in moved] == [[0]]
    with pytest.raises(ValueError, match="there are 0 that can be used"):
        evacuate(None, room=0)

# SPDX-License-Identifier: Apache-2.0
"""The thread that starts the standbys of a group, without Ray."""

import threading
from types import SimpleNamespace

import pytest

from fairlead_workergroup._lifecycle import standbys
from fairlead_workergroup._lifecycle.resources import Resources

SLOTS = [SimpleNamespace(node_idx=0, bundle_index=at, node_id=node_id, key=at) for at, node_id in enumerate("ab")]


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes the standbys of a group in two slots, given what starts one; it returns both."""

    def make(start):
        roster = SimpleNamespace(ending=False, is_over=False, connected=False, name_prefix="policy")
        roster.standby_metadata, roster.report, roster.lock = [], lambda change: None, threading.Lock()
        spec = SimpleNamespace(start_timeout_s=60.0)
        made = standbys.Standbys(SimpleNamespace(resources=Resources(roster), spec=spec), 2)
        monkeypatch.setattr(made, "start_in", lambda slots, deadline: start(made, slots))
        made._add_cold(SLOTS)
        return made, roster

    return make


def fill(made):
    made.fill()
    made._resources.join_threads()


def test_slots_that_cannot_be_used(make, monkeypatch):
    """No standby starts in a slot whose node drains; the slot is tried again."""
    started, usable = [], [SLOTS[1]]
    monkeypatch.setattr(standbys, "usable_slots", lambda slots: [slot for slot in slots if slot in usable])
    made, _ = make(lambda made, slots: started.extend(slots) or [SimpleNamespace(slot=slot) for slot in slots])
    fill(made)
    assert started == [SLOTS[1]]
    assert sorted(slot.key for slot in made.slots) == [0, 1]
    usable.append(SLOTS[0])
    fill(made)
    assert started == [SLOTS[1], SLOTS[0]]


@pytest.mark.parametrize("ends", [False, True])
def test_failure(make, monkeypatch, caplog, ends):
    """A standby that does not start is reported, unless the group or its Ray has ended meanwhile."""
    monkeypatch.setattr(standbys, "usable_slots", list)

    def start(made, slots):
        made._roster.is_over = ends
        raise RuntimeError("Ray has not been started yet")

    made, _ = make(start)
    fill(made)
    assert ("A standby of 'policy' did not start" in caplog.text) is not ends


def test_a_change_while_dead_standbys_end(make, monkeypatch):
    """A change that ends meanwhile leaves the group the slots of dead standbys whose processes are being ended."""
    made, roster = make(lambda made, slots: [])
    monkeypatch.setattr(standbys, "alive_nodes", lambda: {slot.node_id for slot in SLOTS})
    dead = [SimpleNamespace(number=-1 - slot.key, slot=slot, process=slot.key) for slot in SLOTS]
    made._cold, made._warm = [], dead
    verdicts = {slot.key: SimpleNamespace(is_lost=True) for slot in SLOTS}
    roster.judge = SimpleNamespace(ask=lambda processes, **_: verdicts)
    released = []
    claims = {slot.key: SimpleNamespace(release=lambda key=slot.key: released.append(key)) for slot in SLOTS}
    made._resources._claims.update(claims)
    monkeypatch.setattr(made._resources, "discard", lambda numbers: made._resources.keep_slots([]))
    made._drop_dead()
    assert sorted(slot.key for slot in made.slots) == [0, 1]
    assert (released, set(made._resources._claims)) == ([], {0, 1})


def test_two_threads_show(make, monkeypatch):
    """When two threads change the standbys at once, the state that is shown last is the last one."""
    made, roster = make(lambda made, slots: [])
    threads = [threading.Thread(target=made.give_back, args=([SimpleNamespace(slot=SLOTS[0])],))]

    def interrupt(_):
        """Let the other thread run at the worst moment, if it can."""
        if threads and not threads[-1].ident:
            threads[-1].start()
            threads[-1].join(0.5)
        return False

    monkeypatch.setattr(standbys.Standbys, "_is_over", property(interrupt))
    made._cold = SLOTS[1:]
    made._show()
    threads[0].join(30)
    assert [shown["state"] for shown in roster.standby_metadata] == ["warm", "starting"]

# SPDX-License-Identifier: Apache-2.0
"""The creation of placement groups and the wait for them, without Ray."""

import threading
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import HeadTimeoutError
from fairlead_placement._model import Node
from fairlead_placement._nodes import head
from fairlead_placement._nodes.head import head_deadline
from fairlead_placement._reserve import groups, slots
from fairlead_placement._reserve.groups import (
    BUNDLE_S,
    PLACING_S,
    Reserved,
    place_pinned,
    remove,
    wait_placed,
)
from fairlead_placement._reserve.slots import slots_of


@pytest.fixture
def waits(monkeypatch):
    """Place groups at scripted times of a clock that only waits move. Return the seconds of each wait."""
    waited = []

    def wait(refs, *, num_returns, timeout):
        due = sorted(ref for ref in refs)
        now = sum(waited)
        enough = due[num_returns - 1][0] <= now + timeout
        end = max(now, due[num_returns - 1][0]) if enough else now + timeout
        waited.append(end - now)
        ready = [ref for ref in refs if ref[0] <= end][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    return waited


def make_groups(*placed_at):
    return [SimpleNamespace(id=at, ready=lambda at=at, due=due: (due, at)) for at, due in enumerate(placed_at)]


def test_a_slow_group_does_not_discard_the_others(waits):
    """As long as Ray places one group after the other, all of them are waited for, however long that takes."""
    every = 0.9 * PLACING_S
    made = make_groups(*(every * (at + 1) for at in range(8)))
    assert wait_placed(made, [1] * 8) == made
    assert sum(waits) == pytest.approx(8 * every)


def test_a_lost_race(waits):
    """If Ray places no further group during a wait, no other follows, and the groups that are placed are known."""
    made = make_groups(0.1, 1e9, 0.2)
    assert wait_placed(made, [1] * 3) == [made[0], made[2]]
    assert sum(waits) == pytest.approx(2 * PLACING_S + 4 * BUNDLE_S)


def test_large_groups_may_take_longer(waits):
    """The time that Ray may take grows with the number of bundles."""
    made = make_groups(3 * PLACING_S)
    assert wait_placed(made, [1]) == []
    assert wait_placed(made, [round(3 * PLACING_S / BUNDLE_S)]) == made


def test_the_deadline_of_a_reservation(waits):
    """If Ray places nothing, the wait for thousands of bundles ends soon after the reservation's time."""
    made = make_groups(*[1e9] * 1000)
    assert wait_placed(made, [8] * 1000, deadline=30.0) == []
    assert sum(waits) == pytest.approx(30.0 + PLACING_S)


def test_a_reservation_of_what_is_free_now(waits):
    """Without any time to wait, Ray may place many groups, one after the other, but not without a limit."""
    made = make_groups(*(0.002 * at for at in range(1000)))
    assert wait_placed(made, [8] * 1000, deadline=0.0) == made
    waits.clear()
    slow = make_groups(*(0.9 * PLACING_S * at for at in range(1000)))
    few = wait_placed(slow, [1] * 1000, deadline=0.0)
    assert 0 < len(few) < 100
    assert sum(waits) == pytest.approx(PLACING_S + 1000 * BUNDLE_S)


def test_the_wait_is_not_quadratic(waits):
    """Many groups that Ray places quickly take one wait."""
    made = make_groups(*(at / 10_000 for at in range(1000)))
    assert len(wait_placed(made, [1] * 1000)) == 1000
    assert len(waits) == 1


def test_a_creation_fails(monkeypatch):
    """The error is raised, no further group is created, and those that exist are removed once they are placed."""
    created, steps = [], []

    def create(**_):
        if len(created) == 20:
            raise RuntimeError("the head is gone")
        created.append(SimpleNamespace())
        return created[-1]

    monkeypatch.setattr(groups, "placement_group", create)
    monkeypatch.setattr(groups, "wait_placed", lambda made, sizes, deadline: steps.append(len(sizes)) or [])
    monkeypatch.setattr(groups, "remove", lambda made: steps.append(made))
    with pytest.raises(RuntimeError, match="the head is gone"):
        place_pinned({str(at): [("node", {"CPU": 1.0})] for at in range(1000)})
    assert steps == [20, created]
    assert len(created) == 20


@pytest.mark.parametrize("count", [groups.ASKED_ALONE, groups.ASKED_ALONE + 1])
def test_rows_of_groups(monkeypatch, count):
    """Few groups are looked up one by one; the table, which lists all groups that have ever existed, is for many."""
    asked = []
    ids = {f"{at:036x}" for at in range(count)}

    def read(group=None):
        asked.append(group)
        if group is not None:
            return {"placement_group_id": group.id.hex(), "state": "CREATED"}
        return {f"{at:036x}": {"placement_group_id": f"{at:036x}", "state": "CREATED"} for at in range(1000)}

    monkeypatch.setattr(groups, "placement_group_table", read)
    assert {row["placement_group_id"] for row in groups._rows(ids)} == ids
    assert asked == [None] if count > groups.ASKED_ALONE else None not in asked


@pytest.fixture
def assigns(monkeypatch):
    """Run tasks here, where Ray has assigned a core of an accelerator to each of them (seam: Ray's functions)."""

    class Task:
        def __init__(self, function):
            self._function = function

        def options(self, **_):
            return self

        def remote(self):
            return self._function()

    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [], "neuron_cores": ["3"], "TPU": []})
    monkeypatch.setattr(ray, "remote", lambda **_: Task)
    monkeypatch.setattr(ray, "get", lambda refs, timeout: refs)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(slots, "read_nodes", lambda: (Node("a", "192.0.2.1", {}, {}, {}),))


def slot_of(bundle, capacity):
    (slot,) = slots_of([Reserved(SimpleNamespace(id=0), (0,), ("a",), (bundle,))], capacity, deadline=0.0)
    return slot


def test_a_worker_asks_for_everything_in_its_bundle(assigns):
    """A worker asks for a CPU and for its share of all other resources that the bundle holds."""
    assert slot_of({"CPU": 1.0, "neuron_cores": 1.0}, 1).worker_resources == {"CPU": 1, "neuron_cores": 1}
    assert slot_of({"CPU": 2.0, "licence": 3.0}, 2).worker_resources == {"CPU": 1, "licence": 1.5}


def test_a_slot_has_the_ids_of_any_accelerator(assigns):
    """The ids of a slot are those that Ray assigns for the accelerator of its bundle, whatever kind that is."""
    slot = slot_of({"CPU": 1.0, "neuron_cores": 1.0}, 1)
    assert slot.accelerators == {"neuron_cores": ("3",)}
    assert slot.accelerator_ids == ("3",)


def test_a_worker_does_not_ask_for_the_model(assigns):
    """The resource for the model of an accelerator chooses the node, and is no part of what workers share."""
    assert slot_of({"CPU": 8.0, "GPU": 1.0}, 2).worker_resources == {"CPU": 4, "GPU": 0.5}
    assert slot_of({"CPU": 5.0}, 2).worker_resources == {"CPU": 2}
    assert slot_of({"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}, 1).worker_resources == {"CPU": 1, "GPU": 1}


def test_removals_that_wait_for_the_head(monkeypatch, eventually):
    """A head that was silent removes all groups when it answers, also those of a cluster that was shut down second."""
    answers, removed = threading.Event(), []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    for module in (groups, head):
        monkeypatch.setattr(module, "connection", lambda: "here")
    monkeypatch.setattr(head, "LEAST_S", 0.1)
    monkeypatch.setattr(groups, "are_shown", lambda ids: True)
    monkeypatch.setattr(groups, "remove_placement_group", lambda group: answers.wait(60) and removed.append(group.id))
    try:
        for name in ("aa", "bb"):
            group = SimpleNamespace(id=SimpleNamespace(hex=lambda name=name: name))
            with head_deadline(0.1), pytest.raises(HeadTimeoutError, match="remove placement groups"):
                remove([group])
    finally:
        answers.set()
    assert eventually(lambda: sorted(one.hex() for one in removed) == ["aa", "bb"], 20)

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
    NO_ROOM_S,
    PLACING_S,
    Reserved,
    place_pinned,
    remove,
    wait_placed,
)
from fairlead_placement._reserve.slots import slots_of


class Table:
    """Ray's table of placement groups, each of which is placed, or found to have no room, at a scripted time.

    A clock that only pauses move shows the time.
    """

    def __init__(self, *placed_at, lacks_from=()):
        self.now, self.looks = 0.0, 0
        ids = [SimpleNamespace(hex=lambda at=at: f"{at:036x}") for at in range(len(placed_at))]
        self.groups = [SimpleNamespace(id=one) for one in ids]
        self.placed_at = {group.id.hex(): at for group, at in zip(self.groups, placed_at, strict=True)}
        self.lacks_from = {self.groups[at].id.hex(): since for at, since in dict(lacks_from).items()}

    def sleep(self, seconds):
        self.now += seconds

    def rows(self, ids):
        self.looks += 1
        for group_id in ids:
            is_placed = self.now >= self.placed_at[group_id]
            lacks = self.now >= self.lacks_from.get(group_id, 1e9)
            state = "FINISHED" if is_placed else "NO_RESOURCES" if lacks else "QUEUED"
            yield {
                "placement_group_id": group_id,
                "state": "CREATED" if is_placed else "PENDING",
                "bundles": {0: {}},
                "bundles_to_node_id": {0: "node"},
                "stats": {"scheduling_state": state},
            }

    def wait(self, monkeypatch, **options):
        """Return the numbers of the groups that `wait_placed` finds placed, and how long it waits."""
        monkeypatch.setattr(groups, "_rows", lambda ids: list(self.rows(ids)))
        monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        placed = wait_placed(self.groups, **options)
        return [at for at, nodes in enumerate(placed) if nodes == ("node",)], self.now


def test_a_busy_raylet_is_no_lost_race(monkeypatch):
    """A group that Ray is about to place is waited for, even without any time of the reservation."""
    assert Table(2.5).wait(monkeypatch, deadline=0.0) == ([0], pytest.approx(2.5, abs=0.3))
    placed, waited = Table(1e9).wait(monkeypatch, deadline=0.0)
    assert (placed, waited) == ([], pytest.approx(PLACING_S, abs=0.3))
    placed, waited = Table(100.0).wait(monkeypatch, deadline=200.0)
    assert placed == [0]


def test_a_lost_race(monkeypatch):
    """If Ray has found no room for a group, the wait ends soon, and the groups that are placed are known."""
    placed, waited = Table(0.1, 1e9, 0.2, lacks_from={1: 0.05}).wait(monkeypatch, deadline=600.0)
    assert placed == [0, 2]
    assert NO_ROOM_S <= waited <= NO_ROOM_S + 1.0
    # Ray's views of what is free may differ for some moments.
    assert Table(0.9, lacks_from={0: 0.0}).wait(monkeypatch, deadline=0.0)[0] == [0]


def test_a_wait_that_is_not_wanted_any_more(monkeypatch):
    """A check that raises ends the wait."""
    with pytest.raises(KeyError):
        Table(1e9).wait(monkeypatch, deadline=600.0, check=lambda: {}["shut down"])


def test_a_creation_fails(monkeypatch):
    """The error is raised, no further group is created, and those that exist are removed once they are placed."""
    created, steps = [], []

    def create(**_):
        if len(created) == 20:
            raise RuntimeError("the head is gone")
        created.append(SimpleNamespace(id=bytes([len(created)])))
        return created[-1]

    monkeypatch.setattr(groups, "placement_group", create)
    monkeypatch.setattr(groups, "wait_placed", lambda made, **_: steps.append(len(made)) or [])
    monkeypatch.setattr(groups, "remove", lambda made: steps.append(made))
    with pytest.raises(RuntimeError, match="the head is gone"):
        place_pinned({str(at): [("node", {"CPU": 1.0})] for at in range(1000)})
    assert steps == [20, created]
    assert len(created) == 20


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
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(slots, "read_nodes", lambda **_: (Node("a", "192.0.2.1", {}, {}, {}),))


def slot_of(bundle, capacity):
    (slot,) = slots_of([Reserved(SimpleNamespace(id=0), (0,), ("a",), (bundle,))], capacity, deadline=0.0)
    return slot


def test_a_worker_asks_for_everything_in_its_bundle(assigns):
    """A worker asks for a CPU and for its share of all other resources that the bundle holds."""
    assert slot_of({"CPU": 1.0, "neuron_cores": 1.0}, 1).worker_resources == {"CPU": 1, "neuron_cores": 1}
    assert slot_of({"CPU": 2.0, "licence": 3.0}, 2).worker_resources == {"CPU": 1, "licence": 1.5}


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

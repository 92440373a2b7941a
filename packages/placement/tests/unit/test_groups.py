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
    Reserved,
    place_pinned,
    remove,
)
from fairlead_placement._reserve.slots import slots_of


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

# SPDX-License-Identifier: Apache-2.0
"""The creation of placement groups and the wait for them, without Ray."""

import threading
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import HeadTimeoutError
from fairlead_placement._nodes import head
from fairlead_placement._reserve import groups
from fairlead_placement.extension import head_deadline
from fairlead_placement.extension import remove_placement_groups as remove


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
        groups.create_groups([{"name": str(number)} for number in range(1000)], deadline=0.0)
    assert steps == [20, created]
    assert len(created) == 20


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

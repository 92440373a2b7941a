# SPDX-License-Identifier: Apache-2.0
"""Tests that the simulation finds defects that the group once had, when their fixes are taken back."""

from dataclasses import replace

import pytest

from fairlead_workergroup._elastic.resize import Resize
from fairlead_workergroup._lifecycle import crew, resources, standbys
from fairlead_workergroup._membership.change import Change
from fairlead_workergroup._membership.facts import WorkerFacts

from .exploration import explore, shrink
from .scripts import run_group

MOST_RUNS = 1000
FEW_TRIES = 50


def send_only_the_epoch(patch):
    """Survivors of a restart or a replacement are sent the number of the epoch, and no other facts."""
    since = WorkerFacts.since

    def reverted(facts, before):
        if before is None or before.world_size != facts.world_size:
            return since(facts, before)
        return {"epoch": facts.epoch}

    patch.setattr(WorkerFacts, "since", reverted)


def forget_the_scope(patch):
    """A resize restarts only the lost ranks, also with scope "group"."""
    plan = Resize.plan

    class Asked:
        def __init__(self, asked):
            self.policy = replace(asked.policy, scope="worker")
            self._asked = asked

        def __getattr__(self, name):
            return getattr(self._asked, name)

    patch.setattr(Resize, "plan", lambda self, now, ask: plan(self, now, Asked(ask)))


def use_dead_slots(patch):
    """Slots of dead nodes are chosen."""
    for module in (crew, resources, standbys):
        patch.setattr(module, "usable_slots", list)


def undo_after_the_switch(patch):
    """A change that was interrupted is undone after it has ended old workers."""
    patch.setattr(Change, "seal", lambda change: None)


# Each with the rule that it breaks.
@pytest.mark.parametrize(
    ("revert", "rule"),
    [
        (send_only_the_epoch, "stale facts"),
        (forget_the_scope, "waits in vain"),
        (use_dead_slots, "dead slot"),
        (undo_after_the_switch, "damage"),
    ],
)
def test_reverted(revert, rule, monkeypatch):
    """A run within the first ones breaks the rule, and its history can be shrunk."""
    with monkeypatch.context() as patch:
        revert(patch)
        report = explore(run_group, range(MOST_RUNS))
        assert report.failed is not None
        assert str(report.failed.failure).startswith(f"{rule}: ")
        shrunk = shrink(run_group, report.failed, FEW_TRIES)
        assert len(shrunk.choices) < len(report.failed.choices)

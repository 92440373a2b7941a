# SPDX-License-Identifier: Apache-2.0
"""Random calls of the job in `machine.py`, and losses that other systems have reported as scenarios of it.

Its model checks the job after each call: no prompt is lost or trained twice, none is too old, every payload is released
once, and the job can always be brought to its end.
"""

import pytest
from hypothesis import settings
from machine import Machine

from fairlead_rollouts import Completeness, LedgerConfig

pytestmark = pytest.mark.usefixtures("no_thread")


class Often(Machine):
    """The same for longer."""


# 2,000 steps, and 20,000 each night.
Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
Often.TestCase.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
TestOften = pytest.mark.nightly(Often.TestCase)


class Scenario(Machine):
    """Each method is a word of a scenario."""

    leased = ()

    def lease_all(self):
        self.leased = [*self.leased, *self.ledger.lease(1000)]

    def finish(self):
        """Finish all that is leased."""
        while self.leased:
            self.finish_all_of(self.leased.pop())

    def finish_others(self):
        """The same, but for the first lease, which is that of a straggler."""
        while len(self.leased) > 1:
            self.finish_all_of(self.leased.pop())

    def fail_one(self):
        """Let a sample of the first lease fail, and finish the other one."""
        lease = self.leased.pop(0)
        self.ledger.fail(lease, [1], reason="it broke")
        self.ledger.finish(lease, 0, self.ref())

    def fail_all(self):
        """Let the first lease fail. A late result of it is refused."""
        lease = self.leased.pop(0)
        self.ledger.fail(lease, reason="it broke")
        assert not self.ledger.finish(lease, 0, self.ref())

    def claim_next(self):
        """Collect a batch, as a trainer does that prefetches."""
        self.claim(2, None)

    def train_step(self):
        if not self.steps:
            self.claim_next()
        self.advance(True)

    def save_all(self):
        self.save(commit=True)

    def restart(self):
        """Crash, and resume from the last checkpoint with as much work as a job has that never crashed."""
        self.leased = []
        self.crash(1)
        numbers = self.ledger.statistics()
        assert numbers.finished + numbers.room <= self.config.most_open


# A name, the reports that it reproduces, and what happens until everything is trained.
CASES = (
    ("checkpoint_ahead_of_training", "NeMo RL #3599, #3429", "lease_all finish_others train_step save_all restart"),
    ("one_step_prefetch", "verl #4199", "lease_all finish train_step claim_next save_all restart"),
    ("surplus_is_kept", "slime #2238, NeMo RL #3599", "lease_all finish train_step save_all restart"),
    ("oversampled_buffer", "OpenRLHF #1322", "lease_all finish save_all restart"),
    ("exhausted_at_boundary", "vime #324", "finish_everything save_all restart"),
    ("failure_is_not_a_sample", "NeMo RL #3589", "lease_all fail_one"),
    ("sample_ids_survive_retry", "NeMo RL #4013, #3882", "lease_all fail_one lease_all finish_others"),
    ("partial_dispatch_cancelled", "NeMo RL #3923, TRL #7176", "lease_all fail_all"),
    ("resume_does_not_over_admit", "verl #7759, AReaL #1345, #1388", "lease_all finish train_step save_all restart"),
    ("drop_moves_the_cursor", "TRL #7274", "lease_all fail_all finish train_step save_all restart"),
    ("bound_includes_queue_time", "prime-rl #3313, slime #1800", "lease_all finish_others train_step lease_all finish"),
    ("version_from_lost_branch", "", "lease_all finish save_all train_step lease_all finish restart"),
    ("work_between_checkpoints", "verl #7579", "lease_all finish train_step save_all lease_all finish flush restart"),
)


@pytest.mark.parametrize(("name", "reports", "words"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("mode", ["directory", "both", "file"])
def test_case(name, reports, words, mode):
    """No prompt is lost or trained twice, none is too old, and only finished samples are trained."""
    completeness = Completeness(max_attempts=1 if name == "drop_moves_the_cursor" else 3)
    scenario = Scenario()
    scenario.begin(LedgerConfig(group_size=2, groups_per_version=2, max_staleness=1, completeness=completeness), mode)
    for word in words.split():
        getattr(scenario, word)()
        scenario.invariants_hold()
    scenario.teardown()

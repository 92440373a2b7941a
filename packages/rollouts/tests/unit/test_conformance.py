# SPDX-License-Identifier: Apache-2.0
"""Losses that other systems have reported, as scenarios with a ledger, and the account that each has to pass."""

from collections import Counter

import pytest

from fairlead_rollouts import Claim, Completeness, Ledger, LedgerConfig, Ref

SIZE, PLACES, STALENESS = 2, 2, 1


class Run:
    """One epoch of prompts, one step for each version. Each method without arguments is a word of a scenario."""

    def __init__(self, folder, prompts, attempts):
        self.folder, self.prompts, self.step, self.saves = folder, prompts, 0, 0
        self.config = LedgerConfig(
            group_size=SIZE,
            groups_per_version=PLACES,
            max_staleness=STALENESS,
            completeness=Completeness(max_attempts=attempts),
        )
        self.ledger = Ledger(self.config, range(prompts))
        self.open, self.ready, self.trained, self.saved, self.finished = [], [], [], [], set()
        self.opened = self.worst = 0
        self.save()

    def lease(self):
        """Lease all that there is room for."""
        self.open += self.ledger.lease(1000)

    def finish(self):
        """Finish all leases."""
        while self.open:
            self.finish_last()

    def finish_half(self):
        for _ in range(len(self.open) // 2):
            self.finish_last()

    def finish_last(self):
        """Finish all samples of the last lease: the first one is that of the straggler."""
        lease = self.open.pop()
        for sample in lease.samples:
            payload = f"{lease.token:x}-{sample}"
            if self.ledger.finish(lease, sample, Ref(payload, durable=True)):
                self.finished.add(payload)

    def finish_others(self):
        while len(self.open) > 1:
            self.finish_last()

    def fail_one(self):
        """Let a sample of the first lease fail, and finish the other one."""
        lease = self.open.pop(0)
        self.ledger.fail(lease, [1], reason="it broke")
        self.open.append(lease)
        self.finish_last()

    def fail_all(self):
        """Let all samples of the first lease fail; a late result of it is refused."""
        lease = self.open.pop(0)
        for sample in lease.samples:
            self.ledger.fail(lease, [sample], reason="it broke")
        assert not self.ledger.finish(lease, 0, Ref("late"))

    def claim(self):
        """Collect the next batch, as a trainer does that prefetches."""
        step = self.step + len(self.ready) + 1
        claim = self.ledger.claim(step, PLACES)
        if not isinstance(claim, Claim) and claim.reason == "exhausted" and claim.have:
            claim = self.ledger.claim(step, claim.have)
        self.ready += [claim] if isinstance(claim, Claim) else []

    def train(self):
        """Train a step and publish the next version, if a step can be trained."""
        self.ready or self.claim()
        if not self.ready:
            return False
        claim = self.ready.pop(0)
        self.step = claim.step
        self.ledger.advance(self.ledger.version + 1, trained=claim.step)
        for group in claim.groups:
            self.trained += [(group.prompt_id, sample.index, sample.ref.value) for sample in group.samples]
            self.worst = max(self.worst, claim.version - group.oldest_version)
        return True

    def save(self):
        """Write a checkpoint."""
        self.saves += 1
        self.checkpoint = self.step, self.ledger.version, self.folder / str(self.saves)
        self.checkpoint[2].mkdir()
        self.ledger.prepare(self.step, self.checkpoint[2])
        self.saved = list(self.trained)

    def restart(self):
        """Crash, and resume from the last checkpoint."""
        self.step, version, directory = self.checkpoint
        self.open, self.ready, self.trained = [], [], list(self.saved)
        self.ledger = Ledger.restore(
            self.config, range(self.prompts), step=self.step, version=version, directory=directory
        )
        numbers = self.ledger.statistics()
        self.opened = numbers.finished + numbers.room

    def drain(self):
        """Finish everything, and train until nothing is left."""
        idle = 0
        while idle < 3:
            self.lease()
            leased = bool(self.open)
            self.finish()
            idle = 0 if self.train() or leased else idle + 1

    def drain_slowly(self):
        """The same, but the first lease is a straggler in each turn: nothing else can be trained at some moment."""
        for _ in range(60):
            self.lease()
            self.finish_others()
            if not self.train():
                self.finish()


# A name, the reports that it reproduces, and what happens until everything is drained.
CASES = (
    ("checkpoint_ahead_of_training", "NeMo RL #3599, #3429", "lease finish_half train save restart"),
    ("one_step_prefetch", "verl #4199", "lease finish train claim save restart"),
    ("surplus_is_kept", "slime #2238, NeMo RL #3599", "lease finish train save restart"),
    ("oversampled_buffer", "OpenRLHF #1322", "lease finish save restart"),
    ("exhausted_at_boundary", "vime #324", "drain save restart"),
    ("failure_is_not_a_sample", "NeMo RL #3589", "lease fail_one"),
    ("sample_ids_survive_retry", "NeMo RL #4013, #3882", "lease fail_one lease finish_others"),
    ("partial_dispatch_cancelled", "NeMo RL #3923, TRL #7176", "lease fail_all"),
    ("resume_does_not_over_admit", "verl #7759, AReaL #1345, #1388", "lease finish train lease finish save restart"),
    ("drop_moves_the_cursor", "TRL #7274", "lease fail_all finish train save restart"),
    ("bound_includes_queue_time", "prime-rl #3313, slime #1800", "lease finish_others train lease finish_others train"),
    ("slow_rollouts_are_trained", "tinker-cookbook #822", "drain_slowly"),
    ("version_from_lost_branch", "", "lease finish_half save train lease finish restart"),
    ("work_between_checkpoints", "verl #7579", "lease finish train save lease finish restart"),
)


@pytest.mark.parametrize(("name", "reports", "words"), CASES, ids=[case[0] for case in CASES])
def test_case(name, reports, words, tmp_path):
    """No prompt is lost or trained twice, none is too old, and only finished samples are trained."""
    drops = name == "drop_moves_the_cursor"
    run = Run(tmp_path, 13, attempts=1 if drops else 3)
    for word in words.split():
        getattr(run, word)()
    run.drain()
    trained = Counter((prompt_id, sample) for prompt_id, sample, _ in run.trained)
    assert trained == Counter((prompt_id, sample) for prompt_id in range(drops, 13) for sample in range(SIZE))
    assert {payload for _, _, payload in run.trained} <= run.finished
    assert run.worst <= STALENESS
    assert run.opened <= (STALENESS + 1) * PLACES, "more groups are open after the resume than the bound allows"


def test_finished_groups_are_not_generated_again(tmp_path):
    """Groups that are finished at a checkpoint are there after a resume (NeMo RL #3480, #4067)."""
    run = Run(tmp_path, 13, attempts=3)
    for word in ("lease", "finish", "train", "save", "restart", "lease"):
        getattr(run, word)()
    assert [lease.prompt_id for lease in run.open] == [4, 5]
    run.claim()
    assert [group.prompt_id for group in run.ready[0].groups] == [2, 3]

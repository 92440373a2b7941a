# SPDX-License-Identifier: Apache-2.0
"""Losses that other systems have reported, as scenarios with a ledger, and the account that each has to pass."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fairlead_rollouts import Claim, Completeness, Ledger, LedgerConfig, Ref


@dataclass(frozen=True, kw_only=True)
class Job:
    """One epoch of prompts, one step for each version."""

    prompts: int
    group_size: int = 2
    groups_per_step: int = 2
    max_staleness: int = 1
    max_attempts: int = 3  # failures of a group after which it is dropped


class Run:
    """A job, with an account of everything that was trained since the last checkpoint and before it."""

    def __init__(self, job, folder):
        self.job, self.folder, self.step, self.saves = job, folder, 0, 0
        self.config = LedgerConfig(
            group_size=job.group_size,
            groups_per_version=job.groups_per_step,
            max_staleness=job.max_staleness,
            completeness=Completeness(max_attempts=job.max_attempts),
        )
        self.ledger = Ledger(self.config, range(job.prompts))
        self.ready, self.trained, self.saved = [], [], []
        self.payloads, self.leased, self.worst, self.wrong = set(), Counter(), 0, []
        self.save()

    def lease(self, count=1000):
        """Lease work, and count how often each prompt was leased."""
        leases = self.ledger.lease(count)
        self.leased.update(lease.prompt_id for lease in leases)
        return leases

    def finish_one(self, lease, sample, payload):
        return self.ledger.finish(lease, sample, Ref(payload, durable=True))

    def fail(self, lease, sample):
        self.ledger.fail(lease, [sample], reason="it broke")

    def finish(self, *leases, tag=""):
        """Finish all samples of some leases."""
        for lease in leases:
            for sample in lease.samples:
                payload = f"{lease.prompt_id}-{sample}-{self.leased[lease.prompt_id]}{tag}"
                if self.finish_one(lease, sample, payload):
                    self.payloads.add(payload)

    def claim_next(self):
        """Collect the next batch, as a trainer does that prefetches; return whether there is one."""
        step = self.step + len(self.ready) + 1
        claim = self.ledger.claim(step, self.job.groups_per_step)
        if not isinstance(claim, Claim) and claim.reason == "exhausted" and claim.have:
            claim = self.ledger.claim(step, claim.have)
        self.ready += [claim] if isinstance(claim, Claim) else []
        return bool(self.ready)

    def train(self):
        """Train a step and publish the next version, if a step can be trained."""
        if not self.ready and not self.claim_next():
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
        self.ready = []
        self.ledger = Ledger.restore(
            self.config, range(self.job.prompts), step=self.step, version=version, directory=directory
        )
        self.trained, self.leased = list(self.saved), Counter()

    def drain(self, leases=()):
        """Finish everything, and train until nothing is left."""
        self.finish(*leases)
        idle = 0
        while idle < 3:
            leases = self.lease()
            self.finish(*leases)
            idle = 0 if self.train() or leases else idle + 1


@dataclass(frozen=True)
class Case:
    """A scenario, and where it was reported."""

    name: str
    issues: str  # the reports that it reproduces
    play: Callable[[Run], object]
    job: Job = field(default_factory=lambda: Job(prompts=12))
    dropped: tuple[int, ...] = ()  # prompts that the scenario drops


def _ahead(run):
    leases = run.lease()
    run.finish(*leases[: len(leases) // 2])
    run.train()
    run.save()
    run.restart()
    run.drain()


def _prefetch(run):
    run.finish(*run.lease())
    run.train()
    run.claim_next()
    run.save()
    run.restart()
    run.drain()


def _surplus(run):
    run.finish(*run.lease())
    run.train()
    run.save()
    run.restart()
    run.drain()


def _durable(run):
    run.finish(*run.lease())
    run.train()
    run.save()
    finished = set(range(4)) - {prompt for prompt, _, _ in run.trained}
    run.restart()
    if again := finished & {lease.prompt_id for lease in run.lease()}:
        run.wrong.append(f"finished prompts {sorted(again)} are generated again")


def _oversampled(run):
    run.finish(*run.lease())
    run.save()
    run.restart()
    run.drain()


def _boundary(run):
    run.drain()
    run.save()
    run.restart()
    run.drain()


def _failure(run):
    first, *others = run.lease()
    run.fail(first, 1)
    run.finish_one(first, 0, "0-0-1")
    run.payloads.add("0-0-1")
    run.drain(others)


def _retry(run):
    first, second, *others = run.lease()
    run.fail(first, 0)
    run.finish(second, *others)
    run.payloads |= {"late sample"} if run.finish_one(first, 1, "late sample") else set()
    run.drain()


def _cancelled(run):
    first, *others = run.lease()
    for sample in first.samples:
        run.fail(first, sample)
    run.drain(others)


def _over_admit(run):
    limit = (run.job.max_staleness + 1) * run.job.groups_per_step
    for _ in range(2):
        run.finish(*run.lease())
        run.train()
    run.save()
    run.restart()
    leases = run.lease()
    run.finish(*leases)
    before = len(run.trained)
    while run.train():
        pass
    opened = max(len(leases), (len(run.trained) - before) // run.job.group_size)
    if opened > limit:
        run.wrong.append(f"{opened} groups were open after the resume, and the bound allows {limit}")
    run.drain()


def _drop(run):
    first, *others = run.lease()
    for sample in first.samples:
        run.fail(first, sample)
    run.finish(*others)
    run.train()
    run.save()
    run.restart()
    run.drain()


def _queue(run):
    slow, *leases = run.lease()
    run.finish(*leases)
    for _ in range(3):
        run.train()
        run.finish(*run.lease())
    run.finish(slow)
    run.drain()


def _slow(run):
    late = []
    for turn in range(30):
        leases = run.lease()
        late += [(turn, lease) for lease in leases if lease.prompt_id % 10 == 0]
        run.finish(*(lease for lease in leases if lease.prompt_id % 10))
        stepped = run.train()
        due = [lease for began, lease in late if not stepped or turn - began >= 3]
        run.finish(*due)
        late = [(began, lease) for began, lease in late if lease not in due]
    slow = len({prompt for prompt, _, _ in run.trained if prompt % 10 == 0})
    everything = len({prompt for prompt, _, _ in run.trained})
    if everything and slow < 0.05 * everything:
        run.wrong.append(f"{slow} of {everything} trained prompts are slow, and 10 % of all prompts are")
    run.drain([lease for _, lease in late])


def _late(run):
    first, *others = run.lease()
    for sample in first.samples:
        run.fail(first, sample)
    again = [lease for lease in run.lease() if lease.prompt_id == first.prompt]
    for sample in first.samples:
        if run.finish_one(first, sample, f"late {sample}"):
            run.wrong.append("the result of an ended attempt was accepted")
    run.drain([*again, *others])


def _lost_branch(run):
    leases = run.lease()
    run.finish(*leases[:2])
    run.save()
    run.train()
    run.finish(*leases[2:], *run.lease(), tag=" of lost weights")
    run.restart()
    run.drain()
    lost = [payload for _, _, payload in run.trained if payload.endswith("of lost weights")]
    if lost:
        run.wrong.append(f"{len(lost)} samples of weights that no longer exist were trained")


def _between(run):
    run.finish(*run.lease())
    run.train()
    run.save()
    run.finish(*run.lease())
    run.restart()
    run.drain(run.lease())


CASES = (
    Case("checkpoint_ahead_of_training", "NeMo RL #3599, #3429", _ahead),
    Case("one_step_prefetch", "verl #4199", _prefetch),
    Case("gap_fill_tail", "NeMo RL #3599", _surplus, Job(prompts=13)),
    Case("surplus_is_kept", "slime #2238", _surplus),
    Case("oversampled_buffer", "OpenRLHF #1322", _oversampled),
    Case("exhausted_at_boundary", "vime #324", _boundary),
    Case("failure_is_not_a_sample", "NeMo RL #3589", _failure),
    Case("resume_keeps_next_batch", "NeMo RL #3480, #4067", _durable),
    Case("sample_ids_survive_retry", "NeMo RL #4013, #3882", _retry),
    Case("partial_dispatch_cancelled", "NeMo RL #3923, TRL #7176", _cancelled),
    Case("resume_does_not_over_admit", "verl #7759, AReaL #1345, #1388", _over_admit),
    Case("drop_moves_the_cursor", "TRL #7274", _drop, Job(prompts=12, max_attempts=1), dropped=(0,)),
    Case("bound_includes_queue_time", "prime-rl #3313, slime #1800", _queue),
    Case("slow_rollouts_are_trained", "tinker-cookbook #822", _slow, Job(prompts=100)),
    Case("late_result_is_fenced", "", _late),
    Case("version_from_lost_branch", "", _lost_branch),
    Case("work_between_checkpoints", "verl #7579", _between),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, tmp_path):
    """No prompt is lost or trained twice, none is too old, and only finished samples are trained."""
    run = Run(case.job, tmp_path)
    case.play(run)
    per_prompt = Counter(prompt for prompt, _, _ in run.trained)
    samples = Counter((prompt, sample) for prompt, sample, _ in run.trained)
    wrong = list(run.wrong)
    complete = case.name != "resume_keeps_next_batch"  # its scenario ends before the training does
    if lost := [one for one in range(case.job.prompts) if complete and not per_prompt[one] and one not in case.dropped]:
        wrong.append(f"prompts {lost} were never trained")
    if doubled := sorted({prompt for (prompt, _), times in samples.items() if times > 1}):
        wrong.append(f"prompts {doubled} were trained twice")
    if partial := sorted(one for one, times in per_prompt.items() if times % case.job.group_size):
        wrong.append(f"prompts {partial} were trained with missing samples")
    if strange := sorted({payload for _, _, payload in run.trained} - run.payloads):
        wrong.append(f"payloads {strange[:3]} were never finished")
    if run.worst > case.job.max_staleness:
        wrong.append(f"staleness reached {run.worst}, and the bound is {case.job.max_staleness}")
    assert wrong == []

# SPDX-License-Identifier: Apache-2.0
"""Losses that other systems have reported, as scenarios, and the account that each of them has to pass.

A scenario drives a *system*: the buffer, the loader and the checkpoints of a framework, with eight methods.
`test_conformance.py` has one over the ledger.

- `start(job)` begins a job from nothing.
- `lease(count)` returns up to `count` pieces of `Work`, as many as admission allows.
- `finish(work, sample, payload)` accepts a finished sample, and returns False if it comes too late.
- `fail(work, sample)` accepts that a sample has failed.
- `train(claim_only=False)` trains one step, publishes the next version and returns a `Step`; None if no step can be
  trained now. With `claim_only` the next batch is collected and not trained, as a trainer does that prefetches.
- `save()` writes a checkpoint, `crash()` loses everything that is in memory, and `resume()` continues from the last
  checkpoint.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The run that a system has to make: one epoch of the prompts 0, 1, 2, and so on, one step for each version."""

    prompts: int
    group_size: int = 2
    groups_per_step: int = 2
    max_staleness: int = 1
    max_attempts: int = 3  # failures of a group after which it is dropped


@dataclass(frozen=True, slots=True)
class Work:
    """Siblings that a system gives to a generator; `handle` is what the system needs to recognise the result."""

    prompt: int
    samples: tuple[int, ...]
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Step:
    """The prompt, the sample and the payload of each sample that one step trained, and the greatest staleness."""

    samples: tuple[tuple[int, int, str], ...]
    staleness: int


@dataclass
class Run:
    """A job on a system, with an account of everything that was trained since the last checkpoint and before it."""

    system: Any
    job: Job
    trained: list[tuple[int, int, str]] = field(default_factory=list)
    saved: list[tuple[int, int, str]] = field(default_factory=list)
    payloads: set[str] = field(default_factory=set)
    leased: Counter[int] = field(default_factory=Counter)
    worst: int = 0
    wrong: list[str] = field(default_factory=list)

    def lease(self, count: int = 1000) -> list[Work]:
        """Lease work, and count how often each prompt was leased."""
        found = self.system.lease(count)
        self.leased.update(work.prompt for work in found)
        return found

    def finish(self, *works: Work, tag: str = "") -> None:
        """Finish all samples of some work."""
        for work in works:
            for sample in work.samples:
                payload = f"{work.prompt}-{sample}-{self.leased[work.prompt]}{tag}"
                if self.system.finish(work, sample, payload):
                    self.payloads.add(payload)

    def train(self) -> Step | None:
        """Train a step, if one can be trained."""
        step = self.system.train()
        if step is not None:
            self.trained += step.samples
            self.worst = max(self.worst, step.staleness)
        return step

    def save(self) -> None:
        """Write a checkpoint."""
        self.system.save()
        self.saved = list(self.trained)

    def restart(self) -> None:
        """Crash, and resume from the last checkpoint."""
        self.system.crash()
        self.system.resume()
        self.trained, self.leased = list(self.saved), Counter()

    def drain(self, works: list[Work] | None = None) -> None:
        """Finish everything, and train until nothing is left."""
        self.finish(*(works or ()))
        idle = 0
        while idle < 3:
            works = self.lease()
            self.finish(*works)
            idle = 0 if self.train() or works else idle + 1


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario, and where it was reported."""

    name: str
    issues: str  # the reports that it reproduces
    play: Callable[[Run], object]
    job: Job = field(default_factory=lambda: Job(prompts=12))
    dropped: tuple[int, ...] = ()  # prompts that the scenario drops


def _ahead(run: Run) -> None:
    works = run.lease()
    run.finish(*works[: len(works) // 2])
    run.train()
    run.save()
    run.restart()
    run.drain()


def _prefetch(run: Run) -> None:
    run.finish(*run.lease())
    run.train()
    run.system.train(claim_only=True)
    run.save()
    run.restart()
    run.drain()


def _surplus(run: Run) -> None:
    run.finish(*run.lease())
    run.train()
    run.save()
    run.restart()
    run.drain()


def _durable(run: Run) -> None:
    run.finish(*run.lease())
    run.train()
    run.save()
    finished = set(range(4)) - {prompt for prompt, _, _ in run.trained}
    run.restart()
    if again := finished & {work.prompt for work in run.lease()}:
        run.wrong.append(f"finished prompts {sorted(again)} are generated again")


def _oversampled(run: Run) -> None:
    run.finish(*run.lease())
    run.save()
    run.restart()
    run.drain()


def _boundary(run: Run) -> None:
    run.drain()
    run.save()
    run.restart()
    run.drain()


def _failure(run: Run) -> None:
    first, *others = run.lease()
    run.system.fail(first, 1)
    run.system.finish(first, 0, "0-0-1")
    run.payloads.add("0-0-1")
    run.drain(others)


def _retry(run: Run) -> None:
    first, second, *others = run.lease()
    run.system.fail(first, 0)
    run.finish(second, *others)
    run.payloads |= {"late sample"} if run.system.finish(first, 1, "late sample") else set()
    run.drain()


def _cancelled(run: Run) -> None:
    first, *others = run.lease()
    for sample in first.samples:
        run.system.fail(first, sample)
    run.drain(others)


def _over_admit(run: Run) -> None:
    limit = (run.job.max_staleness + 1) * run.job.groups_per_step
    for _ in range(2):
        run.finish(*run.lease())
        run.train()
    run.save()
    run.restart()
    works = run.lease()
    run.finish(*works)
    before = len(run.trained)
    while run.train():
        pass
    opened = max(len(works), (len(run.trained) - before) // run.job.group_size)
    if opened > limit:
        run.wrong.append(f"{opened} groups were open after the resume, and the bound allows {limit}")
    run.drain()


def _drop(run: Run) -> None:
    first, *others = run.lease()
    for sample in first.samples:
        run.system.fail(first, sample)
    run.finish(*others)
    run.train()
    run.save()
    run.restart()
    run.drain()


def _queue(run: Run) -> None:
    slow, *works = run.lease()
    run.finish(*works)
    for _ in range(3):
        run.train()
        run.finish(*run.lease())
    run.finish(slow)
    run.drain()


def _slow(run: Run) -> None:
    late = []
    for turn in range(30):
        works = run.lease()
        late += [(turn, work) for work in works if work.prompt % 10 == 0]
        run.finish(*(work for work in works if work.prompt % 10))
        stepped = run.train()
        due = [work for began, work in late if not stepped or turn - began >= 3]
        run.finish(*due)
        late = [(began, work) for began, work in late if work not in due]
    slow = len({prompt for prompt, _, _ in run.trained if prompt % 10 == 0})
    everything = len({prompt for prompt, _, _ in run.trained})
    if everything and slow < 0.05 * everything:
        run.wrong.append(f"{slow} of {everything} trained prompts are slow, and 10 % of all prompts are")
    run.drain([work for _, work in late])


def _late(run: Run) -> None:
    first, *others = run.lease()
    for sample in first.samples:
        run.system.fail(first, sample)
    again = [work for work in run.lease() if work.prompt == first.prompt]
    for sample in first.samples:
        if run.system.finish(first, sample, f"late {sample}"):
            run.wrong.append("the result of an ended attempt was accepted")
    run.drain([*again, *others])


def _lost_branch(run: Run) -> None:
    works = run.lease()
    run.finish(*works[:2])
    run.save()
    run.train()
    run.finish(*works[2:], *run.lease(), tag=" of lost weights")
    run.restart()
    run.drain()
    lost = [payload for _, _, payload in run.trained if payload.endswith("of lost weights")]
    if lost:
        run.wrong.append(f"{len(lost)} samples of weights that no longer exist were trained")


def _between(run: Run) -> None:
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


def judge(case: Case, system: Any) -> list[str]:
    """Play a scenario, and return what is wrong: prompts that were lost, trained twice or too old, and so on."""
    system.start(case.job)
    run = Run(system, case.job)
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
    return wrong

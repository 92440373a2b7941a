# SPDX-License-Identifier: Apache-2.0
"""The cases: losses that other systems have reported, as scenarios, and the account that each has to pass."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .system import Job, Run, System

__all__ = ["CASES", "Case", "Report", "Verdict", "check"]


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario, and where it was reported.

    Attributes:
        name: its name.
        issues: the reports that it reproduces.
        play: runs the scenario; may return a note for the report.
        job: the job.
        needs: the capability without which it does not apply, or None.
        dropped: prompts that the scenario drops.

    >>> CASES[0].name
    'checkpoint_ahead_of_training'
    """

    name: str
    issues: str
    play: Callable[[Any], str | None]
    job: Job = field(default_factory=lambda: Job(prompts=12))
    needs: str | None = None
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one case.

    Attributes:
        case: the name of the case.
        verdict: "passed", "failed" or "not applicable".
        lost: prompts that were never trained.
        doubled: prompts that were trained twice.
        note: what else is wrong, or a measure.
        issues: the reports that the case reproduces.

    >>> Verdict("gap_fill_tail", "failed", lost=(11,)).lost
    (11,)
    """

    case: str
    verdict: Literal["passed", "failed", "not applicable"]
    lost: tuple[int, ...] = ()
    doubled: tuple[int, ...] = ()
    note: str = ""
    issues: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The verdicts of all cases; `str` is a table.

    Attributes:
        verdicts: one for each case.

    >>> print(Report((Verdict("gap_fill_tail", "failed", lost=(11,), issues="NeMo RL #3599"),)))
    failed          gap_fill_tail                 lost (11,)  NeMo RL #3599
    """

    verdicts: tuple[Verdict, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the cases that failed."""
        return tuple(one.case for one in self.verdicts if one.verdict == "failed")

    def __str__(self) -> str:
        lines = []
        for one in self.verdicts:
            found = [f"{name} {value}" for name, value in (("lost", one.lost), ("doubled", one.doubled)) if value]
            found += [text for text in (one.note, one.issues) if text]
            lines.append("  ".join([f"{one.verdict:14}", f"{one.case:28}", *found]))
        return "\n".join(lines)


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
    run.payloads |= {"late sibling"} if run.system.finish(first, 1, "late sibling") else set()
    run.drain()


def _cancelled(run: Run) -> None:
    first, *others = run.lease()
    for sibling in first.siblings:
        run.system.fail(first, sibling)
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
    for sibling in first.siblings:
        run.system.fail(first, sibling)
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
    for sibling in first.siblings:
        run.system.fail(first, sibling)
    again = [work for work in run.lease() if work.prompt == first.prompt]
    for sibling in first.siblings:
        if run.system.finish(first, sibling, f"late {sibling}"):
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


def _between(run: Run) -> str:
    run.finish(*run.lease())
    run.train()
    run.save()
    works = run.lease()
    run.finish(*works)
    samples = {(work.prompt, sibling) for work in works for sibling in work.siblings}
    run.restart()
    again = run.lease()
    repeated = samples & {(work.prompt, sibling) for work in again for sibling in work.siblings}
    run.drain(again)
    return f"{len(repeated)} of {len(samples)} samples after the checkpoint were generated again"


CASES: tuple[Case, ...] = (
    Case("checkpoint_ahead_of_training", "NeMo RL #3599, #3429", _ahead),
    Case("one_step_prefetch", "verl #4199", _prefetch, needs="prefetch"),
    Case("gap_fill_tail", "NeMo RL #3599", _surplus, Job(prompts=13)),
    Case("surplus_is_kept", "slime #2238", _surplus),
    Case("oversampled_buffer", "OpenRLHF #1322", _oversampled),
    Case("exhausted_at_boundary", "vime #324", _boundary),
    Case("failure_is_not_a_sample", "NeMo RL #3589", _failure),
    Case("resume_keeps_next_batch", "NeMo RL #3480, #4067", _durable, needs="durable"),
    Case("sibling_ids_survive_retry", "NeMo RL #4013, #3882", _retry),
    Case("partial_dispatch_cancelled", "NeMo RL #3923, TRL #7176", _cancelled),
    Case("resume_does_not_over_admit", "verl #7759, AReaL #1345, #1388", _over_admit),
    Case("drop_moves_the_cursor", "TRL #7274", _drop, Job(prompts=12, max_attempts=1), dropped=(0,)),
    Case("bound_includes_queue_time", "prime-rl #3313, slime #1800", _queue),
    Case("slow_rollouts_are_trained", "tinker-cookbook #822", _slow, Job(prompts=100)),
    Case("late_result_is_fenced", "", _late),
    Case("version_from_lost_branch", "", _lost_branch, needs="durable"),
    Case("work_between_checkpoints", "verl #7579", _between),
)


def check(factory: Callable[[], System], *, cases: tuple[Case, ...] = CASES) -> Report:
    """Play cases against a system, and report what was lost, trained twice or too old.

    Args:
        factory: makes a new system for each case.
        cases: the cases.

    Returns:
        A report. A case that needs a capability the system lacks is not applicable, and never passed.
    """
    return Report(tuple(_judge(case, factory()) for case in cases))


def _judge(case: Case, system: System) -> Verdict:
    if case.needs is not None and case.needs not in getattr(system, "capabilities", ()):
        return Verdict(case.name, "not applicable", note=f"needs {case.needs!r}", issues=case.issues)
    system.start(case.job)
    run = Run(system, case.job)
    note = case.play(run) or ""
    per_prompt = Counter(prompt for prompt, _, _ in run.trained)
    samples = Counter((prompt, sibling) for prompt, sibling, _ in run.trained)
    complete = case.name != "resume_keeps_next_batch"  # its scenario ends before the training does
    lost = tuple(one for one in range(case.job.prompts) if complete and not per_prompt[one] and one not in case.dropped)
    doubled = tuple(sorted({prompt for (prompt, _), times in samples.items() if times > 1}))
    wrong = list(run.wrong)
    if partial := sorted(one for one, times in per_prompt.items() if times % case.job.group_size):
        wrong.append(f"prompts {partial} were trained with missing siblings")
    if strange := sorted({payload for _, _, payload in run.trained} - run.payloads):
        wrong.append(f"payloads {strange[:3]} were never finished")
    if run.worst > case.job.max_staleness:
        wrong.append(f"staleness reached {run.worst}, and the bound is {case.job.max_staleness}")
    failed = bool(lost or doubled or wrong)
    note = "; ".join([*wrong, *filter(None, (note,))])
    return Verdict(case.name, "failed" if failed else "passed", lost, doubled, note, case.issues)

# SPDX-License-Identifier: Apache-2.0
"""Budgets and back-off, with a clock that the tests turn."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_tpu_executor import (
    InsufficientSlicesError,
    JobError,
    JobFailed,
    JobInfo,
    JobPreempted,
    JobSucceeded,
    PreemptionLimitError,
    SliceInfo,
    SliceLostError,
)
from fairlead_tpu_executor._run.retry import Backoff, RetryBudget, retry

INFO = JobInfo("train")


class Clock:
    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def play(outcomes, failures, preemptions, runs_s=1.0, waits_s=0.0, healthy_after_s=None):
    """Run attempts with these outcomes, "." for a success; return (the result or error, attempts, clock)."""
    clock, seen = Clock(), []
    error = {"f": ValueError("mine"), "e": OSError("Ray's"), "p": SliceLostError(("other",), "lost")}

    def attempt(number):
        seen.append(number)
        clock.now += waits_s + runs_s
        kind = outcomes[number - 1]
        info = replace(INFO, attempt=number, seconds=runs_s)
        if kind == ".":
            return JobSucceeded(info, [number])
        return {"f": JobFailed, "e": JobError, "p": JobPreempted}[kind](info, error[kind])

    try:
        budget = RetryBudget(failures, preemptions, healthy_after_s)
        came = retry(attempt, budget, Backoff(), sleep=clock.sleep, clock=clock)
    except (ValueError, OSError, PreemptionLimitError) as raised:
        came = raised
    return came, seen, clock


@given(st.text("fep", max_size=12), st.integers(0, 5), st.integers(0, 5))
def test_budgets(outcomes, failures, preemptions):
    """n retries mean n + 1 attempts; each kind has its own budget; no attempt follows after a budget is spent."""
    came, seen, clock = play(outcomes + ".", failures, preemptions)
    spent = {"failure": 0, "preemption": 0}
    expected = len(outcomes) + 1
    for number, kind in enumerate(outcomes, 1):
        name = "preemption" if kind == "p" else "failure"
        spent[name] += 1
        if spent[name] > {"failure": failures, "preemption": preemptions}[name]:
            expected = number
            break
    assert seen == list(range(1, expected + 1))
    assert len(clock.slept) == expected - 1
    if expected == len(outcomes) + 1:
        assert came.result == [expected]
    elif outcomes[expected - 1] == "p":
        assert isinstance(came, PreemptionLimitError)
        assert (came.preemptions, came.limit) == (preemptions + 1, preemptions)
    else:
        assert type(came) is {"f": ValueError, "e": OSError}[outcomes[expected - 1]]
        assert f"attempted {expected} time(s): {failures + 1} failed" in came.__notes__[-1]


@pytest.mark.parametrize("ends", ["budget", "slices"])
def test_an_accelerator_that_did_not_start_is_raised(ends):
    """If the run ends after an accelerator did not start, its exception is raised, and not what followed from it."""
    own = RuntimeError("TPU initialization failed")

    def attempt(number):
        if number == 2:
            raise InsufficientSlicesError("v4-16", (1,), 0, (), 5.0)
        loss = SliceLostError(("a",), "worker 0 of a")
        loss.__cause__ = own
        return JobPreempted(INFO, loss)

    with pytest.raises(RuntimeError) as caught:
        retry(attempt, RetryBudget(5, 0 if ends == "budget" else 5), Backoff(), sleep=lambda _: None)
    assert caught.value is own
    assert ("1 time(s): 0 failed" if ends == "budget" else "0 were free after 5.0 s") in own.__notes__[-1]


def test_exceptions_of_an_attempt_end_the_retries():
    """Exceptions of an attempt, such as too few slices or an interrupt, use no budget."""

    def attempt(number):
        assert number == 1
        raise KeyboardInterrupt

    budget = RetryBudget(5, 5)
    with pytest.raises(KeyboardInterrupt):
        retry(attempt, budget, Backoff(), sleep=pytest.fail)
    assert (budget.failures, budget.preemptions) == (0, 0)


@given(st.integers(1, 2_000), st.integers(0, 2**32))
def test_backoff(repeats, seed):
    """Waits double up to the cap, each between half and all of its size, and never overflow."""
    backoff = Backoff(base_s=0.5, cap_s=60.0, rng=random.Random(seed))
    for number in range(repeats):
        most = min(60.0, 0.5 * 2.0 ** min(number, 40))
        assert most / 2 <= backoff.after(ran_s=1.0) <= most


def test_backoff_starts_over():
    """After an attempt that ran for a while the next wait is short again."""
    *_, clock = play("fffff.", 10, 0, runs_s=1.0)
    assert clock.slept[-1] > 8 * clock.slept[0] / 2
    *_, clock = play("fffff.", 10, 0, runs_s=1000.0)
    assert max(clock.slept) <= 0.2
    # The time of waiting for slices does not count as running.
    *_, clock = play("fffff.", 10, 0, runs_s=1.0, waits_s=1000.0)
    assert clock.slept[-1] > 8 * clock.slept[0] / 2


def test_a_healthy_period_resets_failures():
    """The healthy period counts seconds of running over several attempts, without the time of waiting for slices."""
    came, seen, _ = play("fpp" * 20 + ".", 1, 100, runs_s=20.0, healthy_after_s=60.0)
    assert came.result == [61]
    for options in ({"healthy_after_s": 61.0}, {"healthy_after_s": 60.0, "runs_s": 1.0, "waits_s": 60.0}):
        came, seen, _ = play("fpp" * 20 + ".", 1, 100, **{"runs_s": 20.0, **options})
        assert (type(came), len(seen)) == (ValueError, 4)
        again = f"counted from zero after {options['healthy_after_s']:g} s without a failure"
        assert came.__notes__[-1].endswith(f"2 failed (max_retries_failure=1, {again}), 2 were preempted.")


SLICES = {name: SliceInfo(name, 2, "1", 4, (f"{name}0", f"{name}1"), ("1", "2"), "v4-16") for name in "abc"}


def play_slices(attempts, *, grace_s=60.0):
    """Run attempts, each (its slices, seconds, error or None), and return the budget of one failure after them."""
    clock, budget = Clock(), RetryBudget(1, 100)

    def attempt(number):
        names, seconds, error = attempts[number - 1]
        clock.now += seconds
        info = JobInfo("train", slices=tuple(SLICES[name] for name in names), attempt=number, seconds=seconds)
        if error is None:
            return JobSucceeded(info, [number])
        return (JobPreempted if isinstance(error, SliceLostError) else JobFailed)(info, error)

    assert retry(attempt, budget, Backoff(base_s=0.1), grace_s=grace_s, sleep=clock.sleep, clock=clock).result == [3]
    return budget


def test_a_failure_before_a_preemption_is_refunded():
    """If a slice is lost soon after its function raised, the failure is refunded."""
    first, gone, last = ("ab", 5.0, ValueError("mine")), SliceLostError(("b",), "its node is dead"), ("ac", 1.0, None)
    # The next attempt sees the loss while it runs, or before it starts, when the slice is replaced.
    assert play_slices([first, ("ab", 30.0, gone), last]).failures == 0
    assert play_slices([first, ("ac", 500.0, ValueError("mine")), last]).failures == 1
    # If the slice is lost too late, or another one is lost, the failure counts.
    for second in (("ab", 90.0, gone), ("ab", 30.0, SliceLostError(("c",), ""))):
        assert play_slices([first, second, last]).failures == 1
    assert play_slices([first, ("ab", 30.0, gone), last], grace_s=0.0).failures == 1

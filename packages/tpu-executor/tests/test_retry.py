# SPDX-License-Identifier: Apache-2.0
"""Budgets and back-off, with a clock that the tests turn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_tpu_executor import JobError, JobFailed, JobInfo, JobPreempted, JobSucceeded, PreemptedTooOftenError
from fairlead_tpu_executor._budget import Backoff, Budget
from fairlead_tpu_executor._retry import retry
from fairlead_tpu_executor._scaling import choose_size

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


def play(outcomes, failures, preemptions, runs_s=1.0):
    """Attempts that end as said, "." being a success; (what came of it, attempts, clock)."""
    clock, seen = Clock(), []
    error = {"f": ValueError("mine"), "e": OSError("Ray's"), "p": RuntimeError("lost")}

    def attempt(number):
        seen.append(number)
        clock.now += runs_s
        kind = outcomes[number - 1]
        if kind == ".":
            return JobSucceeded(INFO, [number])
        return {"f": JobFailed, "e": JobError, "p": JobPreempted}[kind](INFO, error[kind])

    try:
        came = retry(attempt, Budget(failures, preemptions), Backoff(), sleep=clock.sleep, clock=clock)
    except (ValueError, OSError, PreemptedTooOftenError) as raised:
        came = raised
    return came, seen, clock


@given(st.text("fep", max_size=12), st.integers(0, 5), st.integers(0, 5))
def test_budgets(outcomes, failures, preemptions):
    """n retries mean n + 1 attempts; each kind has a budget of its own; no attempt is made after a budget is spent."""
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
        assert isinstance(came, PreemptedTooOftenError)
        assert (came.preemptions, came.limit) == (preemptions + 1, preemptions)
    else:
        assert type(came) is {"f": ValueError, "e": OSError}[outcomes[expected - 1]]
        assert f"attempted {expected} time(s): {failures + 1} failed" in came.__notes__[-1]


def test_what_an_attempt_raises_is_not_repeated():
    """Too few slices, a bad configuration, an interrupt: no budget is used for them."""

    def attempt(number):
        assert number == 1
        raise KeyboardInterrupt

    budget = Budget(5, 5)
    with pytest.raises(KeyboardInterrupt):
        retry(attempt, budget, Backoff(), sleep=pytest.fail)
    assert (budget.failures, budget.preemptions) == (0, 0)


@given(st.integers(1, 2_000), st.integers(0, 2**32))
def test_backoff(repeats, seed):
    """Waits double up to the cap, each between half and all of its size; never overflowing, however many there are."""
    backoff = Backoff(base_s=0.5, cap_s=60.0, rng=random.Random(seed))
    for number in range(repeats):
        most = min(60.0, 0.5 * 2.0 ** min(number, 40))
        assert most / 2 <= backoff.after(ran_s=1.0) <= most


def test_backoff_starts_over():
    """A run that lasted a while was no attempt that fails at once: the next wait is a short one."""
    *_, clock = play("fffff.", 10, 0, runs_s=1.0)
    assert clock.slept[-1] > 8 * clock.slept[0] / 2
    *_, clock = play("fffff.", 10, 0, runs_s=1000.0)
    assert max(clock.slept) <= 0.2


@given(st.sets(st.integers(1, 8), min_size=1), st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_sizes(sizes, held, free, waited_out):
    """The largest size at once, when it can be had; after the wait the largest that can; never another."""
    size = choose_size(sorted(sizes), held, free, waited_out=waited_out).size
    possible = {one for one in sizes if one <= held + free}
    if max(sizes) in possible:
        assert size == max(sizes)
    elif waited_out and possible:
        assert size == max(possible)
    else:
        assert size is None

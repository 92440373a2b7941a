# SPDX-License-Identifier: Apache-2.0
"""Budgets and back-off, without waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_tpu_executor import (
    JobError,
    JobFailed,
    JobInfo,
    JobPreempted,
    JobSucceeded,
    PreemptionLimitError,
    SliceLostError,
)
from fairlead_tpu_executor._verdicts import retry


def lose(error=None):
    loss = SliceLostError(("a",), "lost")
    loss.__cause__ = error
    return loss


def play(outcomes, failures, preemptions):
    """Run attempts with these outcomes, "." for a success; return (the result or error, attempts, waits)."""
    seen, waits = [], []
    kinds = {
        "f": (JobFailed, lambda: ValueError("mine")),
        "e": (JobError, lambda: OSError("Ray's")),
        "p": (JobPreempted, lose),
        "s": (JobPreempted, lambda: lose(RuntimeError("TPU initialization failed"))),
    }

    def attempt(number):
        seen.append(number)
        info = JobInfo("train", attempt=number)
        if outcomes[number - 1] == ".":
            return JobSucceeded(info, [number])
        status, error = kinds[outcomes[number - 1]]
        return status(info, error())

    try:
        came = retry(attempt, max_failures=failures, max_preemptions=preemptions, sleep=waits.append)
    except (ValueError, OSError, RuntimeError) as raised:
        came = raised
    return came, seen, waits


@given(st.text("feps", max_size=12), st.integers(0, 5), st.integers(0, 5))
def test_budgets(outcomes, failures, preemptions):
    """n retries mean n + 1 attempts, losses and failures have their own budgets, and a failed start is a failure."""
    came, seen, waits = play(outcomes + ".", failures, preemptions)
    spent = {"failure": 0, "preemption": 0}
    expected = len(outcomes) + 1
    for number, kind in enumerate(outcomes, 1):
        name = "preemption" if kind == "p" else "failure"
        spent[name] += 1
        if spent[name] > {"failure": failures, "preemption": preemptions}[name]:
            expected = number
            break
    assert seen == list(range(1, expected + 1))
    assert len(waits) == expected - 1
    if expected == len(outcomes) + 1:
        assert came.result == [expected]
    elif outcomes[expected - 1] == "p":
        assert (type(came), came.preemptions, came.limit) == (PreemptionLimitError, preemptions + 1, preemptions)
    else:
        assert type(came) is {"f": ValueError, "e": OSError, "s": RuntimeError}[outcomes[expected - 1]]
        assert f"attempted {expected} time(s): {failures + 1} failed" in came.__notes__[-1]


def test_a_chip_that_never_starts():
    """It ends the run after the budget of failures, however many preemptions are allowed."""
    came, seen, _ = play("s" * 20, 10, 1_000_000)
    assert (str(came), len(seen)) == ("TPU initialization failed", 11)


def test_exceptions_of_an_attempt_end_the_retries():
    """Exceptions of an attempt, such as an interrupt, use no budget."""

    def attempt(number):
        assert number == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retry(attempt, max_failures=5, max_preemptions=5, sleep=pytest.fail)


def test_backoff():
    """Waits double up to a minute, each between half and all of its size, and never overflow."""
    _, _, waits = play("p" * 2_000 + ".", 0, 2_000)
    for number, wait in enumerate(waits):
        most = min(60.0, 0.2 * 2.0 ** min(number, 40))
        assert most / 2 <= wait <= most

# SPDX-License-Identifier: Apache-2.0
"""Tests of the rules by which a run of the simulation fails by itself; `test_reverted.py` is about defects."""

import contextlib

import pytest

from . import scheduler
from .exploration import run_seed


def loop(world):
    while True:
        world.point("looks")


def hold(world):
    with world.lock(), contextlib.suppress(AssertionError):  # a caller that catches the error hides nothing
        world.event().wait(5)


def wait_in_an_event(world):
    world.add_fault("a fault", lambda: world.event().wait())
    world.sleep(1)


def break_an_invariant(world):
    values = [0]

    def check():
        assert values != [1], "odd: it was 1"

    world.invariants.append(check)
    values[:] = [1]
    world.point("works")
    values[:] = [2]


@pytest.mark.parametrize(
    ("script", "rule"),
    [
        (lambda world: world.event().wait(), "deadlock: main waits for event"),
        (loop, "livelock: "),
        (hold, "lock held: "),
        (wait_in_an_event, "event waits: "),
        (break_an_invariant, "odd: "),
    ],
)
def test_rules(script, rule, monkeypatch):
    """A run that waits for nothing, holds a lock over a wait, or breaks an invariant fails."""
    monkeypatch.setattr(scheduler, "MOST_STEPS", 100)
    assert str(run_seed(script, 0).failure).startswith(rule)


def test_outside_the_seam(monkeypatch):
    """A task waits for something that the scheduler does not know; the message shows where."""
    monkeypatch.setattr(scheduler, "STUCK_S", 0.2)
    monkeypatch.setattr(scheduler, "STOP_S", 0.2)
    release = scheduler.threading.Event()
    failure = run_seed(lambda world: release.wait(20), 0).failure
    assert str(failure).startswith("outside the seam: ")
    assert "release.wait(20)" in str(failure)
    release.set()


def test_time():
    """Time passes only when nothing can run, in the order of the deadlines."""
    seen = []

    def script(world):
        def sleep(seconds):
            world.sleep(seconds)
            seen.append(world.now())

        tasks = [world.start_task(f"of {seconds}", lambda seconds=seconds: sleep(seconds)) for seconds in (7200, 3600)]
        world.add_timer("a timer", 5000, lambda: seen.append("timer"))
        world.join(tasks)

    assert run_seed(script, 0).failure is None
    assert seen == [3600, "timer", 7200]

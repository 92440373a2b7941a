# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulation itself: its rules, its time, its interrupts, and the faults of a toy group that it finds."""

import contextlib
import functools

import pytest

from . import scheduler
from .exploration import Recorded, describe, explore, run, run_seed, shrink
from .toy import FAULTS, run_toy


def fails(script, rule, choices=b""):
    """Check that a run of a script breaks a rule; return the message."""
    failure = run(script, Recorded(choices)).failure
    assert failure is not None
    assert str(failure).startswith(f"{rule}: "), failure
    return str(failure)


def passes(script, choices=b""):
    """Check that a run of a script breaks no rule; return its history."""
    one = run(script, Recorded(choices), keep=True)
    if one.failure is not None:
        raise one.failure
    return one.history


class TestFaults:
    """A toy group, into which faults are injected."""

    def test_none(self):
        """A group without a fault breaks no rule in 1,000 different runs."""
        report = explore(run_toy, range(1000))
        assert report.failed is None, describe(report.seed, report.failed)
        assert report.distinct > 990
        assert report.cpu_s < 30

    @pytest.mark.parametrize("fault", FAULTS)
    def test_found_and_shrunk(self, fault):
        """Each fault is found within 500 runs, and its history gets shorter and still shows it."""
        script = functools.partial(run_toy, fault=fault)
        report = explore(script, range(500))
        assert report.failed is not None
        assert report.failed.rule[1] == {"early gate": "stale facts", "lock order": "deadlock"}.get(fault, fault)
        shrunk = shrink(script, report.failed)
        assert shrunk.rule == report.failed.rule
        assert 2 * sum(map(bool, shrunk.choices)) <= sum(map(bool, report.failed.choices))
        assert run(script, Recorded(shrunk.choices)).history == shrunk.history
        assert f"--seed {report.seed}`" in describe(report.seed, report.failed, shrunk)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_replay(self, seed):
        """A seed and the choices of its run lead to the same history, whether the choices are uniform or priorities."""
        first, again = (run_seed(run_toy, seed, keep=True) for _ in range(2))
        assert first == again
        assert len(first.history) > 50
        assert run(run_toy, Recorded(first.choices), keep=True).history == first.history
        assert run_seed(run_toy, seed + 2, keep=True).history != first.history


class TestRules:
    """What makes a run fail by itself."""

    def test_deadlock(self):
        """Nothing can run, and nothing has a deadline."""
        assert "main waits for event" in fails(lambda world: world.event().wait(), "deadlock")

    def test_livelock(self, monkeypatch):
        """A loop that waits for nothing does not end."""
        monkeypatch.setattr(scheduler, "MOST_STEPS", 100)

        def loop(world):
            while True:
                world.point("looks")

        fails(loop, "livelock")

    def test_outside_the_seam(self, monkeypatch):
        """A task waits for something that the scheduler does not know; the message shows where."""
        monkeypatch.setattr(scheduler, "STUCK_S", 0.2)
        monkeypatch.setattr(scheduler, "STOP_S", 0.2)
        release = scheduler.threading.Event()

        def wait(world):
            release.wait(20)

        assert "release.wait(20)" in fails(wait, "outside the seam")
        release.set()

    def test_lock_taken_twice(self):
        """A task takes a lock that it holds."""

        def take(world):
            lock = world.mutex()
            with lock, lock:
                pass

        fails(take, "lock taken twice")

    @pytest.mark.parametrize("wait", [lambda world: world.event().wait(5), lambda world: world.check_unlocked("runs")])
    def test_lock_held(self, wait):
        """A task waits, or calls the user's code, while it holds a lock; even if it catches the error."""

        def hold(world):
            with world.lock(), contextlib.suppress(AssertionError):
                wait(world)

        assert "test_scheduler:" in fails(hold, "lock held")

    def test_mutex(self):
        """A mutex may be held over waits, and a reentrant one is taken again by the same task."""

        def hold(world):
            mutex = world.mutex(reentrant=True)
            with mutex, mutex:
                world.sleep(1)
                assert mutex.locked()
            assert not mutex.locked()

        passes(hold)

    def test_lock_kept(self):
        """A task ends with a lock."""
        fails(lambda world: world.lock().acquire(), "lock kept")

    def test_invariant(self):
        """An invariant is checked after each step, not only when a task ends."""

        def script(world):
            values = [0]

            def check():
                assert values != [1], "odd: it was 1"

            world.invariants.append(check)
            values[:] = [1]
            world.point("works")
            values[:] = [2]

        fails(script, "odd")

    def test_event_waits(self):
        """An event has no thread, so it cannot wait."""

        def script(world):
            world.add_fault("a fault", lambda: world.event().wait())
            world.sleep(1)

        fails(script, "event waits")

    def test_error_of_a_task(self):
        """An error of any task fails the run, and the other tasks end, with their locks released."""
        lines = []

        def script(world):
            def wait():
                try:
                    with world.lock():
                        world.point("works")
                        lines.append("worked")
                    world.event().wait()
                finally:
                    lines.append("ended")

            world.start_task("other", wait)
            world.sleep(1)
            raise ValueError("of the script")

        one = run(script, Recorded(b""))
        assert isinstance(one.failure, ValueError)
        assert lines == ["worked", "ended"]


class TestTime:
    """Virtual time."""

    def test_sleep(self):
        """Time passes only when nothing can run, in the order of the deadlines."""
        seen = []

        def script(world):
            def sleep(seconds):
                world.sleep(seconds)
                seen.append(world.now())

            tasks = [world.start_task(f"of {seconds}", functools.partial(sleep, seconds)) for seconds in (7200, 3600)]
            world.add_timer("a timer", 5000, lambda: seen.append("timer"))
            world.join(tasks)

        passes(script)
        assert seen == [3600, "timer", 7200]

    def test_timeouts(self):
        """Waits for locks and events end at their timeouts, and earlier if they succeed."""

        def script(world):
            lock, event = world.mutex(), world.event()

            def hold():
                with lock:
                    world.sleep(5)

            task = world.start_task("holder", hold)
            world.wait_for("waits for the holder", lock.locked)
            assert not lock.acquire(timeout=2)
            assert not lock.acquire(blocking=False)
            assert world.now() == 2
            assert lock.acquire(timeout=60)
            assert world.now() == 5
            lock.release()
            assert not event.wait(1)
            world.add_timer("a timer", 1, event.set)
            assert event.wait(60)
            assert world.now() == 7
            world.join([task])

        passes(script)


class TestInterrupts:
    """Ctrl-C in a task."""

    @staticmethod
    def script(world):
        lock, event = world.lock(), world.event()

        def work():
            try:
                with lock:
                    world.point("works")
                event.wait()
                world.point("ends")
            except KeyboardInterrupt:
                assert lock.owner is None or lock.owner.name != "worker"
                raise

        task = world.start_task("worker", work)
        world.press_ctrl_c("worker")
        with lock:
            world.point("works")
        event.set()
        world.join([task])

    def test_everywhere(self):
        """It comes at each point, whether the task waits there or not, and no lock stays taken."""
        runs = [run_seed(self.script, seed, keep=True) for seed in range(300)]
        assert [one.failure for one in runs if one.failure is not None] == []
        lines = [line for one in runs for line in one.history if "is interrupted" in line]
        for what in ("takes lock", "works", "releases lock", "waits for event", "ends"):
            assert any(f"where it {what}" in line for line in lines), (what, set(lines))
        assert len(lines) < len(runs)  # some end before it

    def test_own_interrupt(self):
        """A KeyboardInterrupt that nobody caused is an error of the task."""

        def script(world):
            raise KeyboardInterrupt

        assert isinstance(run(script, Recorded(b"")).failure, KeyboardInterrupt)

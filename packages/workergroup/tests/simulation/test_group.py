# SPDX-License-Identifier: Apache-2.0
"""Run the shipped group in many orders of its steps; see `scripts.py`."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_workergroup import Restart, WorkerGroupError

from .exploration import explore, run_seed
from .group import Behaviour, make_group
from .ray import PretendedRay
from .scripts import run_group
from .seam import replaced

# Runs for each change.
FEW = 300


@pytest.mark.smoke
def test_some_interleavings():
    """No rule is broken in some orders."""
    check(run_group, FEW)


# A minute of one core, and more where others use it too. A run that hangs ends by itself.
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_more_interleavings():
    """No rule is broken in the orders that `python -m simulation` runs; else the output has the history."""
    command = [sys.executable, "-m", "simulation"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        pytest.fail(done.stderr, pytrace=False)


def check(script, seeds):
    if failure := explore(script, range(seeds)):
        pytest.fail(failure, pytrace=False)


def explore_group(script, seeds=200, **options):
    """Run a script with many seeds; it gets the world, a pretended Ray and a group."""

    def run(world):
        ray = PretendedRay(world)
        with replaced(ray):
            Behaviour(ray).install()
            script(world, ray, make_group(ray, **options))

    check(run, seeds)


@pytest.mark.parametrize("change", ["none", "grow", "restart"])
def test_cleanup_is_not_cut_short(change):
    """A change that is under way does not end workers before their cleanup has run."""

    def script(world, ray, group):
        def work():
            with contextlib.suppress(WorkerGroupError):
                group.resize(dp=3) if change == "grow" else group.restart_failed_workers()

        tasks = [] if change == "none" else [world.start_task("changer", work)]
        assert group.shutdown("clean_up")
        cleaned = {one.rank for one in ray.actors for ran in one.worker.ran if ran.method == "clean_up"}
        assert cleaned >= {0, 1}, f"cleanup: only ranks {sorted(cleaned)}"
        world.join(tasks)

    explore_group(script)


def test_interrupted_request_of_a_restart():
    """The next call restarts lost workers, even if Ctrl-C ends the first call as it requests that."""

    def script(world, ray, group):
        ray.actors[1].end("it crashed")
        with contextlib.suppress(WorkerGroupError):
            group.call("step").result()
        world.press_ctrl_c("a")
        world.join([world.start_task("a", lambda: group.call("step", timeout=60).result())])
        group.call("step", timeout=60).result()
        assert group.shutdown()

    explore_group(script, restart=Restart(on_failure=True))


def test_ctrl_c_leaves_nothing():
    """After Ctrl-C in the constructor or in `shutdown`, no process, claim or port is left."""

    def run(world):
        ray = PretendedRay(world)
        with replaced(ray) as placement:
            Behaviour(ray).install()
            world.press_ctrl_c("a")
            if world.choose(2):
                ray.silence(ray.head, 8.0)
            world.join([world.start_task("a", lambda: make_group(ray).shutdown())])
            world.sleep(60)
            left = [one for one in ray.actors if one.is_running or not one.is_created]
            left += [*placement.claims, *placement.leases]
            assert not left, f"leak: {left}"

    check(run, 1500)


def test_repeatable():
    """The same seed gives the same run, and another seed another one."""
    first, again, other = (run_seed(run_group, seed).history for seed in (3, 3, 4))
    assert first == again != other

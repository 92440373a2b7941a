# SPDX-License-Identifier: Apache-2.0
"""Tests that each invariant notices what it is for."""

from dataclasses import replace

import pytest

from .calls import call, make_core, start
from .exploration import Recorded, run
from .invariants import Invariants
from .ray import PretendedRay
from .seam import replaced


def simulate(script):
    """Run a script with the world, a pretended Ray, a core and invariants; return the message of its failure."""

    def run_script(world):
        ray = PretendedRay(world)
        with replaced(ray):
            core = make_core(world, ray)
            script(world, ray, core, Invariants(world, ray, core))
            world.point("ends")

    failure = run(run_script, Recorded(b"")).failure
    return "" if failure is None else str(failure)


def advance(core, **changes):
    core.advance(**changes)


def change_member(core, **changes):
    first, *rest = core.now.members
    advance(core, members=(replace(first, **changes), *rest))


def test_none():
    """Calls of a group that does not change break nothing."""

    def script(world, ray, core, invariants):
        for _ in range(3):
            invariants.add(call(world, core, "step")).result()
        invariants.check_at_rest()
        for actor in ray.actors:
            actor.end("the end")
        invariants.check_ended()

    assert simulate(script) == ""


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"group_epoch": 2}, "epochs"),
        ({"incarnation": -1}, "incarnations"),
        ({"restarts": 4}, "max_restarts"),
        ({"failure": "killed"}, "false loss"),
    ],
)
def test_snapshots(change, rule):
    """Snapshots may not follow each other in any way."""

    def script(world, ray, core, invariants):
        if "failure" in change:
            change_member(core, lost=core.now[0].failure("killed", "by mistake"))
        elif "group_epoch" in change:
            advance(core, **change)
        else:
            change_member(core, **change)

    assert simulate(script).startswith(f"{rule}: ")


def test_a_loss_is_final():
    """A worker that was lost does not live again."""

    def script(world, ray, core, invariants):
        ray.actors[0].end("it crashed")
        change_member(core, lost=core.now[0].failure("killed", "it crashed"))
        world.point("sees it")
        change_member(core, lost=None)

    assert simulate(script).startswith("lost for good: ")


def test_two_processes():
    """A rank is not constructed while its old process runs."""

    def script(world, ray, core, invariants):
        start(world, ray, list(core.now.places))

    assert simulate(script).startswith("two processes: ")


def test_facts():
    """At rest, workers have the facts of the epoch, and the workers of a call ran it with them."""

    def change_facts(world, ray, core, invariants):
        invariants.add(call(world, core, "step")).result()
        ray.actors[0].worker.facts["epoch"] = 1
        invariants.check_at_rest()

    def call_early(world, ray, core, invariants):
        ray.actors[0].worker.facts["epoch"] = 1
        invariants.add(call(world, core, "step")).result()
        ray.actors[0].worker.facts["epoch"] = 0
        invariants.check_at_rest()

    assert simulate(change_facts).startswith("stale facts: ")
    assert simulate(call_early).startswith("epoch of a call: ")


def test_order():
    """All workers begin calls in one order."""

    def script(world, ray, core, invariants):
        for _ in range(2):
            invariants.add(call(world, core, "step")).result()
        ray.actors[0].worker.ran.reverse()
        invariants.check_at_rest()

    assert simulate(script).startswith("order of calls: ")


def test_leaks():
    """Neither processes nor open futures are left at the end."""

    def keep_processes(world, ray, core, invariants):
        invariants.check_ended()

    def keep_futures(world, ray, core, invariants):
        invariants.add(call(world, core, "step"))
        for actor in ray.actors:
            actor.end("the end")
        invariants.check_ended()

    assert simulate(keep_processes).startswith("leak: ")
    assert simulate(keep_futures).startswith("open futures: ")

# SPDX-License-Identifier: Apache-2.0
"""Tests that the shipped code of calls runs in the simulation, with no function of Ray outside of the seam."""

import pytest

from fairlead_workergroup import CallTimeoutError, WorkerFailureError

from .actors import HANG
from .calls import call, make_core
from .exploration import explore
from .ray import PretendedRay
from .seam import replaced


def simulate(script, seeds=100):
    """Run a script with many seeds; it gets the world, a pretended Ray and the core of a group of two workers."""

    def run(world):
        ray = PretendedRay(world)
        with replaced(ray):
            script(world, ray, make_core(world, ray))

    report = explore(run, range(seeds))
    if report.failed is not None:
        raise report.failed.failure


def call_until_it_fails(world, core):
    while True:
        call(world, core, "step").result()


def test_results():
    """Several tasks call, and two of them wait for the same call."""

    def script(world, ray, core):
        shared = call(world, core, "step")

        def work():
            assert call(world, core, "step").result() == [(0, 0, 2), (1, 0, 2)]
            assert shared.result() == [(0, 0, 2), (1, 0, 2)]

        world.join([world.start_task(name, work) for name in "ab"])
        assert ray.sent["step"] == 6

    simulate(script)


def test_errors_of_workers():
    """An error of the method has its type, and names the rank."""

    def script(world, ray, core):
        def fail(worker):
            if worker.facts["rank"]:
                raise KeyError("weights")

        ray.methods["fail"] = fail
        with pytest.raises(KeyError, match="weights") as caught:
            call(world, core, "fail").result()
        assert "rank 1 (dp=1) on node node-1" in caught.value.__notes__[0]

    simulate(script)


def test_losses():
    """A worker that crashes in a call is reported by this call or by the next one, as killed or with its node."""
    kinds = set()

    def script(world, ray, core):
        ray.lose_node("node-1") if world.choose(2) else ray.lose_actor()
        with pytest.raises(WorkerFailureError) as caught:
            call_until_it_fails(world, core)
        (failure,) = caught.value.failures
        kinds.add((failure.rank, failure.kind))
        assert core.now.lost == {failure.rank: failure}
        with pytest.raises(WorkerFailureError):
            call(world, core, "step")

    simulate(script, seeds=200)
    assert kinds == {(0, "killed"), (1, "killed"), (1, "node-lost")}


def test_deadline():
    """A call that hangs ends at its deadline and names the worker, which its node agent describes."""

    def script(world, ray, core):
        ray.methods["hang"] = lambda worker: HANG if worker.facts["rank"] else None
        with pytest.raises(CallTimeoutError) as caught:
            call(world, core, "hang", timeout=90).result()
        assert world.now() == 90
        assert [(late.rank, late.method) for late in caught.value.late] == [(1, "hang")]

    simulate(script)


def test_cancel():
    """A call that has begun on one worker is cancelled, and the other worker never begins it."""
    ran = set()

    def script(world, ray, core):
        ray.methods["hang"] = lambda worker: HANG
        call(world, core, "hang")
        second = call(world, core, "step")
        assert second.cancel() == []
        with pytest.raises(CallTimeoutError):
            call(world, core, "step", timeout=1).result()
        ran.update(entry.method for actor in ray.actors for entry in actor.worker.ran)

    simulate(script)
    assert ran == {"_fairlead_start", "hang"}

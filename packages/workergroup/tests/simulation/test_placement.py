# SPDX-License-Identifier: Apache-2.0
"""Tests of pretended placement, with the shipped code that uses it."""

import pytest

from fairlead_placement import PlacementError, ResourceInsufficientError
from fairlead_workergroup import WorkerStartError

from .actors import HANG
from .calls import make_places
from .exploration import explore
from .ray import PretendedRay
from .seam import create_actors, make_plan, make_resources, make_running_worker, replaced, wait_started


def simulate(script, seeds=50):
    """Run a script with many seeds; it gets the world, a pretended Ray and placement, and places on two nodes."""

    def run(world):
        ray = PretendedRay(world)
        with replaced(ray) as placement:
            script(world, ray, placement, make_places(ray, 2))

    report = explore(run, range(seeds))
    if report.failed is not None:
        raise report.failed.failure


def test_resources():
    """Two groups share the slots, each with the shipped `Resources`, which give everything back."""

    def script(world, ray, placement, places):
        slots = [place.slot for place in places]
        made = [make_resources(name, places) for name in "abc"]

        def acquire(resources):
            (first, _) = resources.claim_free(slots, 2)
            resources.lease_master_port(first)
            handle = ray.create(first.node_id)
            handle.__ray_ready__.remote()
            resources.add({0: make_running_worker(handle, first.node_id)})

        def run(work):
            world.join([world.start_task(one.roster.name_prefix, lambda one=one: work(one)) for one in made[:2]])

        run(acquire)
        assert made[2].claim_free(slots, 1) == []
        with pytest.raises(ResourceInsufficientError):
            made[2].claim_slots(slots[:1])
        assert len(placement.claims) == 4
        assert len(placement.leases) == 2
        run(lambda resources: resources.give_back())
        assert [one.gave_all_back for one in made] == [True] * 3
        assert not placement.claims
        assert not placement.leases
        assert not any(actor.is_running for actor in ray.actors)

    simulate(script)


def test_leases():
    """A port of a node that is dead or silent is not leased."""

    def script(world, ray, placement, places):
        ray.end_node("node-0")
        with pytest.raises(PlacementError):
            placement.lease_ports([places[0].slot])
        ((lease,),) = placement.lease_ports([places[-1].slot])
        assert (lease.node_id, lease.address) == ("node-1", "10.0.0.1")
        assert placement.leases == {lease}

    simulate(script)


def test_starts():
    """Actors start in their slots; a constructor that raises or hangs is a WorkerStartError that names the rank."""

    def script(world, ray, placement, places):
        plans = [make_plan(place) for place in places]
        made = create_actors(plans)
        facts = [{"rank": rank, "env": {}} for rank in made]

        def wait(timeout_s):
            refs = [made[one["rank"]]._fairlead_start.remote(one, [], [], {}) for one in facts]
            return wait_started(refs, plans, timeout_s)

        assert [answer["node_id"] for answer in wait(10)] == [place.slot.node_id for place in places]

        def fail(worker):
            if worker.facts["rank"] == 2:
                raise ValueError("no such model")

        ray.construct = fail
        with pytest.raises(WorkerStartError, match="raised ValueError: no such model") as caught:
            wait(10)
        assert caught.value.rank == 2
        ray.construct = lambda worker: HANG
        began = world.now()
        with pytest.raises(WorkerStartError, match="4 of 4 workers had not finished their constructor after 30 s"):
            wait(30)
        assert world.now() == began + 30

    simulate(script)

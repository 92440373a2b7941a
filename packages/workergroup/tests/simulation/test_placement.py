# SPDX-License-Identifier: Apache-2.0
"""Tests of pretended placement, with the shipped code that uses it."""

import pytest

from fairlead_placement import PlacementError, ResourceInsufficientError
from fairlead_workergroup import WorkerStartError

from .actors import HANG
from .calls import make_places
from .exploration import explore
from .ray import PretendedRay
from .seam import Deadline, make_member, make_owned, make_plan, replaced


def simulate(script, seeds=50):
    """Run a script with many seeds; it gets the world, a pretended Ray and placement, and places on two nodes."""

    def run(world):
        ray = PretendedRay(world)
        with replaced(ray) as placement:
            script(world, ray, placement, make_places(ray, 2))

    report = explore(run, range(seeds))
    if report.failed is not None:
        raise report.failed.failure


def test_owned():
    """Two groups share the slots; what each of them owns is returned at its end."""

    def script(world, ray, placement, places):
        made = [make_owned(name, places) for name in "abc"]

        def acquire(slots, owned):
            (first, _) = slots.claim_free(2)
            ((lease,),) = placement.lease_ports([first])
            owned.own(("port",), lease.release)
            handle = ray.create(first.node_id)
            handle.__ray_ready__.remote()
            owned.own_worker(make_member(handle, places[0], {}))

        def run(work):
            world.join(
                [world.start_task(name, lambda one=one: work(*one)) for name, one in zip("ab", made[:2], strict=True)]
            )

        run(acquire)
        slots, _ = made[2]
        assert slots.claim_free(1) == []
        with pytest.raises(ResourceInsufficientError):
            slots.claim([places[0].slot])
        assert len(placement.claims) == 4
        assert len(placement.leases) == 2
        run(lambda slots, owned: owned.close(Deadline.after(60)))
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
        made = {}
        plans = [make_plan(place) for place in places]
        placement.create_actors(plans, None, [], lambda plan, actor: made.setdefault(plan.place.rank, actor))
        members = [make_member(made[place.rank], place, {}) for place in places]
        facts = [{"rank": rank, "env": {}} for rank in made]

        def wait(timeout_s):
            refs = [made[one["rank"]]._fairlead_start.remote(one, [], [], {}) for one in facts]
            return [*placement.wait_started(refs, members, until=Deadline.after(timeout_s)).values()]

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

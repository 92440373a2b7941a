# SPDX-License-Identifier: Apache-2.0
"""The shipped code of calls on pretended actors: a sender, and calls that it sends."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup import Place
from fairlead_workergroup._calls.execution import Execution
from fairlead_workergroup._calls.plan import CallOptions, Recipients
from fairlead_workergroup._calls.sender import Order, Request, Sender
from fairlead_workergroup._membership.judge import Judge
from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.model import Started, make_process
from fairlead_workergroup._membership.operations import RestartPolicy
from fairlead_workergroup._membership.roster import Roster
from fairlead_workergroup._observe.calls import Counters
from fairlead_workergroup._observe.evidence import RayWitnesses
from fairlead_workergroup._start.layout import lay_out
from fairlead_workergroup._start.worker_class import Method
from fairlead_workergroup._world import Deadline
from fairlead_workergroup.spi import actor_id_of

from .ray import PretendedRay
from .scheduler import SimulatedWorld


def make_places(ray: PretendedRay, each: int) -> list[Place]:
    """Return the places of workers, some on each node."""
    slots = [
        Slot(
            placement_group=SimpleNamespace(id=node_id.encode()),
            bundle_index=at,
            node_idx=number,
            node_id=node_id,
            node_ip=node.ip,
            node_rank=number,
            local_rank=at,
        )
        for number, (node_id, node) in enumerate(ray.nodes.items())
        for at in range(each)
    ]
    return lay_out(slots, prefix="simulated")


def start(world: SimulatedWorld, ray: PretendedRay, places: list[Place], epoch: int = 0) -> list[Started]:
    """Start a worker in each place."""
    handles = [ray.create(place.slot.node_id) for place in places]
    facts = [{"rank": place.rank, "epoch": epoch, "world_size": len(places), "env": {}} for place in places]
    refs = [handle._fairlead_start.remote(one, [], [], {}) for handle, one in zip(handles, facts, strict=True)]
    started = []
    for handle, place, answer in zip(handles, places, world.get(refs, timeout=None), strict=True):
        known = {"pid": answer["pid"], "started": answer["started"], "actor_id": actor_id_of(handle)}
        started.append(Started(handle, place, replace(make_process(place, {"dp": place.rank}), **known)))
    return started


def make_sender(world: SimulatedWorld, ray: PretendedRay, *, each: int = 1) -> Sender:
    """Return the sender of a group whose workers have started, and which does not restart them."""
    places = make_places(ray, each)
    sharding = NamedSharding.from_shape(dp=len(places))
    roster = Roster("simulated", places, sharding)
    roster.judge = Judge(RayWitnesses(roster.find_handle))
    roster.commit(epoch=0, sharding=sharding, places=places, facts=(), started=start(world, ray, places), resize=None)
    policy = RestartPolicy(on_failure=False, max_restarts=3, scope="worker")
    # Calls use nothing else of the ports.
    crew: Any = SimpleNamespace(policy=policy, lacks_cluster=lambda ranks: False)
    nothing: Any = SimpleNamespace()
    membership = Membership(roster, crew, nothing, nothing)
    described: Any = SimpleNamespace(worker_class=SimpleNamespace(concurrent=False))
    read_group: Any = None
    return Sender(roster, described, membership, Counters(), read_group, None)


def call(world: SimulatedWorld, sender: Sender, name: str, *args: Any, timeout: float | None = None) -> Execution:
    """Call a method on all workers."""
    now = sender.roster.now
    ranks = range(len(now.members))
    requests = [Request(name, list(args), {}) for _ in ranks]
    deadline = Deadline.after(timeout)
    order = Order(Method(name, "plain", None), ranks, requests, world.now(), deadline, (0, 0), (), now.sharding)
    return Execution(sender, None, order, sender.send(order), Recipients(list(ranks), list(ranks), None), CallOptions())

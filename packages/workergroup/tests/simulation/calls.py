# SPDX-License-Identifier: Apache-2.0
"""The shipped code of calls on pretended actors: a core, and the calls that it sends."""

from types import SimpleNamespace
from typing import Any

from fairlead_placement import Slot
from fairlead_workergroup import Place

from . import seam
from .ray import PretendedRay
from .scheduler import SimulatedWorld
from .seam import Call, Core, Member


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
    return seam.make_places(slots)


def start(world: SimulatedWorld, ray: PretendedRay, places: list[Place], epoch: int = 0) -> list[Member]:
    """Start a worker in each place."""
    handles = [ray.create(place.slot.node_id) for place in places]
    facts = [{"rank": place.rank, "epoch": epoch, "world_size": len(places), "env": {}} for place in places]
    refs = [handle._fairlead_start.remote(one, [], [], {}) for handle, one in zip(handles, facts, strict=True)]
    answers = world.get(refs, timeout=None)
    return [seam.make_member(*one) for one in zip(handles, places, answers, strict=True)]


def make_core(world: SimulatedWorld, ray: PretendedRay, *, each: int = 1) -> Core:
    """Return the core of a group whose workers have started, and which does not restart them."""
    places = make_places(ray, each)
    return seam.make_core(places, start(world, ray, places))


def call(world: SimulatedWorld, core: Core, name: str, *args: Any, timeout: float | None = None) -> Call[Any]:
    """Call a method on all workers."""
    return seam.make_call(core, name, args, world.now(), timeout)

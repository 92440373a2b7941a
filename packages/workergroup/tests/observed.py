# SPDX-License-Identifier: Apache-2.0
"""Workers that tests observe without a Ray."""

from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._membership.core import Core
from fairlead_workergroup._model import GroupState, Member, RestartPolicy
from fairlead_workergroup._observer import Observer
from fairlead_workergroup._start.layout import lay_out


def make_observer(count: int) -> Observer:
    """Return an observer of workers that do not exist."""
    slots = [
        Slot(
            placement_group=PlacementGroup.empty(),
            bundle_index=rank,
            node_idx=0,
            node_id="local",
            node_ip="127.0.0.1",
            node_rank=0,
            local_rank=rank,
        )
        for rank in range(count)
    ]
    sharding = NamedSharding.from_shape(worker=count)
    places = [replace(one, coords={"worker": one.rank}) for one in lay_out(slots, prefix="local")]
    core = Core("local", places, sharding, policy=RestartPolicy())
    members = [
        Member(
            place,
            actor_id=f"{place.rank:032x}",
            node_id="local",
            pid=1,
        )
        for place in places
    ]
    core.commit(GroupState(0, 0, sharding, tuple(members), phase="serving"))
    return Observer(core)

# SPDX-License-Identifier: Apache-2.0
"""Workers that tests observe without a Ray."""

from dataclasses import replace
from types import SimpleNamespace

from ray.util.placement_group import PlacementGroup

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._membership.model import Started, make_process
from fairlead_workergroup._membership.roster import Roster
from fairlead_workergroup._observe.observer import Observer
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
    roster = Roster("local", places := lay_out(slots, prefix="local"), sharding)
    started = []
    for place in places:
        process = replace(make_process(place, {"worker": place.rank}), pid=1, actor_id=f"{place.rank:032}")
        started.append(Started(SimpleNamespace(_actor_id=bytes.fromhex(process.actor_id)), place, process))
    roster.commit(epoch=0, sharding=sharding, places=places, facts=(), started=started, resize=None)
    return Observer(roster)

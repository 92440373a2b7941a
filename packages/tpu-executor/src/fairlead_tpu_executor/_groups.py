# SPDX-License-Identifier: Apache-2.0
"""Placement groups of slices. The only module that uses Ray's support for slices.

One plain placement group holds a slice: bundle i is on TPU worker i, the bundle of worker 0 has the head resource of
the slice, and `topology_strategy` keeps all bundles in one slice. Ray places the group on the whole slice or not at
all. The selectors name the slice, because Ray would choose slices in no particular order.

- **A slice is lost.** Ray parks the group (RESCHEDULING) until the hosts come back, which costs the head about 1 % of a
  core and delays no other group. If a host with the name and the number of the lost one joins, Ray uses it for the
  bundle. `is_intact` compares the nodes, so the pool sees either state as a loss, removes the group, and takes another
  slice.
- **Two jobs want the same slices.** Both choose free slices in the order of their names, so the job that gets the first
  one gets the others too. The groups of the other job find no room: all of them are removed, and the job waits until as
  many slices as it needs are free. While it waits it takes nothing, so no two jobs wait for each other's slices.
- **An autoscaler is to bring a slice.** An autoscaler does not see a `topology_strategy`. While slices are missing, and
  only if an autoscaler is there, `Demand` holds a `SlicePlacementGroup` for each of them. It requests worker 0 of a new
  slice first, by its head resource, which makes an autoscaler add one slice and not one per host. When its groups are
  placed they are removed, and the slice is taken like any other. Its constructor blocks, so it runs on a thread, in
  rounds of `ROUND_S`; a request that is not needed any more ends with its round. `get_num_ready_tpu_slices` is not
  used, because it counts slices in use as ready.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.tpu import SlicePlacementGroup

from fairlead_placement import extension

from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._ray_private import usual_topology
from ._slices import SLICE_NAME, WORKER_ID, SliceInfo

_RETURN_S = 15.0
# Ray has this long to place groups for which there is room, and a group that lacks room for this long lost a race.
_PLACING_S = 30.0
_NO_ROOM_S = 1.0
# Ray has found no room for a group that is in none of these states, and will try again.
_ON_ITS_WAY = ("QUEUED", "SCHEDULING_STARTED", "FINISHED")
# An autoscaler looks at the requests every 5 s.
ROUND_S = 20.0


def hold(config: AcceleratorConfigType, slices: Sequence[SliceInfo]) -> list[PlacementGroup] | None:
    """Hold all of these slices, each by a placement group, or none: then return None, with nothing left behind."""
    groups: list[PlacementGroup] = []
    is_placed = False

    def create() -> None:
        groups.extend(placement_group(**_describe(config, place)) for place in slices)

    try:
        try:
            extension.ask_head("create the placement groups of slices", create, undo=lambda _: remove(groups))
        finally:
            # Even after an error: Ray may never free what it is about to hold for a group that is removed.
            _settle(groups)
        is_placed = all(map(is_intact, groups, slices))
    finally:
        if not is_placed:
            remove(groups)
    return groups if is_placed else None


def _describe(config: AcceleratorConfigType, place: SliceInfo) -> dict[str, Any]:
    """Return Ray's options of the group that holds a slice."""
    options: dict[str, Any] = {"bundle_label_selector": [{"ray.io/node-id": node_id} for node_id in place.node_ids]}
    if isinstance(config, TpuAcceleratorConfig) and place.num_hosts > 1:
        named = [{SLICE_NAME: place.slice_name, WORKER_ID: str(worker)} for worker in range(place.num_hosts)]
        options = {"bundle_label_selector": named, "topology_strategy": {SLICE_NAME: "STRICT_PACK"}}
    # Ray refuses a second group of one name.
    name = f"fairlead-{place.slice_name}-{uuid.uuid4().hex[:8]}"
    return {"name": name, "bundles": [config.bundle(place, worker) for worker in range(place.num_hosts)], **options}


def remove(groups: Sequence[PlacementGroup]) -> bool:
    """Remove placement groups, and return whether Ray had their resources back in time."""
    return extension.remove_placement_groups(groups, timeout_s=_RETURN_S)


def _look_up(group: PlacementGroup) -> dict[str, Any]:
    return extension.ask_head("look at a placement group", placement_group_table, group) or {}


def is_intact(group: PlacementGroup, place: SliceInfo) -> bool:
    """Return whether a group is placed on the hosts of a slice, each bundle on its worker. Ray may not know of a loss.

    Raises:
        HeadTimeoutError: Ray's head did not answer in time.
    """
    row = _look_up(group)
    nodes = row.get("bundles_to_node_id", {})
    return row.get("state") == "CREATED" and tuple(nodes[index] for index in sorted(nodes)) == place.node_ids


def _settle(groups: Sequence[PlacementGroup]) -> None:
    """Wait until Ray has placed all groups, or has lacked room for one of them for `_NO_ROOM_S`."""
    last, pause = time.monotonic() + _PLACING_S, 0.002
    lacking_since = None
    while pending := [row for row in map(_look_up, groups) if row.get("state") != "CREATED"]:
        now = time.monotonic()
        # Ray's own views of what is free differ for some moments.
        is_lacking = any(row.get("stats", {}).get("scheduling_state") not in _ON_ITS_WAY for row in pending)
        lacking_since = (lacking_since or now) if is_lacking else None
        if now >= last or (lacking_since and now >= lacking_since + _NO_ROOM_S):
            return
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)


class Demand:
    """The request for missing slices, or for room for workers, that an autoscaler sees."""

    def __init__(self, config: AcceleratorConfigType) -> None:
        self._config = config
        self._jobs: list[extension.Job[_Request]] = []

    def show(self, count: int) -> None:
        """Show an autoscaler, if there is one, that so many slices are missing."""
        with extension.head_deadline():
            if not extension.ask_head("look for an autoscaler", extension.autoscaler_is_there):
                return
            waiting = []
            for job in self._jobs:
                if not job.over.is_set():
                    waiting.append(job)
                elif job.future.exception() is None:  # otherwise its round is over
                    if all(_look_up(group).get("state") == "CREATED" for group in job.future.result()[0]):
                        # It has come, and is free from now on.
                        _withdraw(job.future.result())
                        count -= 1
                    else:
                        waiting.append(job)
        missing = range(count - len(waiting))
        self._jobs = [*waiting, *(extension.run_in_thread(_show, self._config) for _ in missing)]

    def withdraw(self) -> None:
        """Request nothing any more. Can be repeated. A request that blocks is withdrawn when its round ends."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            with contextlib.suppress(TimeoutError, RuntimeError):
                _withdraw(job.result(_RETURN_S if job.over.is_set() else 0.0, undo=_withdraw))


# Placement groups, and the function that removes further ones.
_Request = tuple[Sequence[PlacementGroup], Callable[[], object]]


def _show(config: AcceleratorConfigType) -> _Request:
    """Request one slice. For a slice of several hosts this blocks until worker 0 has come; RuntimeError if not."""
    name = f"fairlead-wanted-{config.kind}-{uuid.uuid4().hex[:8]}"
    bundles = [config.bundle(None, worker) for worker in range(config.hosts_per_slice)]
    kind = config.slice_type if isinstance(config, TpuAcceleratorConfig) else None
    topology = kind and kind.hosts > 1 and (kind.topology or usual_topology(kind.generation, kind.chips))
    if not kind or not topology:
        return [placement_group(bundles, strategy="PACK", name=name)], list
    wanted = SlicePlacementGroup(
        topology,
        kind.generation,
        bundles[-1],
        name=name,
        chips_per_vm=kind.chips_per_host,
        head_reservation_timeout_s=ROUND_S,
    )
    return [wanted.slice_placement_group], wanted.shutdown


def _withdraw(request: _Request) -> None:
    groups, shutdown = request
    if ray.is_initialized():
        remove(groups)
        shutdown()

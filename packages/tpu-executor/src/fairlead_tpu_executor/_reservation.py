# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool: several or none, replaced one by one. The only module that knows how Ray reserves slices.

One placement group holds a slice: bundle i is on TPU worker i, the bundle of worker 0 has the slice's head resource, by
which Ray's own `SlicePlacementGroup` also takes slices, and `topology_strategy` keeps all bundles in one slice. Ray
places the group on the whole slice or not at all. The selectors name the slice, so that all jobs take slices in the
same order.

- **A slice is lost.** Ray parks the group (RESCHEDULING) until the hosts come back, which delays no other group. If a
  host with the name and the number of the lost one joins, Ray uses it for the bundle. The pool compares the
  nodes, so it sees either state as a loss, removes the group, and takes another slice.
- **Two jobs want the same slices.** Both choose free slices in the order of their names, so the job that gets the first
  one gets the others too. The groups of the other job find no room: all of them are removed, and the job waits until as
  many slices as it needs are free. While it waits it takes nothing, so no two jobs wait for each other's slices.
- **An autoscaler is to bring a slice.** While slices are missing, and only if an autoscaler is there, the pool requests
  one group with the bundle of worker 0 of every slice that the pool does not hold, even of free ones. Ray cannot place
  a part of it, so it takes none of the free ones, and an autoscaler sees how many are missing beside them. The head
  resource makes it add whole slices. Once Ray has placed the group, all slices have come: the group is removed,
  and they are taken like any others. A `SlicePlacementGroup` would hold the free slices during the wait.
"""

import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import (
    HeadTimeoutError,
    PlacementError,
    PortLease,
    PortUnavailableError,
    Slot,
    extension,
    lease_ports,
    release_ports,
)

from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._slices import SLICE_NAME, WORKER_ID, SliceInfo
from .exceptions import InsufficientSlicesError, TpuExecutorError

logger = logging.getLogger(__name__)
_RETURN_S = 15.0
# The other hosts of a slice join later than worker 0, so a request that was met is repeated only after this time.
_REPEAT_S = 60.0
_POLL_S = (0.05, 1.0)
# A wait that is longer logs what it waits for.
_SILENT_S = 1.0
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0
# Where worker 0 is, as a place for the port of its slice.
_FIRST: dict[str, Any] = dict.fromkeys(("bundle_index", "node_idx", "node_rank", "local_rank"), 0)


@dataclass(frozen=True)
class Lease:
    """A slice that is held by one placement group, with the port of its coordinator, on worker 0."""

    slice: SliceInfo
    group: PlacementGroup
    port: PortLease


def _describe(config: AcceleratorConfigType, place: SliceInfo) -> dict[str, Any]:
    """Return Ray's options of the group that holds a slice."""
    bundles = [config.bundle(place, worker) for worker in range(place.num_hosts)]
    options = {"name": f"fairlead-{place.slice_name}", "bundles": bundles}
    if isinstance(config, TpuAcceleratorConfig) and place.num_hosts > 1:
        named = [{SLICE_NAME: place.slice_name, WORKER_ID: str(worker)} for worker in range(place.num_hosts)]
        return {**options, "bundle_label_selector": named, "topology_strategy": {SLICE_NAME: "STRICT_PACK"}}
    return {**options, "bundle_label_selector": [{"ray.io/node-id": node_id} for node_id in place.node_ids]}


def _look_up(group: PlacementGroup) -> tuple[str, tuple[str, ...]]:
    """Return the state of a group, and the node of each of its bundles, as far as Ray knows."""
    row = extension.ask_head("look at a placement group", placement_group_table, group) or {}
    nodes = row.get("bundles_to_node_id", {})
    return row.get("state", "REMOVED"), tuple(nodes[index] for index in sorted(nodes))


class Reservation:
    """The one owner of what a pool holds, shared by the copies of the pool.

    Attributes:
        sizes: the allowed numbers of slices, ascending.
        is_open: False after the pool was closed, until its next use begins.
        leases: the slices that are held, with their ports. A change makes a new value.
        dead: nodes that a task has reported dead, perhaps long before Ray's head does; they are not used any more.
        not_started: nodes whose accelerators did not start in the last attempt.
        doubtful: nodes that failed to start something. Their slices are given back, and others are preferred.
        lock: whoever takes or returns slices has it until `leases` shows that, and so has whoever starts something.
    """

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.sizes: Sequence[int] = config.sizes
        self.is_open = True
        self.leases: tuple[Lease, ...] = ()
        self.dead: set[str] = set()
        self.not_started: set[str] = set()
        self.doubtful: set[str] = set()
        self.lock = threading.RLock()
        self._demand: list[PlacementGroup] = []  # what an autoscaler is to make room for: one group, or none
        self._next_demand_at = 0.0

    def ensure(self) -> tuple[Lease, ...]:
        """Hold healthy slices, keep those that are held, and replace lost ones; after an error nothing is held."""
        with self.lock:
            try:
                lost = self._give_back_lost()
                if len(self.leases) != self.sizes[-1]:
                    self._scale(lost)
                self.check_open()  # A signal handler may have closed the pool.
            except BaseException as error:
                self.give_back(1.0 if isinstance(error, HeadTimeoutError) else None)
                raise
            return self.leases

    def check_open(self) -> None:
        """Raise a TpuExecutorError if the pool was closed since its current use began."""
        if not self.is_open:
            raise TpuExecutorError("The pool was closed while it was in use. Use a pool that stays open.")

    def _give_back_lost(self) -> int:
        """Give back slices that are lost or doubtful, and return their number. A doubtful one may be taken again."""
        if not self.leases:
            return 0
        with extension.head_deadline():
            usable = {node.node_id for node in extension.read_nodes()} - self.dead - self.doubtful
            lost = [
                lease
                for lease in self.leases
                if not usable.issuperset(lease.slice.node_ids)
                or _look_up(lease.group) != ("CREATED", lease.slice.node_ids)
            ]
        self._drop(lost)
        return len(lost)

    def _drop(self, leases: Sequence[Lease], timeout_s: float | None = None) -> bool:
        """Return slices and ports, and whether Ray had the resources of the slices in time."""
        self.leases = tuple(lease for lease in self.leases if lease not in leases)
        with extension.head_deadline(timeout_s):
            try:
                release_ports([lease.port for lease in leases], timeout_s=_RETURN_S)
            except PlacementError as error:  # The host may be lost; otherwise it releases its ports later.
                logger.debug("Ports were not released in time: %s", error)
            finally:
                returned = extension.remove_placement_groups([lease.group for lease in leases], timeout_s=_RETURN_S)
        return returned

    def _survey(self) -> tuple[list[SliceInfo], dict[str, str]]:
        """Read the nodes once, and return which slices are free and not held, and why the others are not free."""
        with extension.head_deadline():
            nodes = [node for node in extension.read_nodes() if node.node_id not in self.dead]
        held = {lease.slice.slice_name for lease in self.leases}
        others = {name: place for name, place in self.config.find(nodes).items() if name not in held}
        free = [place for place in others.values() if isinstance(place, SliceInfo)]
        lacking = {name: place for name, place in others.items() if isinstance(place, str)}
        return sorted(free, key=lambda place: not self.doubtful.isdisjoint(place.node_ids)), lacking

    def _scale(self, lost: int) -> None:
        """Hold an allowed number of slices, including those that are held, after `lost` were lost.

        Nothing more is taken while it waits: two jobs that each hold a part of what both need would wait forever.
        """
        config, sizes = self.config, self.sizes
        any_s = 0.0 if len(self.leases) in sizes else config.scale_timeout_s
        any_s = config.replace_timeout_s if lost else any_s
        largest_s = min(any_s, config.scale_timeout_s)
        began, pause, is_logged, self._next_demand_at = time.monotonic(), _POLL_S[0], False, 0.0
        try:
            while True:
                self.check_open()
                waited = time.monotonic() - began
                free, lacking = self._survey()
                held = len(self.leases)
                size = choose_size(sizes, held + len(free), waited_out=waited >= largest_s)
                if size is None:
                    self._request(sizes[-1] - held)
                else:
                    self._withdraw()  # Ray would place it on the slices that are to be taken.
                    if self._change_size(size, free):
                        return
                if waited >= any_s + (0 if size is None else _RACES_S):
                    raise InsufficientSlicesError(config.kind, tuple(sizes), held + len(free), lacking, waited)
                if not is_logged and waited >= _SILENT_S:
                    is_logged, others = True, ", ".join(lacking) or "none"
                    text = "Waiting for %d x %s, for up to %g s: %d held, %d free; others: %s."
                    logger.warning(text, sizes[-1], config.kind, any_s, held, len(free), others)
                nearest = largest_s if waited < largest_s else any_s
                # With the jitter, two jobs that took one slice each from the other try again at different times.
                time.sleep(max(0.01, min(random.uniform(0.5, 1.0) * pause, began + nearest - time.monotonic())))
                pause = min(2 * pause, _POLL_S[1])
        finally:
            self._withdraw()

    def _request(self, count: int) -> None:
        """Let an autoscaler see that `count` slices, or workers, are missing, until they have come."""
        config = self.config
        with extension.head_deadline():
            if self._demand:
                if _look_up(self._demand[0])[0] == "CREATED":
                    self._withdraw()
                    self._next_demand_at = time.monotonic() + _REPEAT_S
            elif time.monotonic() >= self._next_demand_at:
                if not extension.ask_head("look for an autoscaler", extension.autoscaler_is_there):
                    return
                count *= 1 if isinstance(config, TpuAcceleratorConfig) else config.worker_count
                wanted = {"name": "fairlead-wanted", "bundles": [config.bundle(None, worker=0)] * count}
                self._demand = [*extension.create_groups([wanted], deadline=0.0)]

    def _withdraw(self) -> None:
        groups, self._demand = self._demand, []
        with extension.head_deadline():
            extension.remove_placement_groups(groups)

    def _change_size(self, size: int, free: Sequence[SliceInfo]) -> bool:
        """Hold `size` slices; return False, with nothing new, if another job was faster or a host seems to be lost."""
        chosen = free[: max(0, size - len(self.leases))]
        with extension.head_deadline():
            placed = extension.create_groups([_describe(self.config, place) for place in chosen], deadline=0.0)
        groups, leases = list(placed), list[Lease]()
        try:
            if [*placed.values()] == [place.node_ids for place in chosen]:
                pairs = [*zip(chosen, groups, strict=True)]
                ports = lease_ports(
                    [
                        Slot(placement_group=group, node_id=place.node_ids[0], node_ip=place.ip_address, **_FIRST)
                        for place, group in pairs
                    ]
                )
                leases = [Lease(place, group, port) for (place, group), (port,) in zip(pairs, ports, strict=True)]
        except (HeadTimeoutError, PortUnavailableError):
            raise
        except PlacementError as error:
            # Most likely a host is lost, and Ray does not know yet, so other slices are preferred from now on.
            logger.info("Slices could not be taken: %s", error)
            self.doubtful.update(place.node_ids[0] for place in chosen)
        finally:
            if not leases:
                extension.remove_placement_groups(groups)
        if len(leases) < len(chosen):
            return False
        self._drop(self.leases[size:])
        self.leases = (*self.leases, *leases)
        return True

    def give_back(self, timeout_s: float | None = None) -> bool:
        """Return slices and ports, and whether Ray had the resources before its head's deadline."""
        with self.lock:
            leases = self.leases
            try:
                return self._drop(leases, timeout_s)
            except HeadTimeoutError as error:
                names = ", ".join(lease.slice.slice_name for lease in leases)
                logger.warning("%s will be returned when Ray's head answers. %s", names, error)
                return False


def choose_size(sizes: Sequence[int], present: int, *, waited_out: bool) -> int | None:
    """Return how many slices to hold now; None means to wait for the largest allowed number. Pure."""
    possible = [size for size in sizes if size <= present]
    return possible[-1] if possible and (possible[-1] == sizes[-1] or waited_out) else None

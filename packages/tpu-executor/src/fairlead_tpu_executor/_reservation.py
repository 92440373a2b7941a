# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool: several or none, replaced one by one. The only module that knows how Ray reserves slices.

One group holds a slice: bundle i is pinned to the node of TPU worker i, and the bundle of worker 0 has the slice's head
resource, by which Ray's own `SlicePlacementGroup` also takes slices. Ray places the whole group or nothing of it.

- **A slice is lost.** Ray parks the group, and looks for no other nodes. The pool sees it as a loss (`is_intact`),
  removes the group, and takes another slice.
- **Two jobs want the same slices.** Both choose free slices in the order of their names, so the job that gets the first
  one gets the others too. The groups of the other job find no room: all of them are removed, and the job waits until as
  many slices as it needs are free. While it waits it takes nothing, so no two jobs wait for each other's slices.
- **An autoscaler is to bring a slice.** While slices are missing, and only if an autoscaler is there, `Demand` requests
  one group with the bundle of worker 0 of every slice that the pool does not hold, even of free ones. Ray cannot place
  a part of it, so it takes none of the free ones, and an autoscaler sees how many are missing beside them. The head
  resource makes it add whole slices. Once Ray has placed the group, all slices have come: the group is removed,
  and they are taken like any others. A `SlicePlacementGroup` would hold the free slices during the wait.
"""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

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
from ._slices import SliceInfo
from .exceptions import InsufficientSlicesError, TpuExecutorError

logger = logging.getLogger(__name__)
_RELEASE_S = 10.0
# The other hosts of a slice join later than worker 0, so a request that was met is repeated only after this time.
_REPEAT_S = 60.0
_POLL_S = (0.05, 1.0)
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0


@dataclass(frozen=True)
class Lease:
    """A slice that is held by one placement group: bundle i is worker i."""

    slice: SliceInfo
    group: PlacementGroup
    port: PortLease  # of the coordinator of the slice, on worker 0


def make_slots(leases: Sequence[Lease]) -> list[Slot]:
    """Return every host, in the order of slices and TPU worker ids, without the ranks that `number_slots` gives."""
    return [
        _make_slot(lease.slice, lease.group, number, worker)
        for number, lease in enumerate(leases)
        for worker in range(lease.slice.num_hosts)
    ]


def _make_slot(place: SliceInfo, group: PlacementGroup, number: int = 0, worker: int = 0) -> Slot:
    return Slot(
        placement_group=group,
        bundle_index=worker,
        node_idx=number,
        node_id=place.node_ids[worker],
        node_ip=place.node_ips[worker],
        node_rank=0,
        local_rank=0,
    )


def take(config: AcceleratorConfigType, chosen: Sequence[SliceInfo]) -> list[Lease] | None:
    """Take all of these slices, with ports; return None, and take none, if somebody else was faster.

    Raises:
        PlacementError: the ports could not be leased, in most cases because a host is lost. Nothing is taken then.
    """
    wanted = {
        f"fairlead-{place.slice_name}": [
            (node_id, config.bundle(place, worker)) for worker, node_id in enumerate(place.node_ids)
        ]
        for place in chosen
    }
    with extension.head_deadline():
        groups = extension.place_pinned(wanted)
    if groups is None:
        return None
    try:
        ports = lease_ports([*map(_make_slot, chosen, groups)])
    except BaseException:
        extension.remove_placement_groups(groups)
        raise
    return [Lease(place, group, port) for place, group, (port,) in zip(chosen, groups, ports, strict=True)]


def give_back(leases: Sequence[Lease]) -> bool:
    """Return slices and ports, and wait until Ray has the resources of the slices; False if that took too long."""
    try:
        release_ports([lease.port for lease in leases], timeout_s=_RELEASE_S)
    except PlacementError as error:  # The host may be lost before Ray knows; otherwise it releases its ports later.
        logger.debug("Ports were not released in time: %s", error)
    finally:
        returned = extension.remove_placement_groups([lease.group for lease in leases])
    return returned


def is_intact(group: PlacementGroup) -> bool:
    """Return whether a group is placed on all its nodes, as far as Ray knows; HeadTimeoutError like all requests."""
    row: dict[str, Any] = extension.ask_head("look at a placement group", placement_group_table, group) or {}
    return row.get("state") == "CREATED"


class Demand:
    """The request for missing slices, or for room for workers, that an autoscaler sees."""

    def __init__(self, config: AcceleratorConfigType) -> None:
        self._config = config
        self._group: list[PlacementGroup] = []  # one, or none
        self._next_at = 0.0

    def update(self, count: int) -> None:
        """Request `count` slices, if there is an autoscaler, or withdraw the request if it is met."""
        with extension.head_deadline():
            if self._group:
                if is_intact(self._group[0]):
                    self.withdraw()
                    self._next_at = time.monotonic() + _REPEAT_S
            elif time.monotonic() >= self._next_at:
                undo = extension.remove_placement_groups
                self._group = extension.ask_head("request slices", self._create, count, undo=undo)

    def _create(self, count: int) -> list[PlacementGroup]:
        if not extension.autoscaler_is_there():
            return []
        config = self._config
        count *= 1 if isinstance(config, TpuAcceleratorConfig) else config.worker_count
        name = f"fairlead-wanted-{uuid.uuid4().hex[:8]}"
        return [placement_group([config.bundle(None, worker=0)] * count, name=name)]

    def withdraw(self) -> None:
        """Request nothing any more. Can be repeated."""
        group, self._group = self._group, []
        with extension.head_deadline():
            extension.remove_placement_groups(group)


class Reservation:
    """The one owner of what a pool holds. A finalizer keeps it alive, and not the pool itself.

    Attributes:
        sizes: the allowed numbers of slices, ascending.
        is_open: False after the pool was closed, until its next use begins.
        leases: the slices that are held, with their ports. A change makes a new value.
        dead: nodes that a task has reported dead, perhaps long before Ray's head does; they are not used any more.
        doubtful: nodes that failed to start something. Their slices are given back, and others are preferred.
    """

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.sizes: Sequence[int] = config.sizes
        self.is_open = True
        self.leases: tuple[Lease, ...] = ()
        self.dead: set[str] = set()
        self.doubtful: set[str] = set()
        # Whoever takes or returns slices has it until `leases` shows that, and so has whoever starts something on them.
        self.lock = threading.RLock()

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
            usable = {node.node_id for node in extension.read_nodes(with_free=False)} - self.dead - self.doubtful
            lost = [
                lease
                for lease in self.leases
                if not usable.issuperset(lease.slice.node_ids) or not is_intact(lease.group)
            ]
        self._drop(lost)
        return len(lost)

    def _drop(self, leases: Sequence[Lease]) -> None:
        if leases:
            self.leases = tuple(lease for lease in self.leases if lease not in leases)
            with extension.head_deadline():
                give_back(leases)

    def _survey(self) -> tuple[list[SliceInfo], dict[str, str]]:
        """Read the nodes once, and return which slices are free and not held, and why the others are not free."""
        with extension.head_deadline():
            nodes = {node.node_id: node for node in extension.read_nodes() if node.node_id not in self.dead}
        free: list[SliceInfo] = []
        lacking: dict[str, str] = {}
        held = {lease.slice.slice_name for lease in self.leases}
        for name, place in self.config.find([*nodes.values()]).items():
            if name in held:
                continue
            if isinstance(place, str):
                lacking[name] = place
                continue
            bundles = [(self.config.bundle(place, worker), node_id) for worker, node_id in enumerate(place.node_ids)]
            room = [extension.count_bundles(bundle, nodes[node_id].free) for bundle, node_id in bundles]
            if all(room):
                free.append(place)
            else:
                busy = ", ".join(str(worker) for worker, count in enumerate(room) if not count)
                lacking[name] = f"somebody else uses worker {busy}"
        return sorted(free, key=lambda place: not self.doubtful.isdisjoint(place.node_ids)), lacking

    def _scale(self, lost: int) -> None:
        """Hold an allowed number of slices, including those that are held, after `lost` were lost.

        Nothing more is taken while it waits: two jobs that each hold a part of what both need would wait forever.
        """
        config, sizes = self.config, self.sizes
        any_s = config.scale_timeout_s
        if lost:
            any_s = config.replace_timeout_s
        elif len(self.leases) in sizes:
            any_s = 0.0
        largest_s = min(any_s, config.scale_timeout_s)
        began, pause, demand = time.monotonic(), _POLL_S[0], Demand(config)
        with extension.Waiting(f"Waiting for {sizes[-1]} x {config.kind}") as waiting:
            try:
                while True:
                    self.check_open()
                    waited = time.monotonic() - began
                    free, lacking = self._survey()
                    held = len(self.leases)
                    size = choose_size(sizes, held + len(free), waited_out=waited >= largest_s)
                    if size is None:
                        demand.update(sizes[-1] - held)
                    else:
                        demand.withdraw()  # Ray would place it on the slices that are to be taken.
                        if self._change_size(size, free):
                            return
                    if waited >= any_s + (0 if size is None else _RACES_S):
                        raise InsufficientSlicesError(config.kind, tuple(sizes), held + len(free), lacking, waited)
                    waiting.show(f"{held} held, {len(free)} free; others: {', '.join(lacking) or 'none'}", any_s)
                    nearest = largest_s if waited < largest_s else any_s
                    time.sleep(max(0.01, min(pause, began + nearest - time.monotonic())))
                    pause = min(2 * pause, _POLL_S[1])
            finally:
                demand.withdraw()

    def _change_size(self, size: int, free: Sequence[SliceInfo]) -> bool:
        """Hold `size` slices.

        Returns False if somebody else was faster, or if a host of a new slice seems to be lost before Ray knows: other
        slices are preferred then.
        """
        chosen = free[: max(0, size - len(self.leases))]
        try:
            taken = take(self.config, chosen) if chosen else []
        except (HeadTimeoutError, PortUnavailableError):
            raise
        except PlacementError as error:
            logger.info("Slices could not be taken: %s", error)
            self.doubtful.update(place.node_ids[0] for place in chosen)
            return False
        if taken is None:
            return False
        self._drop(self.leases[size:])
        self.leases = (*self.leases, *taken)
        return True

    def close(self) -> bool:
        self.is_open = False
        return self.give_back()

    def give_back(self, timeout_s: float | None = None) -> bool:
        """Return slices and ports, and whether Ray had the resources before its head's deadline."""
        with self.lock:
            leases, self.leases = self.leases, ()
            # If Ray has ended, so has everything that was held.
            if not leases or not extension.connection():
                return True
            try:
                with extension.head_deadline(timeout_s):
                    return give_back(leases)
            except HeadTimeoutError as error:
                names = ", ".join(lease.slice.slice_name for lease in leases)
                logger.warning("%s will be returned when Ray's head answers. %s", names, error)
                return False

    def describe_leak(self) -> str:
        """Return the warning about a pool that was dropped; empty if it holds nothing."""
        count = len(self.leases) if extension.connection() else 0
        if not count:
            return ""
        return (
            f"A slice pool was dropped without close() while it held {count} slice(s). They are returned in the "
            "background. Use the pool in a with statement, or call close()."
        )


def choose_size(sizes: Sequence[int], present: int, *, waited_out: bool) -> int | None:
    """Return how many slices to hold now; None means to wait for the largest allowed number. Pure."""
    possible = [size for size in sizes if size <= present]
    return possible[-1] if possible and (possible[-1] == sizes[-1] or waited_out) else None

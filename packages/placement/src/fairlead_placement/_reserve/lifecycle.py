# SPDX-License-Identifier: Apache-2.0
"""Holds a reservation and everything that was taken on it, and releases all of it together."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup

from .._init import connection
from .._model import Ask, Request
from .._nodes.agent import Monitor, read_usage
from .._nodes.head import alive_nodes, ask_head, head_deadline, read_nodes
from .._nodes.ports import PortLease, lease_ports, release_ports
from .._nodes.usage import NodeUsage
from .._plan.topology import node_place
from .._ray_private import draining_nodes
from .._slot import Slot
from ..exceptions import HeadTimeoutError, PlacementError
from .attempt import Attempt, reserve
from .gpus import GpuAttempt
from .groups import Reserved, number_slots, remove, slots_of

# Seconds in which Ray has to have the resources back.
GIVE_BACK_S = 30.0


class Holding:
    """What a virtual cluster holds. The cluster's finalizer refers to it, so it must not refer to the cluster.

    Args:
        request: the bundles to reserve.
        monitor_memory: have the nodes' memory sampled while it is reserved.
    """

    def __init__(self, request: Request, *, monitor_memory: bool = False) -> None:
        self.request = request
        self.monitor_memory = monitor_memory
        self.reserved = False
        self.reserved_at = 0.0
        self._connection = ""
        self.slots: tuple[Slot, ...] = ()
        self._groups: list[PlacementGroup] = []
        # Each reservation has a list of its own, so that a late lease does not go into the next reservation's.
        self._leases: list[PortLease] = []
        self._leasing = threading.RLock()
        self._monitor: Monitor | None = None
        # Reentrant: a reservation that fails releases what it has.
        self._lock = threading.RLock()

    @property
    def ray_ended(self) -> bool:
        """Whether this process is no longer connected to the Ray on which it was reserved."""
        return self.reserved and self._connection != connection()

    @property
    def groups(self) -> list[PlacementGroup]:
        """The placement groups of the slots, in the order of the logical nodes."""
        return list(self._groups)

    def reserve(self, *, unified: bool) -> None:
        """Reserve, unless that has been done."""
        request = replace(self.request, unified=unified)
        with self._lock, head_deadline(max(request.timeout_s, request.wait_for_nodes_s)):
            if self.reserved:
                return
            self._connection = connection()
            deadline = time.monotonic() + request.timeout_s
            while True:
                left = replace(request, timeout_s=max(0.0, deadline - time.monotonic()))
                placed = _reserve(left)
                self._groups = [one.group for one in placed]
                try:
                    self.slots = slots_of(placed, request.capacity, deadline=deadline)
                    if self.monitor_memory:
                        self._monitor = Monitor(self.node_ids, request.name)
                        self._monitor.read()
                except BaseException as error:
                    self.give_back()
                    of_ray = isinstance(error, (ray.exceptions.RayError, PlacementError))
                    if not of_ray or isinstance(error, HeadTimeoutError) or time.monotonic() >= deadline:
                        raise
                    # If a node was lost meanwhile, or is draining, the next plan avoids it.
                    staying = alive_nodes() - ask_head("list the nodes that are draining", draining_nodes)
                    if staying.issuperset(node_id for one in placed for node_id in one.node_ids):
                        raise
                else:
                    self.request, self.reserved, self.reserved_at = request, True, time.time()
                    return

    def replace_lost(self, *, timeout_s: float) -> tuple[Slot, ...]:
        """Reserve slots in place of those whose node is gone, and return the new ones."""
        with self._lock, head_deadline(timeout_s):
            alive = alive_nodes()
            lost = [at for at, slot in enumerate(self.slots) if slot.node_id not in alive]
            if not lost:
                return ()
            counts = Counter(self.slots[at].node_idx for at in lost)
            asks = [replace(ask, count=counts[ask.node_idx]) for ask in self.request.asks if ask.node_idx in counts]
            placed: list[Reserved] = []
            wanted = self.request.gpu_ids
            deadline = time.monotonic() + timeout_s
            try:
                for batch, segment_size in self._batches(asks, alive):
                    left = max(0.0, deadline - time.monotonic())
                    # A new node may be on its way: callers wait for one after a loss.
                    ids = {ask.node_idx: wanted[ask.node_idx] for ask in batch if wanted}
                    part = replace(
                        self.request,
                        asks=tuple(batch),
                        segment_size=segment_size,
                        gpu_ids=ids,
                        timeout_s=left,
                        wait_for_nodes_s=left,
                        unified=False,
                    )
                    placed += _reserve(part, avoid=self._taken_by(batch[0], alive, placed))
                new = slots_of(placed, self.request.capacity, deadline=deadline)
            except BaseException:
                remove([one.group for one in placed])
                raise
            self._groups += [one.group for one in placed]
            self._put_in(lost, new)
            self._drop_empty_groups()
            if self._monitor is not None:
                self._monitor.watch(self.node_ids)
            return tuple(self.slots[at] for at in lost)

    @property
    def node_ids(self) -> list[str]:
        """Return the ids of the physical nodes, in the order of the slots."""
        return list(dict.fromkeys(slot.node_id for slot in self.slots))

    def usage(self, node_ids: Sequence[str]) -> tuple[NodeUsage, ...]:
        """Return the memory of some of its nodes, with the peaks since it was reserved if that is monitored."""
        if self._monitor is None:
            return read_usage(node_ids)
        return tuple(usage for usage in self._monitor.read() if usage.node_id in node_ids)

    def _batches(self, asks: Sequence[Ask], alive: AbstractSet[str]) -> list[tuple[list[Ask], int | None]]:
        """Return what is reserved in one step, with its segment size: the asks one by one, the most demanding first.

        The asks of a segment that has lost all its nodes stay together: nothing shows which domain it was in.
        """
        number = self._segments()
        left = {number[slot.node_idx] for slot in self.slots if slot.node_id in alive}
        lost: dict[int, list[Ask]] = {}
        batches: list[tuple[list[Ask], int | None]] = []
        for ask in sorted(asks, key=lambda ask: -ask.count):
            if self.request.segment_size and number[ask.node_idx] not in left:
                lost.setdefault(number[ask.node_idx], []).append(ask)
            else:
                batches.append(([ask], None))
        return [*batches, *((segment, self.request.segment_size) for segment in lost.values())]

    def _segments(self) -> dict[int, int]:
        """Return the number of each logical node's segment."""
        return {one.node_idx: at // (self.request.segment_size or 1) for at, one in enumerate(self.request.asks)}

    def _taken_by(self, ask: Ask, alive: AbstractSet[str], placed: Sequence[Reserved]) -> frozenset[str]:
        """Return the nodes that a replacement cannot use, because of what is left of the cluster."""
        survivors = [slot for slot in self.slots if slot.node_id in alive]
        if self.request.unified or self.request.segment_size:  # every logical node is on a physical node of its own
            taken = frozenset(slot.node_id for slot in survivors).union(*(one.node_ids for one in placed))
            return taken | self._in_other_domains(ask, survivors)
        if ask.strategy == "STRICT_SPREAD":
            return frozenset(slot.node_id for slot in survivors if slot.node_idx == ask.node_idx)
        return frozenset()

    def _in_other_domains(self, ask: Ask, survivors: Sequence[Slot]) -> frozenset[str]:
        """Return the nodes outside of the domain of a lost logical node's segment, if some of that is left."""
        if not self.request.segment_size:
            return frozenset()
        number = self._segments()
        left = {slot.node_id for slot in survivors if number[slot.node_idx] == number[ask.node_idx]}
        domain = {node.node_id: node_place(node)[0] for node in read_nodes()}
        allowed = {domain[node_id] for node_id in left if node_id in domain}
        return frozenset(node_id for node_id in domain if allowed and domain[node_id] not in allowed)

    def _put_in(self, lost: Sequence[int], new: Sequence[Slot]) -> None:
        """Put each new slot in the place of a lost one of its logical node, and number the nodes again."""
        slots = list(self.slots)
        of_logical_node: dict[int, list[Slot]] = {}
        for slot in reversed(new):
            of_logical_node.setdefault(slot.node_idx, []).append(slot)
        for at in lost:
            slots[at] = of_logical_node[slots[at].node_idx].pop()
        # Where several logical nodes were on one physical node, their replacements may be on several, or the other way.
        self.slots = number_slots(slots)

    def _drop_empty_groups(self) -> None:
        """Remove the groups that have lost all their bundles, so that no slot is in them."""
        by_node_idx = sorted(self.slots, key=lambda slot: slot.node_idx)
        kept = {slot.placement_group.id: slot.placement_group for slot in by_node_idx}
        gone = [group for group in self._groups if group.id not in kept]
        self._groups = list(kept.values())
        remove(gone)

    def lease(self, slots: Sequence[Slot], low: int, high: int) -> list[PortLease]:
        """Lease ports on the nodes of slots until everything is released.

        Returns:
            A lease for each slot.

        Raises:
            PlacementError: another thread has ended the reservation meanwhile. Nothing stays leased.
        """
        mine = self._leases
        leases = [lease for (lease,) in lease_ports(slots, low=low, high=high)]
        with self._leasing:
            if mine is self._leases:
                mine.extend(leases)
                return leases
        release_ports(leases)
        raise PlacementError(
            f"The cluster {self.request.name!r} was shut down while ports were leased on it. The ports are given back; "
            "lease them again once it is reserved again."
        )

    def give_back(self) -> bool:
        """Release ports and groups, and return whether Ray had the resources back in time."""
        with self._lock:
            groups, monitor = self._groups, self._monitor
            self._groups, self._monitor = [], None
            with self._leasing:
                leases, self._leases = self._leases, []
            self.slots, self.reserved = (), False
            here, reserved_on = connection(), self._connection
        if not (groups or leases or monitor) or not here or here != reserved_on:
            return True  # nothing was held, or Ray ended, and with it everything that was
        with head_deadline(GIVE_BACK_S):
            try:
                release_ports(leases)
                if monitor is not None:
                    monitor.stop()
            finally:
                returned = remove(groups, timeout_s=GIVE_BACK_S)
        return returned

    def leak(self) -> str:
        """Return what to say when the cluster is dropped while it holds something, or "" if it holds nothing."""
        groups, leases = self._groups, self._leases
        if not (groups or leases) or self._connection != connection():
            return ""
        return (
            f"The virtual cluster {self.request.name!r} was dropped without shutdown() while it held {len(groups)} "
            f"placement group(s) and {len(leases)} port(s). They are returned in the background. Use the cluster in a "
            "with statement, or call shutdown()."
        )


def _reserve(request: Request, *, avoid: AbstractSet[str] = frozenset()) -> tuple[Reserved, ...]:
    return reserve(GpuAttempt(request) if request.gpu_ids else Attempt(request), avoid=avoid)

# SPDX-License-Identifier: Apache-2.0
"""A reservation and all that was taken on it, held together and given back together."""

import threading
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from .._init import connection
from .._nodes.inventory import alive_nodes, read_nodes
from .._nodes.memory_monitor import Monitor, read_usage
from .._nodes.ports import PortLease, lease_ports, release_ports
from .._nodes.usage import NodeUsage
from .._plan.model import Ask
from .._plan.topology import node_place
from .._ray_private import draining_nodes
from .._slot import Slot
from ..exceptions import PlacementError
from .attempt import reserve
from .gpu_ids import reserve_gpus
from .groups import Reserved, remove
from .slots import slots_of

__all__ = ["Holding"]


class Holding:
    """What a virtual cluster holds. Apart from the cluster, so that its finalizer does not keep it alive.

    Args:
        asks: what is wanted.
        name: of the cluster.
        capacity: how many worker groups may share a slot.
        segment_size: logical nodes in groups of this many, each group in one topology domain.
        gpu_ids: which GPUs of its node each logical node is to have; nothing if any will do.
        monitor_memory: have the nodes' memory sampled while it is reserved.
        timeout_s: how long to wait for what others hold.
        wait_for_nodes_s: how long to wait for nodes that are joining.
    """

    def __init__(
        self,
        asks: Sequence[Ask],
        *,
        name: str,
        capacity: int,
        segment_size: int | None = None,
        gpu_ids: Mapping[int, frozenset[str]] | None = None,
        monitor_memory: bool = False,
        timeout_s: float,
        wait_for_nodes_s: float,
    ) -> None:
        self.asks = tuple(asks)
        self.name = name
        self.capacity = capacity
        self.segment_size = segment_size
        self.gpu_ids = dict(gpu_ids or {})
        self.monitor_memory = monitor_memory
        self.timeout_s = timeout_s
        self.wait_for_nodes_s = wait_for_nodes_s
        self.unified = False
        self.reserved = False
        self.reserved_at = 0.0
        self._connection = ""
        self.slots: tuple[Slot, ...] = ()
        self._groups: list[PlacementGroup] = []
        # A reservation's own list, so that a lease that comes after its end does not go into the next one's.
        self._leases: list[PortLease] = []
        self._leasing = threading.RLock()
        self._monitor: Monitor | None = None
        # Reentrant: a reservation that fails gives back what it has.
        self._lock = threading.RLock()

    @property
    def ray_ended(self) -> bool:
        """Whether it was reserved, and the Ray that it was reserved on is no longer that of this process."""
        return self.reserved and self._connection != connection()

    @property
    def groups(self) -> list[PlacementGroup]:
        """The placement groups that slots are in, in the order of the logical nodes."""
        return list(self._groups)

    def reserve(self, *, unified: bool) -> None:
        """Reserve, if that has not been done."""
        with self._lock:
            if self.reserved:
                return
            self._connection = connection()
            deadline = time.monotonic() + self.timeout_s
            while True:
                placed = self._reserve(
                    self.asks,
                    segment_size=self.segment_size,
                    unified=unified,
                    timeout_s=max(0.0, deadline - time.monotonic()),
                    wait_for_nodes_s=self.wait_for_nodes_s,
                )
                self._groups = [one.group for one in placed]
                try:
                    self.slots = slots_of(placed, self.capacity, deadline=deadline)
                    if self.monitor_memory:
                        self._monitor = Monitor(self.node_ids, self.name)
                        self._monitor.read()
                except BaseException as error:
                    self.give_back()
                    # A node that was lost meanwhile, or is about to be, is planned around; anything else is what it is.
                    lost = {node_id for one in placed for node_id in one.node_ids} - (alive_nodes() - draining_nodes())
                    of_ray = isinstance(error, (ray.exceptions.RayError, PlacementError))
                    if not (of_ray and lost and time.monotonic() < deadline):
                        raise
                else:
                    self.unified, self.reserved, self.reserved_at = unified, True, time.time()
                    return

    def replace_lost(self, *, timeout_s: float) -> tuple[Slot, ...]:
        """New slots for those whose node is gone, at their places; nothing if none is."""
        with self._lock:
            alive = alive_nodes()
            lost = [at for at, slot in enumerate(self.slots) if slot.node_id not in alive]
            if not lost:
                return ()
            counts: dict[int, int] = {}
            for at in lost:
                counts[self.slots[at].node_idx] = counts.get(self.slots[at].node_idx, 0) + 1
            asks = [replace(ask, count=counts[ask.node_idx]) for ask in self.asks if ask.node_idx in counts]
            placed: list[Reserved] = []
            deadline = time.monotonic() + timeout_s
            try:
                for batch, segment_size in self._batches(asks, alive):
                    left = max(0.0, deadline - time.monotonic())
                    avoid = self._taken_by(batch[0], alive, placed)
                    # A new node may be on its way: that is what one waits for after a loss.
                    placed += self._reserve(
                        batch,
                        segment_size=segment_size,
                        unified=False,
                        timeout_s=left,
                        wait_for_nodes_s=left,
                        avoid=avoid,
                    )
                found = slots_of(placed, self.capacity, deadline=deadline)
            except BaseException:
                remove([one.group for one in placed])
                raise
            self._groups += [one.group for one in placed]
            self._put_in(lost, found)
            self._drop_empty_groups()
            if self._monitor is not None:
                self._monitor.watch(self.node_ids)
            return tuple(self.slots[at] for at in lost)

    def _reserve(self, asks: Sequence[Ask], *, segment_size: int | None = None, **options: Any) -> tuple[Reserved, ...]:
        """With the particular GPUs that were asked for, if any were."""
        if self.gpu_ids:
            wanted = {ask.node_idx: self.gpu_ids[ask.node_idx] for ask in asks}
            return reserve_gpus(asks, wanted, name=self.name, **options)
        return reserve(asks, name=self.name, segment_size=segment_size, **options)

    @property
    def node_ids(self) -> list[str]:
        """The physical nodes, in the order of the slots."""
        return list(dict.fromkeys(slot.node_id for slot in self.slots))

    def usage(self, node_ids: Sequence[str]) -> tuple[NodeUsage, ...]:
        """The memory of some of its nodes: watched, or one sample."""
        if self._monitor is None:
            return read_usage(node_ids)
        return tuple(usage for usage in self._monitor.read() if usage.node_id in node_ids)

    def _batches(self, asks: Sequence[Ask], alive: AbstractSet[str]) -> list[tuple[list[Ask], int | None]]:
        """What is reserved in one step, with its segment size: the asks one by one, the most demanding first.

        Of a segment that has lost all its nodes nothing says any more which domain it is in: its asks stay together.
        """
        number = self._segments()
        left = {number[slot.node_idx] for slot in self.slots if slot.node_id in alive}
        whole: dict[int, list[Ask]] = {}
        batches: list[tuple[list[Ask], int | None]] = []
        for ask in sorted(asks, key=lambda ask: -ask.count):
            if self.segment_size and number[ask.node_idx] not in left:
                whole.setdefault(number[ask.node_idx], []).append(ask)
            else:
                batches.append(([ask], None))
        return [*batches, *((segment, self.segment_size) for segment in whole.values())]

    def _segments(self) -> dict[int, int]:
        """The number of each logical node's segment."""
        return {one.node_idx: at // (self.segment_size or 1) for at, one in enumerate(self.asks)}

    def _taken_by(self, ask: Ask, alive: AbstractSet[str], placed: Sequence[Reserved]) -> frozenset[str]:
        """The nodes that what is left of the cluster keeps a replacement from."""
        survivors = [slot for slot in self.slots if slot.node_id in alive]
        if self.unified or self.segment_size:  # every logical node is on a physical node of its own
            taken = frozenset(slot.node_id for slot in survivors).union(*(one.node_ids for one in placed))
            return taken | self._in_other_domains(ask, survivors)
        if ask.strategy == "STRICT_SPREAD":
            return frozenset(slot.node_id for slot in survivors if slot.node_idx == ask.node_idx)
        return frozenset()

    def _in_other_domains(self, ask: Ask, survivors: Sequence[Slot]) -> frozenset[str]:
        """The nodes that are not in the domain of what is left of a lost logical node's segment."""
        if not self.segment_size:
            return frozenset()
        number = self._segments()
        left = {slot.node_id for slot in survivors if number[slot.node_idx] == number[ask.node_idx]}
        domain = {node.node_id: node_place(node)[0] for node in read_nodes()}
        allowed = {domain[node_id] for node_id in left if node_id in domain}
        return frozenset(node_id for node_id in domain if allowed and domain[node_id] not in allowed)

    def _put_in(self, lost: Sequence[int], found: Sequence[Slot]) -> None:
        """Each new slot takes the place, and the numbers in the cluster, of a lost one of its logical node."""
        slots = list(self.slots)
        of_logical_node: dict[int, list[Slot]] = {}
        for slot in reversed(found):
            of_logical_node.setdefault(slot.node_idx, []).append(slot)
        for at in lost:
            slots[at] = of_logical_node[slots[at].node_idx].pop()
        # Where several logical nodes were on one physical node, their replacements may be on several, or the other way.
        rank = {node_id: number for number, node_id in enumerate(dict.fromkeys(slot.node_id for slot in slots))}
        seen = dict.fromkeys(rank, 0)
        for at, slot in enumerate(slots):
            slots[at] = replace(slot, node_rank=rank[slot.node_id], local_rank=seen[slot.node_id])
            seen[slot.node_id] += 1
        self.slots = tuple(slots)

    def _drop_empty_groups(self) -> None:
        """Remove groups that no slot is in any more: all their bundles were lost."""
        node_idx: dict[object, int] = {}
        for slot in self.slots:
            node_idx[slot.placement_group.id] = min(slot.node_idx, node_idx.get(slot.placement_group.id, slot.node_idx))
        gone = [group for group in self._groups if group.id not in node_idx]
        kept = [group for group in self._groups if group.id in node_idx]
        self._groups = sorted(kept, key=lambda group: node_idx[group.id])
        remove(gone)

    def lease(self, slots: Sequence[Slot], low: int, high: int) -> list[PortLease]:
        """Lease ports on the nodes of slots, held until everything is given back.

        Returns:
            A lease for each slot.

        Raises:
            PlacementError: another thread has ended the reservation meanwhile; nothing stays leased.
        """
        mine = self._leases
        leases = [lease for (lease,) in lease_ports(slots, low=low, high=high)]
        with self._leasing:
            if mine is self._leases:
                mine.extend(leases)
                return leases
        release_ports(leases)
        raise PlacementError(
            f"The cluster {self.name!r} was shut down while ports were leased on it. The ports are given back; "
            "lease them again once it is reserved again."
        )

    def give_back(self) -> bool:
        """Ports and groups; whether Ray had the resources back in time."""
        with self._lock:
            groups, monitor = self._groups, self._monitor
            self._groups, self._monitor = [], None
            with self._leasing:
                leases, self._leases = self._leases, []
            self.slots, self.reserved = (), False
            here, reserved_on = connection(), self._connection
        if not (groups or leases or monitor) or not here or here != reserved_on:
            return True  # nothing was held, or Ray ended, and with it everything that was
        try:
            release_ports(leases)
            if monitor is not None:
                monitor.stop()
        finally:
            returned = remove(groups)
        return returned

    def leak(self) -> str:
        """Return what to say when the cluster is dropped while it holds something, or "" if it holds nothing."""
        groups, leases = self._groups, self._leases
        if not (groups or leases) or self._connection != connection():
            return ""
        return (
            f"The virtual cluster {self.name!r} was dropped without shutdown() while it held {len(groups)} placement "
            f"group(s) and {len(leases)} port(s). They are returned in the background. Use the cluster in a with "
            "statement, or call shutdown()."
        )

# SPDX-License-Identifier: Apache-2.0
"""A part of a Ray cluster, reserved as if it were a cluster of its own."""

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn

import ray
from ray.util.placement_group import PlacementGroup
from rich.console import Console, RenderableType

from ._accelerators import accelerator_ids
from ._gpu_ids import check_gpu_ids, reserve_gpus
from ._grid import counted, draw
from ._inventory import read_nodes
from ._monitor import Monitor, read_usage
from ._occupancy import groups_on
from ._planner import PRECISION, STRATEGIES, Ask, Node
from ._ports import PORT_HIGH, PORT_LOW, PortLease, check_range, lease_ports
from ._render import as_html
from ._reservation import Reserved, remove, reserve
from ._slot import Slot
from ._usage import NodeUsage
from .exceptions import PlacementError

__all__ = ["RayVirtualCluster"]

BACKENDS = ("nccl", "gloo")


@dataclass
class _Held:
    """What has to be given back. Apart from the cluster, so that its finalizer does not keep it alive."""

    groups: list[PlacementGroup] = field(default_factory=list)
    leases: list[PortLease] = field(default_factory=list)
    monitor: Monitor | None = None

    def give_back(self) -> bool:
        groups, leases = list(self.groups), list(self.leases)
        monitor, self.monitor = self.monitor, None
        self.groups.clear()
        self.leases.clear()
        if not ray.is_initialized():
            return True  # Ray ended, and with it everything that was held
        try:
            for lease in leases:
                lease.release()
            if monitor is not None:
                monitor.stop()
        finally:
            returned = remove(groups)
        return returned


def _forgotten(held: _Held) -> None:
    """The safety net under a cluster nobody shut down; at interpreter exit Ray has ended or ends anyway."""
    if not sys.is_finalizing():
        with contextlib.suppress(PlacementError, ray.exceptions.RayError):
            held.give_back()


class RayVirtualCluster:
    """Reserves bundles on logical nodes and hands them out as slots in physical order.

    Args:
        bundle_ct_per_node_list: bundles per logical node; 0 is a node that is not used.
        use_gpus: each bundle holds one GPU.
        max_colocated_worker_groups: how many worker groups may share the slots; also CPUs per bundle.
        num_gpus_per_node: GPUs of a physical node, checked to be positive.
        name: shown in messages and in Ray's placement-group table.
        placement_group_strategy: how the bundles of *one logical node* are laid out: "STRICT_PACK" (on one physical
            node), "PACK", "SPREAD", "STRICT_SPREAD".
        enable_colocation: at least two worker groups may share the slots.
        gpu_ids: which GPUs of their nodes the bundles hold: a list of ids (with one logical node in use), a list per
            logical node, or "auto" (None): any.
        monitor_memory: have the memory of the nodes sampled once a second while the cluster is reserved; see
            `get_resource_usage`.
        communication_backend: "nccl" or "gloo", for workers to use; None: "nccl" with GPUs, else "gloo".
        port_range_low: first port that may be leased.
        port_range_high: last port that may be leased, included.
        node_resource_constraints: per logical node, what each of its bundles holds besides.
        reserve_timeout_s: how long to wait for resources that others hold.
        wait_for_nodes_s: how long to wait for nodes that are still joining.

    Raises:
        TypeError, ValueError: a bad argument; nothing has been asked of Ray.

    Nothing is reserved until `reserve()`, `get_placement_groups()`, `slots()` or `with cluster:`. Nodes are chosen
    here, from what is free, and every bundle is pinned to its node.

    >>> cluster = RayVirtualCluster([4, 0, 2], use_gpus=False)
    >>> cluster.world_size(), cluster.node_count()
    (6, 2)
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "STRICT_PACK",
        *,
        enable_colocation: bool = False,
        gpu_ids: Sequence[int] | Sequence[Sequence[int]] | Literal["auto"] | None = None,
        monitor_memory: bool = False,
        communication_backend: Literal["nccl", "gloo"] | None = None,
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        node_resource_constraints: Sequence[Mapping[str, float]] | None = None,
        reserve_timeout_s: float = 180.0,
        wait_for_nodes_s: float = 0.0,
    ) -> None:
        self._counts = _counts(bundle_ct_per_node_list)
        if placement_group_strategy not in STRATEGIES:
            raise ValueError(
                f"placement_group_strategy must be one of {list(STRATEGIES)}, got {placement_group_strategy!r}"
            )
        if communication_backend not in (None, *BACKENDS):
            raise ValueError(
                f"communication_backend must be one of {list(BACKENDS)}, or None, got {communication_backend!r}"
            )
        _positive("num_gpus_per_node", num_gpus_per_node)
        _positive("max_colocated_worker_groups", max_colocated_worker_groups)
        for what, seconds in (
            ("reserve_timeout_s", reserve_timeout_s),
            ("wait_for_nodes_s", wait_for_nodes_s),
        ):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{what} must be a number of seconds, 0 or more and finite, got {seconds!r}")
        self._ports = (
            PORT_LOW if port_range_low is None else port_range_low,
            PORT_HIGH if port_range_high is None else port_range_high,
        )
        check_range(*self._ports)
        self._capacity = max(max_colocated_worker_groups, 2 if enable_colocation else 1)
        self._extras = _constraints(node_resource_constraints, len(self._counts))
        self._gpu_ids = check_gpu_ids(gpu_ids, self._counts, use_gpus, placement_group_strategy)
        self._monitor_memory = monitor_memory
        self._backend = communication_backend
        self._strategy = placement_group_strategy
        self._reserve_timeout_s = reserve_timeout_s
        self._wait_for_nodes_s = wait_for_nodes_s
        self.use_gpus = use_gpus
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name

        self._reserved: tuple[Reserved, ...] | None = None
        self._unified = False
        self._slots: tuple[Slot, ...] = ()
        self._held = _Held()
        self._finalizer = weakref.finalize(self, _forgotten, self._held)

    def __repr__(self) -> str:
        state = "not reserved" if self._reserved is None else "reserved"
        kind = "GPU" if self.use_gpus else "CPU"
        return f"RayVirtualCluster({list(self._counts)}, {kind}, name={self.name!r}, {state})"

    @property
    def max_colocated_worker_groups(self) -> int:
        """How many worker groups may share a slot."""
        return self._capacity

    @property
    def communication_backend(self) -> str:
        """What workers are to communicate with: "nccl" or "gloo"."""
        return self._backend or ("nccl" if self.use_gpus else "gloo")

    def world_size(self) -> int:
        """Bundles in all. Reserves nothing."""
        return sum(self._counts)

    def node_count(self) -> int:
        """Logical nodes in use. Reserves nothing."""
        return sum(count > 0 for count in self._counts)

    def reserve(self, *, unified: bool = False) -> "RayVirtualCluster":
        """Reserve now, if that has not been done.

        Args:
            unified: one placement group over all logical nodes, each on a physical node of its own, instead of one
                group per logical node.

        Returns:
            The cluster.

        Raises:
            ResourceInsufficientError: the nodes cannot hold it even when idle, or others held GPUs that `gpu_ids`
                names until the deadline.
            PlacementTimeoutError: others held what it needs until the deadline.
            PlacementError: it is reserved already with another `unified`, or Ray is not running.
        """
        if self._reserved is not None:
            if unified != self._unified:
                raise PlacementError(
                    f"{self!r} is reserved with unified={self._unified}; shutdown() it before it is reserved "
                    f"with unified={unified}"
                )
            return self
        if not ray.is_initialized():
            raise PlacementError("Ray is not running in this process. Call init_ray() or ray.init() first.")
        how = functools.partial(reserve_gpus, wanted=self._gpu_ids) if self._gpu_ids else reserve
        reserved = how(
            self._asks(),
            name=self.name,
            unified=unified,
            timeout_s=self._reserve_timeout_s,
            wait_for_nodes_s=self._wait_for_nodes_s,
        )
        self._held.groups.extend(one.group for one in reserved)
        try:
            ids = accelerator_ids(reserved, timeout_s=max(self._reserve_timeout_s, 30.0))
            self._slots = _slots_of(reserved, ids, read_nodes(), self._capacity)
            if self._monitor_memory:
                self._held.monitor = Monitor(_node_ids(self._slots), self.name)
                self._held.monitor.read()
        except BaseException:
            self._slots = ()
            self._held.give_back()
            raise
        self._reserved = reserved
        self._unified = unified
        return self

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, one per logical node in use (one in all when unified). Reserves."""
        self.slots()
        return list(self._held.groups)

    def slots(self) -> tuple[Slot, ...]:
        """The bundles in physical order: by topology domain, node, accelerator id. Reserves."""
        if self._reserved is None:
            self.reserve()
        return self._slots

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address of the first slot's node and a port leased there until `shutdown()`; each call a new one."""
        if not self.slots():
            raise PlacementError(f"{self!r} has no slot, so no node that could have a master address")
        return self._lease(self._slots[:1])[0]

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """Address of a bundle's node and a port leased there until `shutdown()`.

        Args:
            pg_idx: index into `get_placement_groups()`.
            bundle_idx: Ray's index of the bundle in that group.
        """
        return self.get_available_addresses_and_ports_batch([(pg_idx, bundle_idx)])[0]

    def get_available_addresses_and_ports_batch(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
        """As `get_available_address_and_port` for many bundles; each node is asked once."""
        groups = self.get_placement_groups()
        by_bundle = {(slot.placement_group.id, slot.bundle_index): slot for slot in self._slots}
        chosen = []
        for pg_idx, bundle_idx in pairs:
            if not 0 <= pg_idx < len(groups):
                raise IndexError(f"placement group {pg_idx} of {len(groups)}: valid are 0 to {len(groups) - 1}")
            slot = by_bundle.get((groups[pg_idx].id, bundle_idx))
            if slot is None:
                raise IndexError(f"placement group {pg_idx} has no bundle {bundle_idx}")
            chosen.append(slot)
        return self._lease(chosen)

    def _lease(self, slots: Sequence[Slot]) -> list[tuple[str, int]]:
        leases = [lease for (lease,) in lease_ports(slots, low=self._ports[0], high=self._ports[1])]
        self._held.leases.extend(leases)
        return [(lease.address, lease.port) for lease in leases]

    def get_resource_usage(self) -> tuple[NodeUsage, ...]:
        """The memory of each physical node of the cluster that is alive, in physical order. Reserves.

        With `monitor_memory` the peaks are those since it was reserved, or since the node's agent had to be made anew;
        else of this one sample. One request a node.
        """
        slots = self.slots()
        monitor = self._held.monitor
        return read_usage(_node_ids(slots)) if monitor is None else monitor.read()

    def grid(self, worker_groups: Sequence[Any] = (), *, title: str | None = None) -> RenderableType:
        """The cluster as a table for rich: a row per logical node, a cell per slot. Reserves nothing.

        Args:
            worker_groups: groups to draw in it: anything with `name_prefix`, `world_size`, `worker_metadata`.
            title: instead of the headline that counts nodes and GPUs.
        """
        return draw(self._counts, self._slots, self.use_gpus, worker_groups, title)

    def print_cluster_grid(self, worker_group: Any | None = None) -> None:
        """Print the grid, with the workers of one group. Reserves nothing."""
        Console().print(self.grid([] if worker_group is None else [worker_group]))

    def print_all_worker_groups(self, worker_groups: Sequence[Any] | None = None) -> None:
        """Print the grid with several groups; without an argument, those that live on this cluster."""
        groups = groups_on(self._slots) if worker_groups is None else list(worker_groups)
        bundles = counted(self.world_size(), "GPU" if self.use_gpus else "CPU")
        nodes = counted(self.node_count(), "node")
        title = f"Ray Cluster Global View: {nodes}, {bundles}, Worker Groups: {len(groups)}"
        Console().print(self.grid(groups, title=title))

    def _repr_html_(self) -> str:
        return as_html(self.grid(groups_on(self._slots)))

    def shutdown(self) -> bool:
        """Give everything back: leased ports and placement groups, with whatever runs in them.

        Waits, at most 30 s, until Ray has the resources. Can be repeated; safe when Ray is down.

        Raises:
            PlacementError: Ray did not have the resources back in time.
        """
        self._reserved = None
        self._slots = ()
        if not self._held.give_back():
            raise PlacementError(
                f"Ray did not return the resources of {self!r} within 30 s. The groups are removed, but a process "
                "in them may still be ending: look at its node."
            )
        return True

    def __enter__(self) -> "RayVirtualCluster":
        return self.reserve(unified=self._unified)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayVirtualCluster belongs to its driver; send its slots() instead")

    def _asks(self) -> list[Ask]:
        base: dict[str, float] = {"CPU": float(self._capacity)}
        if self.use_gpus:
            base["GPU"] = 1.0
        return [
            Ask(node_idx, count, {**base, **extra}, self._strategy)  # type: ignore[arg-type]
            for node_idx, (count, extra) in enumerate(zip(self._counts, self._extras, strict=True))
            if count > 0
        ]


def _slots_of(
    reserved: Sequence[Reserved],
    ids: Sequence[Sequence[tuple[str, ...]]],
    nodes: Sequence[Node],
    capacity: int,
) -> tuple[Slot, ...]:
    """The bundles of all groups as slots in physical order."""
    position = {node.node_id: at for at, node in enumerate(nodes)}
    gone = {node_id for one in reserved for node_id in one.node_ids} - set(position)
    if gone:
        raise PlacementError(f"Node(s) {sorted(gone)} were lost while the cluster was being reserved. Try again.")
    # Ids are numbers for GPUs, but may be anything.
    rows = sorted(
        (
            position[node_id],
            [(0, int(one_id), "") if one_id.isdigit() else (1, 0, one_id) for one_id in ids[g][index]],
            one.node_idx[index],
            g,
            index,
        )
        for g, one in enumerate(reserved)
        for index, node_id in enumerate(one.node_ids)
    )
    node_rank = {at: rank for rank, at in enumerate(dict.fromkeys(row[0] for row in rows))}
    on_node = dict.fromkeys(node_rank, 0)
    slots = []
    for at, _, node_idx, g, index in rows:
        slots.append(
            Slot(
                placement_group=reserved[g].group,
                bundle_index=index,
                node_idx=node_idx,
                node_id=nodes[at].node_id,
                node_ip=nodes[at].ip,
                node_rank=node_rank[at],
                local_rank=on_node[at],
                accelerator_ids=tuple(ids[g][index]),
                labels=dict(nodes[at].labels),
                worker_resources=_share(reserved[g].bundles[index], capacity),
                capacity=capacity,
            )
        )
        on_node[at] += 1
    return tuple(slots)


def _node_ids(slots: Sequence[Slot]) -> list[str]:
    return list(dict.fromkeys(slot.node_id for slot in slots))


def _share(bundle: Mapping[str, float], capacity: int) -> dict[str, float]:
    """What one worker asks of a bundle that `capacity` workers share: a CPU, and its part of the GPU."""
    share = {"CPU": 1.0}
    if bundle.get("GPU", 0) > 0:
        # Rounded down to Ray's precision: rounded up, the last worker would not fit and would stay pending.
        share["GPU"] = math.floor(bundle["GPU"] * PRECISION / capacity) / PRECISION
    return share


def _counts(counts: Any) -> tuple[int, ...]:
    if not isinstance(counts, (list, tuple)) or not counts:
        raise ValueError(f"bundle_ct_per_node_list must be a list with an entry per logical node, got {counts!r}")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"bundle counts must be integers, 0 or more, got {count!r} in {counts!r}")
    return tuple(counts)


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _constraints(extras: Sequence[Mapping[str, float]] | None, nodes: int) -> tuple[dict[str, float], ...]:
    if extras is None:
        return ({},) * nodes
    if len(extras) != nodes:
        raise ValueError(f"node_resource_constraints has {len(extras)} entries for {nodes} logical nodes")
    for extra in extras:
        for name, amount in extra.items():
            if name in ("CPU", "GPU") or not amount > 0:
                raise ValueError(
                    f"node_resource_constraints may hold positive amounts of resources other than CPU and GPU, "
                    f"got {name!r}: {amount!r}"
                )
    return tuple(dict(extra) for extra in extras)

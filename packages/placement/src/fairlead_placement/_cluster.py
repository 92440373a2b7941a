# SPDX-License-Identifier: Apache-2.0
"""The virtual cluster: a part of a Ray cluster, reserved as if it were a cluster of its own."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

from ray.util.placement_group import PlacementGroup
from rich.console import Console, RenderableType

from ._model import (
    ClusterConfig,
    Strategy,
    check_positive,
    check_seconds,
    make_request,
)
from ._nodes.head import head_deadline
from ._nodes.ports import PORT_HIGH, PORT_LOW, check_range
from ._nodes.usage import NodeUsage
from ._reserve.claims import groups_on
from ._reserve.finalizers import release_when_dropped
from ._reserve.held import GIVE_BACK_S, Holding
from ._reserve.wait import examine
from ._show import ReservationReport, count_bundles, draw
from ._slot import Slot
from .exceptions import PlacementError

Backend = Literal["nccl", "gloo"]


class RayVirtualCluster:
    """Reserves bundles on logical nodes and provides them as slots in physical order.

    Args:
        bundle_ct_per_node_list: the number of bundles of each logical node; 0 skips the node.
        use_gpus: each bundle holds one GPU, if `accelerators` does not say more.
        max_colocated_worker_groups: how many worker groups may share the slots. Each bundle has `cpus_per_worker` for
            each of them.
        num_gpus_per_node: GPUs of a physical node, for the `configure_worker` of workers; 0 only without GPUs.
        name: appears in messages and in Ray's placement-group table.
        placement_group_strategy: how Ray lays out the bundles of *one logical node*: "STRICT_PACK" (on one physical
            node), "PACK", "SPREAD", "STRICT_SPREAD".
        enable_colocation: at least two worker groups may share the slots.
        gpu_ids: the GPUs that the bundles hold: a list of ids (with one logical node in use), a list per logical node,
            or "auto" (None) for any GPUs. Not together with `segment_size`.
        accelerators: the accelerators that each bundle holds, by Ray's names: `{"GPU": 0.5}`, `{"neuron_cores": 2}`,
            `{"TPU": 4}`, `{"HPU": 1}`, `{"NPU": 1}`, or `{}` for none.
        cpus_per_worker: the CPUs of a worker of each group.
        monitor_memory: sample the memory of the nodes once a second while the cluster is reserved.
        communication_backend: "nccl" or "gloo", for workers to use; None for "nccl" with GPUs and "gloo" without.
        port_range_low: first port that may be leased.
        port_range_high: last port that may be leased, included.
        segment_size: place logical nodes in groups of this many, each group on physical nodes of its own in one
            topology domain.
        node_resource_constraints: what else each bundle holds, per logical node.
        label_selector: the labels, with their values, of the nodes that may be used.
        reserve_timeout_s: seconds to wait for resources that others hold, Ray's head, and nodes of an autoscaler.
        wait_for_nodes_s: seconds to wait for nodes that are still joining.

    Raises:
        TypeError, ValueError: a bad argument. Nothing has been requested from Ray.

    Nothing is reserved until `reserve()`, `slots()`, `with cluster:` or another method that says so, all of which raise
    the errors of `reserve`. With STRICT_PACK, the cluster chooses nodes from what is free and pins every bundle to its
    node. Otherwise Ray chooses them. All methods that ask Ray raise `HeadTimeoutError` if its head does not answer.

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
        placement_group_strategy: Strategy = "STRICT_PACK",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        segment_size: int | None = None,
        node_resource_constraints: Sequence[Mapping[str, float]] | None = None,
        *,
        enable_colocation: bool = False,
        gpu_ids: Sequence[int | str] | Sequence[Sequence[int | str]] | Literal["auto"] | None = None,
        accelerators: Mapping[str, float] | None = None,
        cpus_per_worker: int = 1,
        monitor_memory: bool = False,
        communication_backend: Backend | None = None,
        label_selector: Mapping[str, str] | None = None,
        reserve_timeout_s: float = 180.0,
        wait_for_nodes_s: float = 0.0,
    ) -> None:
        if communication_backend not in ("nccl", "gloo", None):
            raise ValueError(f"communication_backend must be 'nccl', 'gloo' or None, got {communication_backend!r}")
        if use_gpus or num_gpus_per_node != 0:
            check_positive("num_gpus_per_node", num_gpus_per_node)
        check_positive("max_colocated_worker_groups", max_colocated_worker_groups)
        check_positive("cpus_per_worker", cpus_per_worker)
        self.placement_group_strategy: Strategy = placement_group_strategy
        self.port_range_low: int = PORT_LOW if port_range_low is None else port_range_low
        self.port_range_high: int = PORT_HIGH if port_range_high is None else port_range_high
        if (self.port_range_low, self.port_range_high) != (PORT_LOW, PORT_HIGH):
            check_range(self.port_range_low, self.port_range_high)
        self.segment_size = segment_size
        self.node_resource_constraints = node_resource_constraints
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        request = make_request(
            bundle_ct_per_node_list,
            name=name,
            capacity=max(max_colocated_worker_groups, 2 if enable_colocation else 1),
            cpus_per_worker=cpus_per_worker,
            strategy=placement_group_strategy,
            use_gpus=use_gpus,
            accelerators=accelerators,
            labels=label_selector,
            constraints=node_resource_constraints,
            gpu_ids=None if gpu_ids == "auto" else gpu_ids,
            segment_size=segment_size,
            timeout_s=check_seconds("reserve_timeout_s", reserve_timeout_s),
            wait_for_nodes_s=check_seconds("wait_for_nodes_s", wait_for_nodes_s),
        )
        self._holding = Holding(request, uuid.uuid4().hex if monitor_memory else None)
        self.use_gpus: bool = "GPU" in request.accelerators
        self.communication_backend: Backend = communication_backend or ("nccl" if self.use_gpus else "gloo")
        release_when_dropped(self, self._holding.leak, self._holding.give_back)

    @classmethod
    def from_config(cls, config: ClusterConfig, **options: Any) -> "RayVirtualCluster":
        """Return a cluster of equal logical nodes.

        Args:
            config: its size and its ports.
            options: those of the class. They take precedence over the config.

        Raises:
            ValueError: a key is missing or unknown, or a number is not a positive integer.

        >>> RayVirtualCluster.from_config({"gpus_per_node": 8, "num_nodes": 2})
        RayVirtualCluster([8, 8], GPU, name='', not reserved)
        """
        if unknown := sorted(set(config) - set(ClusterConfig.__annotations__)):
            raise ValueError(f"config has unknown keys {unknown}; it takes {sorted(ClusterConfig.__annotations__)}")
        for key in ("gpus_per_node", "num_nodes"):
            check_positive(f"config[{key!r}]", config.get(key))
        given: Any = {name.removeprefix("master_"): config.get(name) for name in ClusterConfig.__optional_keys__}
        return cls([config["gpus_per_node"]] * config["num_nodes"], **{**given, **options})

    @property
    def _counts(self) -> tuple[int, ...]:
        """The number of bundles of each logical node."""
        return tuple(ask.count for ask in self._holding.request.asks)

    def __repr__(self) -> str:
        held = self._holding.held
        state = "not reserved" if held is None else "its Ray has been shut down" if held.ray_ended else "reserved"
        kind = ", ".join(self._holding.request.accelerators) or "CPU"
        return f"RayVirtualCluster({list(self._counts)}, {kind}, name={self.name!r}, {state})"

    @property
    def max_colocated_worker_groups(self) -> int:
        """How many worker groups may share a slot."""
        return self._holding.request.capacity

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last port that is leased on its nodes, both included."""
        return self.port_range_low, self.port_range_high

    def world_size(self) -> int:
        """Return the number of all bundles. Reserves nothing."""
        return sum(self._counts)

    def node_count(self) -> int:
        """Return the number of logical nodes in use. Reserves nothing."""
        return sum(count > 0 for count in self._counts)

    def explain(self, *, unified: bool = False) -> ReservationReport:
        """Report whether a new reservation would fit now, on which nodes, and who holds what is missing.

        Reserves nothing. For `gpu_ids` the answer is about any GPUs: only a process that holds a GPU can read its id.

        Args:
            unified: as for `reserve`.

        Raises:
            PlacementError: Ray is not running.
        """
        with head_deadline():
            return examine(replace(self._holding.request, unified=unified))

    def reserve(self, *, unified: bool = False) -> "RayVirtualCluster":
        """Reserve now, unless that has been done.

        Args:
            unified: one placement group over all logical nodes, each on a physical node of its own, instead of one
                group per logical node; not with `gpu_ids`. With another strategy than STRICT_PACK, Ray chooses the
                nodes.

        Returns:
            The cluster.

        Raises:
            ValueError: `unified` together with `gpu_ids`.
            ResourceInsufficientError: the nodes cannot hold it even when idle, or others held GPUs that `gpu_ids`
                names until the deadline.
            PlacementTimeoutError: others held what it needs until the deadline.
            HeadTimeoutError: Ray's head did not answer within `reserve_timeout_s`.
            PlacementError: it is reserved with another `unified`, or on a Ray that has been shut down; or Ray is not
                running.
        """
        if (held := self._holding.held) is not None:
            if held.ray_ended:
                raise PlacementError(f"{self!r}, on which it was reserved. Call shutdown(), and reserve it again.")
            if unified != self._holding.request.unified:
                raise PlacementError(
                    f"{self!r} is reserved with unified={not unified}; shutdown() it before it is reserved with "
                    f"unified={unified}"
                )
            return self
        if unified and self._holding.request.gpu_ids:
            raise ValueError(f"{self!r} has gpu_ids, so each logical node has a placement group: leave out unified")
        self._holding.reserve(unified=unified)
        return self

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the placement groups, one per logical node in use (one in all when unified). Reserves."""
        slots, held = self.slots(), self._holding.held
        return held.groups_of(slots) if held else []

    def slots(self) -> tuple[Slot, ...]:
        """Return the bundles in physical order: by topology domain, node, accelerator id. Reserves.

        A slot that has replaced a lost one is in its place.
        """
        self.reserve(unified=self._holding.request.unified)
        held = self._holding.held
        return held.slots if held else ()

    def replace_lost_nodes(self, timeout_s: float = 180.0) -> tuple[Slot, ...]:
        """Reserve the slots of lost nodes again, on other nodes. The other slots do not change, and stay usable.

        Needs STRICT_PACK, no `segment_size`, and a reservation that is not unified.

        Args:
            timeout_s: seconds to wait for room, also on nodes that are still to join.

        Returns:
            The new slots, which are in `slots()` in the places of the lost ones; nothing if no node is lost, or if Ray
            has not noticed that yet.

        Raises:
            ResourceInsufficientError, PlacementTimeoutError: there was no room. The slots have not changed.
            PlacementError: the cluster has another strategy, or `segment_size`, or is unified.
        """
        check_seconds("timeout_s", timeout_s)
        if self.placement_group_strategy != "STRICT_PACK" or self.segment_size or self._holding.request.unified:
            raise PlacementError(
                f"The nodes of {self!r} cannot be replaced, because it has another strategy than STRICT_PACK, or a "
                "segment_size, or is unified. Call shutdown(), and reserve it again."
            )
        self.slots()
        return self._holding.replace_lost(timeout_s=timeout_s)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Return the address of the first slot's node and a new port that is leased there until `shutdown()`.

        Raises:
            PlacementError, PortUnavailableError: the cluster has no slot, or no port of `port_range` is free there.
        """
        if not self.slots():
            raise PlacementError(f"{self!r} has no slot, so no node that could have a master address")
        return self._lease(self.slots()[:1])[0]

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """Return the address of a bundle's node and a port that is leased there until `shutdown()`.

        The bundle is that with Ray's index `bundle_idx` in the group `get_placement_groups()[pg_idx]`.

        Raises:
            IndexError: there is no such group or bundle.
            PortUnavailableError: no port of `port_range` is free there.
        """
        return self.get_available_addresses_and_ports_batch([(pg_idx, bundle_idx)])[0]

    def get_available_addresses_and_ports_batch(
        self, pg_bundle_pairs: Sequence[tuple[int, int]], batch_size: int = 256
    ) -> list[tuple[str, int]]:
        """Do the same for many bundles, all or none; return the address and the port of each, in order.

        There is one request for each node. `batch_size` is accepted for programs written for NeMo RL, and ignored.
        """
        groups = {group.id: number for number, group in enumerate(self.get_placement_groups())}
        bundles = {(groups[slot.placement_group.id], slot.bundle_index): slot for slot in self.slots()}
        pairs = [(pg_idx, bundle_idx) for pg_idx, bundle_idx in pg_bundle_pairs]
        for pg_idx, bundle_idx in pairs:
            if (pg_idx, bundle_idx) not in bundles:
                raise IndexError(f"{self!r} has no bundle {bundle_idx} in placement group {pg_idx} of {len(groups)}")
        return self._lease([bundles[pair] for pair in pairs])

    def _lease(self, slots: Sequence[Slot]) -> list[tuple[str, int]]:
        return [(lease.address, lease.port) for lease in self._holding.lease(slots, *self.port_range)]

    def get_resource_usage(self) -> tuple[NodeUsage, ...]:
        """Return the memory of each physical node of the cluster that is alive, in physical order. Reserves.

        With `monitor_memory` the peaks are those since this process began to sample the node; without it they are those
        of this one sample.
        """
        return self._holding.read_usage(list(dict.fromkeys(slot.node_id for slot in self.slots())))

    def groups(self) -> tuple[Any, ...]:
        """Return the worker groups that run on this cluster's slots, in the order of these. Reserves nothing.

        These are the groups of this process that were passed to `claim_slots` and have not been shut down.
        """
        return tuple(groups_on(self._shown_slots()))

    def _shown_slots(self) -> tuple[Slot, ...]:
        """Return the slots that are held now; looking at them reserves nothing."""
        held = self._holding.held
        return () if held is None or held.ray_ended else self.slots()

    def grid(self, worker_groups: Sequence[Any] = (), *, title: str | None = None) -> RenderableType:
        """Return the cluster as a table for rich: a row per logical node, a cell per slot. Reserves nothing.

        Args:
            worker_groups: groups to draw in it. They have `name_prefix`, `world_size` and `worker_metadata`.
            title: replaces the headline that counts nodes and GPUs.
        """
        return draw(self._counts, self._shown_slots(), self._holding.request.accelerators, worker_groups, title)

    def print_cluster_grid(self, worker_group: Any | None = None) -> None:
        """Print the grid, with the workers of one group. Reserves nothing."""
        Console().print(self.grid([] if worker_group is None else [worker_group]))

    def print_all_worker_groups(self, worker_groups: Any | None = None) -> None:
        """Print the grid with several groups, or with one. The default are all groups on this cluster."""
        groups = self.groups() if worker_groups is None else worker_groups
        groups = list(groups) if isinstance(groups, Iterable) else [groups]
        counted = count_bundles(self._counts, self._holding.request.accelerators)
        Console().print(self.grid(groups, title=f"Ray Cluster Global View: {counted}, Worker Groups: {len(groups)}"))

    def shutdown(self) -> bool:
        """Release leased ports and placement groups, with everything that runs in them.

        Waits at most 30 s until Ray has the resources. Can be repeated, and is safe after Ray has ended. A method that
        changes the cluster at the time, on another thread or below a signal handler, fails and releases what it took.

        Raises:
            PlacementError: Ray did not have the resources back in time.
            PlacementTimeoutError: a method of another thread has not ended in time. It releases what it has taken.
            HeadTimeoutError: Ray's head did not answer. It removes the groups in the background once it answers.
        """
        if not self._holding.give_back():
            raise PlacementError(
                f"Ray did not return the resources of {self!r} within {GIVE_BACK_S:g} s. The groups are removed, but a "
                "process in them may still be ending: look at its node."
            )
        return True

    def __enter__(self) -> "RayVirtualCluster":
        return self.reserve(unified=self._holding.request.unified)

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayVirtualCluster belongs to its driver; send its slots() instead")

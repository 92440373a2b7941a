# SPDX-License-Identifier: Apache-2.0
"""Sections off part of a Ray cluster, says why when it cannot, and hands out slots, ports and node agents.

>>> import ray
>>> from fairlead_placement import RayVirtualCluster, init_ray
>>> _ = init_ray(address="local", num_cpus=4)
>>> with RayVirtualCluster([2, 2], use_gpus=False) as cluster:
...     [(slot.node_idx, slot.local_rank) for slot in cluster.slots()]
[(0, 0), (0, 1), (1, 2), (1, 3)]
>>> ray.shutdown()
"""

from ._agent import NodeAgent, run_on_nodes, usage_on_nodes
from ._cluster import ClusterConfig, RayVirtualCluster
from ._connection import connection
from ._dropped import release_when_dropped
from ._groups import place_pinned
from ._groups import remove as remove_placement_groups
from ._init import init_ray
from ._inventory import alive_nodes, read_holders, read_nodes
from ._occupancy import SlotClaim, claim_slots
from ._planner import Node
from ._ports import PortLease, lease_ports, release_ports
from ._ray_private import autoscaler_is_there, draining_nodes, never_connect
from ._report import Holder, Report
from ._slot import Slot
from ._topology import select_segment_nodes, sort_bundle_indices_by_topology
from ._usage import GpuMemory, NodeUsage, ProcessUsage
from ._waiting import Waiting
from .exceptions import PlacementError, PlacementTimeoutError, PortUnavailableError, ResourceInsufficientError

__version__ = "0.1.0"

__all__ = [
    "ClusterConfig",
    "GpuMemory",
    "Holder",
    "Node",
    "NodeAgent",
    "NodeUsage",
    "PlacementError",
    "PlacementTimeoutError",
    "PortLease",
    "PortUnavailableError",
    "ProcessUsage",
    "RayVirtualCluster",
    "Report",
    "ResourceInsufficientError",
    "Slot",
    "SlotClaim",
    "Waiting",
    "alive_nodes",
    "autoscaler_is_there",
    "claim_slots",
    "connection",
    "draining_nodes",
    "init_ray",
    "lease_ports",
    "never_connect",
    "place_pinned",
    "read_holders",
    "read_nodes",
    "release_ports",
    "release_when_dropped",
    "remove_placement_groups",
    "run_on_nodes",
    "select_segment_nodes",
    "sort_bundle_indices_by_topology",
    "usage_on_nodes",
]

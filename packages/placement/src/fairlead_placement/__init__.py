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
from ._init import init_ray
from ._occupancy import SlotClaim, claim_slots
from ._ports import PortLease, lease_ports
from ._report import Report
from ._slot import Slot
from ._topology import select_segment_nodes, sort_bundle_indices_by_topology
from ._usage import GpuMemory, NodeUsage, ProcessUsage
from .exceptions import PlacementError, PlacementTimeoutError, PortUnavailableError, ResourceInsufficientError

__version__ = "0.1.0"

__all__ = [
    "ClusterConfig",
    "GpuMemory",
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
    "claim_slots",
    "init_ray",
    "lease_ports",
    "run_on_nodes",
    "select_segment_nodes",
    "sort_bundle_indices_by_topology",
    "usage_on_nodes",
]

# SPDX-License-Identifier: Apache-2.0
"""Reserves part of a Ray cluster, explains why if it cannot, and provides slots and leased ports.

>>> import ray
>>> from fairlead_placement import RayVirtualCluster, init_ray
>>> _ = init_ray(address="local", num_cpus=4)
>>> with RayVirtualCluster([2, 2], use_gpus=False) as cluster:
...     [(slot.node_idx, slot.local_rank) for slot in cluster.slots()]
[(0, 0), (0, 1), (1, 2), (1, 3)]
>>> ray.shutdown()
"""

from ._cluster import RayVirtualCluster
from ._init import init_ray
from ._model import ClusterConfig, Node
from ._nodes.ports import PortLease, lease_ports, release_ports
from ._nodes.usage import NodeUsage
from ._plan.topology import select_segment_nodes, sort_bundle_indices_by_topology
from ._reserve.slots import read_slots
from ._show import ReservationReport, ResourceHolder
from ._slot import Slot
from .exceptions import (
    HeadTimeoutError,
    PlacementError,
    PlacementTimeoutError,
    PortUnavailableError,
    ResourceInsufficientError,
)

__version__ = "0.1.0"

__all__ = [
    "ClusterConfig",
    "HeadTimeoutError",
    "Node",
    "NodeUsage",
    "PlacementError",
    "PlacementTimeoutError",
    "PortLease",
    "PortUnavailableError",
    "RayVirtualCluster",
    "ReservationReport",
    "ResourceHolder",
    "ResourceInsufficientError",
    "Slot",
    "init_ray",
    "lease_ports",
    "read_slots",
    "release_ports",
    "select_segment_nodes",
    "sort_bundle_indices_by_topology",
]

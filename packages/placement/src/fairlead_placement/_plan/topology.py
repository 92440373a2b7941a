# SPDX-License-Identifier: Apache-2.0
"""Orders nodes physically, and selects segments: groups of nodes in one topology domain.

A *domain* is a set of nodes with a fast interconnect between them; a node without one has the domain None, "" or
"unknown". The functions are pure.
"""

from collections.abc import Mapping, Sequence

from .._model import Node, check_positive, group_pairs
from ..exceptions import ResourceInsufficientError

# What a node without a domain may be labelled with.
UNKNOWN = "unknown"


def node_place(node: Node) -> tuple[str, int]:
    """Return the topology domain of a node ("" if it has none) and its rank there, from its labels or resources."""
    domain = node.labels.get("ray.io/gpu-domain")
    if domain is None:
        prefix = "nvlink_domain_"
        domain = min((name.removeprefix(prefix) for name in node.total if name.startswith(prefix)), default="")
    domain = "" if domain == UNKNOWN else domain
    rank = node.labels.get("fairlead.io/topo-rank", node.total.get("topo_rank", 0))
    try:
        return domain, int(float(rank))
    except (ValueError, OverflowError):  # one odd label must not make every reservation fail
        return domain, 0


def select_segment_nodes(
    topology: Mapping[str, tuple[str | None, float | None]], segment_size: int, num_nodes: int
) -> tuple[list[str], list[str]]:
    """Select nodes in complete segments.

    Args:
        topology: node id -> (domain, rank in the domain). The domains None, "" and "unknown" mean that the node has
            none. A rank of None counts as 0.
        segment_size: nodes in a segment, all of one domain.
        num_nodes: how many nodes to select, a multiple of `segment_size`.

    Returns:
        The selected nodes and the others, both in physical order: by domain (the one with the lowest rank first, then
        by name), rank, node id. From each domain the first nodes are selected: as many complete segments as it has and
        are still missing. A segment never mixes domains, and a node without a domain is never selected.

    Raises:
        TypeError, ValueError: a bad size, a rank that is not a number, or a `num_nodes` that is not a multiple.
        ResourceInsufficientError: the domains do not have that many complete segments.

    >>> topology = {"c": ("x", 1), "b": ("x", 0), "a": ("y", 0), "d": ("y", 1), "e": ("x", 2)}
    >>> select_segment_nodes(topology, segment_size=2, num_nodes=4)
    (['b', 'c', 'a', 'd'], ['e'])
    """
    check_positive("segment_size", segment_size)
    check_positive("num_nodes", num_nodes)
    if num_nodes % segment_size:
        raise ValueError(f"num_nodes must be divisible by segment_size, got {num_nodes} nodes and {segment_size}")
    ordered = sort_nodes({node_id: _place(node_id, *place) for node_id, place in topology.items()})
    domains = group_pairs(entry for entry in ordered if entry[0])
    selected: list[str] = []
    for nodes in domains.values():
        selected += nodes[: min(len(nodes) // segment_size * segment_size, num_nodes - len(selected))]
    if len(selected) < num_nodes:
        domain_sizes = ", ".join(f"{domain!r} has {len(nodes)}" for domain, nodes in domains.items()) or "there is none"
        outside = len(topology) - sum(map(len, domains.values()))
        raise ResourceInsufficientError(
            f"Cannot form {num_nodes // segment_size} segments of {segment_size} nodes, each from one topology domain, "
            f"but only {len(selected) // segment_size}. Nodes per domain: {domain_sizes}; {outside} have no domain. "
            "Request fewer or smaller segments, or label more nodes (ray.io/gpu-domain)."
        )
    taken = set(selected)
    return selected, [node_id for _, node_id in ordered if node_id not in taken]


def sort_bundle_indices_by_topology(
    bundle_data: Sequence[tuple[int | str, str | None, float | None, str]],
    segment_size: int | None = None,
    gpus_per_node: int | None = None,
) -> list[int]:
    """Return the physical order of bundles: by domain, rank, node id, then accelerator id.

    Args:
        bundle_data: one row per bundle: (accelerator id, domain, rank in the domain, node id). Ids of digits are
            compared as numbers and come before others. Domains and ranks are as for `select_segment_nodes`.
        segment_size: keep only bundles of nodes in complete segments. These are the first complete nodes of each
            domain, rounded down to a multiple of `segment_size`.
        gpus_per_node: a node with fewer bundles is not complete. Required with `segment_size`, otherwise unused.

    Returns:
        Indices into `bundle_data`. Bundles with equal ids on one node keep their order. With `segment_size` the list
        may be shorter than `bundle_data`, or empty.

    Raises:
        TypeError, ValueError: a bad size, a row of another length, a rank that is not a number, a node in two places.

    >>> sort_bundle_indices_by_topology([(1, "x", 1, "b"), (0, "x", 0, "a"), (0, "x", 1, "b")])
    [1, 2, 0]
    """
    if segment_size is not None:
        check_positive("segment_size", segment_size)
        if gpus_per_node is None:
            raise ValueError("gpus_per_node is required when segment_size is set: it tells which nodes are complete")
    if gpus_per_node is not None:
        check_positive("gpus_per_node", gpus_per_node)
    places: dict[str, tuple[str, float]] = {}
    bundles: dict[str, list[tuple[tuple[int, int, str], int]]] = {}
    for index, row in enumerate(bundle_data):
        if len(row) != 4:
            raise ValueError(f"row {index} must be (gpu_id, domain, rank, node_id), got {row!r}")
        gpu_id, domain, rank, node_id = row
        place = _place(node_id, domain, rank)
        if places.setdefault(node_id, place) != place:
            raise ValueError(f"node {node_id} is in two places: (domain, rank) {places[node_id]} and {place}")
        bundles.setdefault(node_id, []).append((accelerator_order(gpu_id), index))
    ordered = sort_nodes(places)
    nodes = [node_id for _, node_id in ordered]
    if segment_size is not None and gpus_per_node is not None:
        complete = group_pairs(entry for entry in ordered if entry[0] and len(bundles[entry[1]]) >= gpus_per_node)
        nodes = [
            node_id
            for members in complete.values()
            for node_id in members[: len(members) // segment_size * segment_size]
        ]
    return [index for node_id in nodes for _, index in sorted(bundles[node_id])]


def _place(node_id: str, domain: str | None, rank: float | None) -> tuple[str, float]:
    if not isinstance(domain, str | None) or not isinstance(rank, int | float | None) or rank != rank:  # NaN
        raise ValueError(
            f"node {node_id} must have a domain (str | None) and a rank (a number), got {domain!r}, {rank!r}"
        )
    return "" if domain in (None, UNKNOWN) else domain, rank or 0


def sort_nodes(places: Mapping[str, tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the (domain, node id) of nodes in physical order, from the (domain, rank) of each node id.

    Domains are ordered by the lowest rank of their nodes, then by name. Nodes without a domain come first. The node id
    breaks every tie, so the slots of two nodes never interleave.
    """
    lowest: dict[str, float] = {}
    for domain, rank in places.values():
        lowest[domain] = min(rank, lowest.get(domain, rank))
    ordered = sorted(
        (domain != "", lowest[domain], domain, rank, node_id) for node_id, (domain, rank) in places.items()
    )
    return [(domain, node_id) for _, _, domain, _, node_id in ordered]


def accelerator_order(gpu_id: int | str) -> tuple[int, int, str]:
    """Return the sort key of an accelerator id: numbers by value, as those of GPUs, then any others by name."""
    if isinstance(gpu_id, bool) or not isinstance(gpu_id, int | str):
        raise TypeError(f"an accelerator id must be an integer or a string, got {gpu_id!r}")
    if isinstance(gpu_id, int) or gpu_id.isdecimal():
        return (0, int(gpu_id), "")
    return (1, 0, gpu_id)

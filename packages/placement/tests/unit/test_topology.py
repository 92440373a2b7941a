# SPDX-License-Identifier: Apache-2.0
"""Physical order, and the selection of complete segments."""

import random
import re

import pytest

from fairlead_placement import Node, ResourceInsufficientError, select_segment_nodes, sort_bundle_indices_by_topology
from fairlead_placement._plan.topology import node_place, sort_nodes


def node(name, *, labels=None, **total):
    return Node(name, f"10.0.0.{name}", total, total, labels or {})


def physical_order(nodes):
    by_id = {one.node_id: one for one in nodes}
    return [by_id[node_id] for _, node_id in sort_nodes({one.node_id: node_place(one) for one in nodes})]


def test_physical_order():
    """Nodes without a domain come first, then domain, rank (a number) and node id decide, not Ray's order."""
    ordered = [
        node("1"),
        node("2", topo_rank=1),
        node("9", labels={"ray.io/gpu-domain": "a", "fairlead.io/topo-rank": "2"}),
        node("8", labels={"ray.io/gpu-domain": "a", "fairlead.io/topo-rank": "10"}),
        node("4", nvlink_domain_b=1, topo_rank=2),
        node("5", nvlink_domain_b=1, topo_rank=2),
        node("3", nvlink_domain_b=1, topo_rank=3),
        # A label counts more than a resource.
        node("0", labels={"ray.io/gpu-domain": "c"}, nvlink_domain_a=1, topo_rank=4),
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))

    assert physical_order(shuffled) == ordered


def test_domains_are_ordered_by_their_lowest_rank():
    """Domains follow each other by their lowest rank; domains with equal ranks are ordered by name."""
    places = {"n3": ("f0", 2), "n2": ("f0", 3), "n1": ("07", 5), "n0": ("07", 4), "n4": ("", 9), "m": ("e", 2)}
    ordered = ["n4", "m", "n3", "n2", "n0", "n1"]

    nodes = [
        node(name, labels={"ray.io/gpu-domain": domain, "fairlead.io/topo-rank": str(rank)})
        for name, (domain, rank) in places.items()
    ]
    assert [one.node_id for one in physical_order(nodes)] == ordered
    rows = [(0, domain, rank, name) for name, (domain, rank) in places.items()]
    assert [rows[index][3] for index in sort_bundle_indices_by_topology(rows)] == ordered
    assert select_segment_nodes(places, 2, 2) == (["n3", "n2"], ["n4", "m", "n0", "n1"])


@pytest.mark.parametrize("rank", ["first", "", "inf", "nan"])
def test_bad_rank(rank):
    """A rank that is not a number is ignored: others can still reserve."""
    odd = node(f"7-{rank}", labels={"fairlead.io/topo-rank": rank})
    assert node_place(odd) == ("", 0)
    assert physical_order([odd, node("0", topo_rank=-1)])[1] == odd


def domains_of(**sizes):
    """Return nodes "a0", "a1" ... of the domain "a", ranked by their number; those of "none" have no domain."""
    return {
        f"{domain}{at}": ("" if domain == "none" else domain, at)
        for domain, size in sizes.items()
        for at in range(size)
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"a": 3, "b": 1},
            "each from one topology domain, but only 1. Nodes per domain: 'a' has 3, 'b' has 1; 0",
        ),
        ({"none": 4}, "but only 0. Nodes per domain: there is none; 4 have no domain."),
        ({}, "but only 0. Nodes per domain: there is none; 0 have no domain."),
    ],
)
def test_not_enough_segments(sizes, message):
    """The error says what was requested, what each domain has, and what to do."""
    with pytest.raises(
        ResourceInsufficientError, match=f"^Cannot form 2 segments of 2 nodes.*{re.escape(message)}"
    ) as caught:
        select_segment_nodes(domains_of(**sizes), 2, 4)
    assert str(caught.value).endswith("Request fewer or smaller segments, or label more nodes (ray.io/gpu-domain).")


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_bad_sizes(size):
    """A size that is not a positive integer is refused; the error shows its name and value."""
    message = f"must be an integer of at least 1, got {re.escape(repr(size))}"
    with pytest.raises(ValueError, match="segment_size " + message):
        select_segment_nodes(domains_of(a=4), size, 2)
    with pytest.raises(ValueError, match="num_nodes " + message):
        select_segment_nodes(domains_of(a=4), 2, size)
    if size is not None:
        with pytest.raises(ValueError, match="segment_size " + message):
            sort_bundle_indices_by_topology([(0, "a", 0, "n")], size, 1)
        with pytest.raises(ValueError, match="gpus_per_node " + message):
            sort_bundle_indices_by_topology([(0, "a", 0, "n")], gpus_per_node=size)


def test_no_multiple():
    """A number of nodes that is not a multiple of the segment size is refused first."""
    with pytest.raises(ValueError, match="num_nodes must be divisible by segment_size, got 10 nodes and 8"):
        select_segment_nodes({}, 8, 10)


def test_segments_of_bundles_need_gpus_per_node():
    """`gpus_per_node` is required, because it defines which nodes are complete."""
    with pytest.raises(ValueError, match="gpus_per_node is required when segment_size is set"):
        sort_bundle_indices_by_topology([], segment_size=2)


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ((0, "a", 0), ValueError, "row 1 must be (gpu_id, domain, rank, node_id), got (0, 'a', 0)"),
        (
            (0, "a", "first", "n"),
            ValueError,
            "a domain (str | None) and a rank (a number), got 'a', 'first'",
        ),
        (
            (0, "a", float("nan"), "n"),
            ValueError,
            "a domain (str | None) and a rank (a number), got 'a', nan",
        ),
        ((0, 7, 0, "n"), ValueError, "a domain (str | None) and a rank (a number), got 7, 0"),
        ((None, "a", 0, "n"), TypeError, "an accelerator id must be an integer or a string, got None"),
        ((1, "a", 0, "m"), ValueError, "node m is in two places: (domain, rank) ('b', 3) and ('a', 0)"),
    ],
)
def test_bad_rows(row, error, message):
    """A row without a valid place, or that contradicts another row, is refused."""
    with pytest.raises(error, match=re.escape(message)):
        sort_bundle_indices_by_topology([(0, "b", 3, "m"), row])


def test_bundles_sort_by_domain_rank_node_and_accelerator():
    """Accelerator ids count as numbers; nodes without a domain come first; the node id breaks ties."""
    ordered = [
        (0, None, 9, "z"),
        (0, "b", 0, "m"),
        (0, "a", 1, "n2"),
        (2, "a", 1, "n2"),
        ("10", "a", 1, "n2"),
        ("GPU-4f", "a", 1, "n2"),
        (0, "a", 2, "n0"),
        (0, "a", 2, "n1"),
    ]
    shuffled = random.Random(1).sample(ordered, len(ordered))

    assert [shuffled[index] for index in sort_bundle_indices_by_topology(shuffled)] == ordered
    assert sort_bundle_indices_by_topology([]) == []


def test_incomplete_nodes_and_segments_are_left_out():
    """The first complete nodes of each domain stay, in complete segments. All other nodes are left out."""
    gpus = {"a0": 2, "a1": 1, "a2": 3, "a3": 2, "b0": 2, "b1": 1, "none0": 2, "none1": 2}
    places = domains_of(a=4, b=2, none=2)
    rows = [(gpu, *places[name], name) for name, count in gpus.items() for gpu in range(count)]

    kept = [rows[index] for index in sort_bundle_indices_by_topology(rows, segment_size=2, gpus_per_node=2)]

    assert [(name, gpu) for gpu, _, _, name in kept] == [("a0", 0), ("a0", 1), ("a2", 0), ("a2", 1), ("a2", 2)]

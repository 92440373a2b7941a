# SPDX-License-Identifier: Apache-2.0
"""The plan of which bundle goes where: complete, never over-committed, in physical order."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairlead_placement._planner import STRATEGIES, Ask, Node, physical_order, plan


def node(name, free=None, *, labels=None, **total):
    return Node(name, f"10.0.0.{name}", total, total if free is None else free, labels or {})


def nodes_of(*cpus):
    return [node(f"n{at}", CPU=cpu) for at, cpu in enumerate(cpus)]


def asks_of(*counts, strategy="STRICT_PACK", **bundle):
    return [Ask(at, count, bundle or {"CPU": 1}, strategy) for at, count in enumerate(counts)]


bundles = st.sampled_from([{"CPU": 1}, {"CPU": 1}, {"CPU": 2}, {"CPU": 1, "x": 0.1}, {"CPU": 1, "x": 1}, {"x": 0.5}])


@st.composite
def clusters(draw, max_nodes=5, cpus=12):
    amounts = st.fixed_dictionaries({"CPU": st.integers(0, cpus), "x": st.sampled_from([0.3, 1, 2, 4])})
    made = []
    for at in range(draw(st.integers(2, max_nodes))):
        total = draw(amounts)
        # Ray leaves out what is used up.
        free = {
            name: left for name, most in total.items() if (left := most * draw(st.sampled_from([0, 0.5, 1, 1]))) > 0
        }
        made.append(node(f"n{at}", free, **total))
    return made


@st.composite
def requests(draw, max_asks=3, strategies=STRATEGIES):
    strategy = draw(st.sampled_from(strategies))
    numbers = draw(st.lists(st.integers(0, 8), min_size=1, max_size=max_asks, unique=True).map(sorted))
    return [Ask(number, draw(st.integers(1, 3)), draw(bundles), strategy) for number in numbers]


@given(requests(), clusters(), st.booleans(), st.booleans())
def test_a_plan_fits(asks, nodes, idle, own_nodes):
    """Every bundle has a node, and no node gets more than it has: of what is free, or when idle of what there is."""
    chosen = plan(asks, nodes, idle=idle, own_nodes=own_nodes)
    assume(chosen is not None)

    assert {number: len(ids) for number, ids in chosen.items()} == {ask.node_idx: ask.count for ask in asks}
    used = {one.node_id: Counter() for one in nodes}
    for ask in asks:
        for node_id in chosen[ask.node_idx]:
            used[node_id].update(ask.bundle)
    for one in nodes:
        room = one.total if idle else one.free
        for name, amount in used[one.node_id].items():
            assert amount <= room.get(name, 0) + 1e-9, (one, name)


@given(requests(), clusters(), st.booleans())
def test_the_strategy_is_kept(asks, nodes, own_nodes):
    """STRICT_PACK uses one node for a logical node, STRICT_SPREAD one per bundle, and all of them physical order."""
    chosen = plan(asks, nodes, own_nodes=own_nodes)
    assume(chosen is not None)

    for ask in asks:
        ids = chosen[ask.node_idx]
        assert list(ids) == sorted(ids)
        if ask.strategy == "STRICT_PACK":
            assert len(set(ids)) == 1
        if ask.strategy == "STRICT_SPREAD":
            assert len(set(ids)) == len(ids)
    if own_nodes:
        for one, other in itertools.combinations(chosen.values(), 2):
            assert not set(one) & set(other)


@given(requests(), clusters(), st.booleans())
def test_deterministic(asks, nodes, own_nodes):
    """The same question has the same answer, in whatever order resources are listed."""
    shuffled = [
        Node(one.node_id, one.ip, dict(reversed(one.total.items())), dict(reversed(one.free.items())), one.labels)
        for one in nodes
    ]

    assert plan(asks, shuffled, own_nodes=own_nodes) == plan(asks, nodes, own_nodes=own_nodes)


@given(requests(), clusters(), st.booleans())
def test_equal_asks_follow_physical_order(asks, nodes, own_nodes):
    """Of two logical nodes that ask for the same, the lower number has the earlier nodes."""
    chosen = plan(asks, nodes, own_nodes=own_nodes)
    assume(chosen is not None)

    for one, other in itertools.combinations(asks, 2):
        if one.shape == other.shape:
            assert chosen[one.node_idx] <= chosen[other.node_idx]


@settings(max_examples=500)
@given(requests(strategies=["STRICT_PACK"]), clusters(cpus=4))
def test_refused_only_if_impossible(asks, nodes):
    """With nodes of their own, None means that no assignment exists (all are tried)."""

    def fits(ask, one):
        return all(one.free.get(name, 0) + 1e-9 >= ask.count * amount for name, amount in ask.bundle.items())

    possible = any(all(map(fits, asks, tried)) for tried in itertools.permutations(nodes, len(asks)))

    assert (plan(asks, nodes, own_nodes=True) is not None) == possible


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_strict_spread_refused_only_if_impossible(counts, cpus):
    """For equal bundles on shared nodes, STRICT_SPREAD is refused only if no assignment exists."""

    def search(left, room):
        if not left:
            return True
        return any(
            all(room[at] > 0 for at in tried) and search(left[1:], [cpu - (at in tried) for at, cpu in enumerate(room)])
            for tried in itertools.combinations(range(len(room)), left[0])
        )

    found = plan(asks_of(*counts, strategy="STRICT_SPREAD"), nodes_of(*cpus))

    assert (found is not None) == search(counts, cpus)


@pytest.mark.parametrize(
    ("counts", "cpus", "expected"),
    [
        ([4, 8, 2], [8, 4, 2], [1, 0, 2]),
        ([4, 8, 2], [2, 4, 8], [1, 2, 0]),
        ([4, 8, 2], [16], [0, 0, 0]),
        ([2, 2], [4, 4], [0, 1]),
        ([2, 2], [1, 2, 1, 2], [1, 3]),
        ([2, 8], [8, 8], [0, 1]),
        ([2, 8], [8, 4], [1, 0]),
        ([8, 8], [8, 7], None),
        ([1], [], None),
    ],
)
def test_uneven_nodes(counts, cpus, expected):
    """Large logical nodes find large physical ones; nodes are shared only when there is no other way."""
    chosen = plan(asks_of(*counts), nodes_of(*cpus))

    wanted = expected and {at: (f"n{on}",) * counts[at] for at, on in enumerate(expected)}
    assert chosen == wanted


@pytest.mark.parametrize(
    ("strategy", "count", "cpus", "expected"),
    [
        ("PACK", 4, [3, 4, 5], {"n1": 4}),
        ("PACK", 6, [1, 3, 4], {"n1": 2, "n2": 4}),
        ("PACK", 9, [1, 3, 4], None),
        ("SPREAD", 4, [3, 4, 5], {"n0": 2, "n1": 1, "n2": 1}),
        ("SPREAD", 4, [1, 0, 5], {"n0": 1, "n2": 3}),
        ("SPREAD", 7, [1, 0, 5], None),
        ("STRICT_SPREAD", 2, [3, 0, 5], {"n0": 1, "n2": 1}),
        ("STRICT_SPREAD", 3, [3, 0, 5], None),
        ("STRICT_PACK", 4, [3, 0, 5], {"n2": 4}),
        ("STRICT_PACK", 6, [3, 0, 5], None),
    ],
)
def test_strategies(strategy, count, cpus, expected):
    """PACK takes as few nodes as it can, SPREAD as many, the STRICT ones exactly one, and one each."""
    chosen = plan(asks_of(count, strategy=strategy), nodes_of(*cpus))

    assert (chosen and Counter(chosen[0])) == expected


def test_own_nodes():
    """Two logical nodes share a physical one, unless each must have its own."""
    assert plan(asks_of(2, 2), nodes_of(4, 1)) == {0: ("n0", "n0"), 1: ("n0", "n0")}
    assert plan(asks_of(2, 2), nodes_of(4, 1), own_nodes=True) is None


def test_the_scarce_node_is_left_to_who_needs_it():
    """A large ask moves off the only node that has what a small one needs."""
    asks = [Ask(0, 2, {"CPU": 1}), Ask(1, 1, {"CPU": 1, "x": 1})]
    nodes = [node("n0", CPU=2, x=1), node("n1", CPU=4)]

    assert plan(asks, nodes, own_nodes=True) == {0: ("n1", "n1"), 1: ("n0",)}


def test_idle():
    """When idle, what is taken now counts as there: that tells "taken" from "can never fit"."""
    nodes = [node("n0", {"CPU": 1}, CPU=4), node("n1", {}, CPU=2)]

    assert plan(asks_of(2), nodes) is None
    assert plan(asks_of(2), nodes, idle=True) == {0: ("n0", "n0")}
    assert plan(asks_of(5), nodes, idle=True) is None


def test_amounts_are_exact():
    """Three bundles of 0.1 fit into 0.3, as they do for Ray."""
    assert plan(asks_of(3, x=0.1), [node("n0", x=0.3)]) is not None
    assert plan(asks_of(3, x=0.1), [node("n0", x=0.2999)]) is None


def test_physical_order():
    """Nodes without a domain come first, then by domain, rank (a number), and node id, whatever Ray's order."""
    ordered = [
        node("1"),
        node("2", topo_rank=1),
        node("9", labels={"ray.io/gpu-domain": "a", "fairlead.io/topo-rank": "2"}),
        node("8", labels={"ray.io/gpu-domain": "a", "fairlead.io/topo-rank": "10"}),
        node("4", nvlink_domain_b=1),
        node("5", nvlink_domain_b=1),
        node("3", nvlink_domain_b=1, topo_rank=3),
        # A label counts more than a resource.
        node("0", labels={"ray.io/gpu-domain": "c"}, nvlink_domain_a=1),
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))

    assert sorted(shuffled, key=physical_order) == ordered


@pytest.mark.parametrize("rank", ["first", "", "inf", "nan"])
def test_bad_rank(rank):
    """A rank that is no number is refused, with the node it is on."""
    with pytest.raises(ValueError, match=f"label fairlead.io/topo-rank of node 7 must be a number, got '{rank}'"):
        physical_order(node("7", labels={"fairlead.io/topo-rank": rank}))

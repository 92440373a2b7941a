# SPDX-License-Identifier: Apache-2.0
"""The plan of which node each bundle goes to: complete, within the amounts of each node, in physical order."""

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_placement import Node
from fairlead_placement._model import Ask
from fairlead_placement._plan.planner import decide


def node(name, free=None, *, labels=None, **total):
    return Node(name, f"10.0.0.{name}", total, total if free is None else free, labels or {})


def nodes_of(*cpus):
    return [node(f"n{at}", CPU=cpu) for at, cpu in enumerate(cpus)]


def asks_of(*counts, strategy="STRICT_PACK", **bundle):
    return [Ask(at, count, bundle or {"CPU": 1}, strategy) for at, count in enumerate(counts)]


def empty(nodes):
    """Return the nodes as they are when nothing runs on them."""
    return [dataclasses.replace(one, free=one.total) for one in nodes]


def plan(*args, **options):
    return decide(*args, **options)[0]


BUNDLES = [{"CPU": 1}, {"CPU": 1}, {"CPU": 2}, {"CPU": 1, "x": 0.1}, {"CPU": 1, "x": 1}, {"x": 0.5}]
# One draw for a whole example. Drawing each number takes hypothesis longer than everything that is tested with it.
randoms = st.randoms(use_true_random=True)


@st.composite
def clusters(draw, max_nodes=5, cpus=12):
    random = draw(randoms)
    made = []
    for at in range(random.randint(2, max_nodes)):
        total = {"CPU": random.randint(0, cpus), "x": random.choice([0.3, 1, 2, 4])}
        # Ray leaves out what is used up.
        free = {name: left for name, most in total.items() if (left := most * random.choice([0, 0.5, 1, 1])) > 0}
        made.append(node(f"n{at}", free, **total))
    return made


def brute(asks, nodes, own_nodes):
    """Return whether any assignment of bundles to nodes keeps every rule, by trying all of them."""

    def search(left, room, owner):
        if not left:
            return True
        ask, rest = left[0], left[1:]
        usable = [n for n, one in enumerate(nodes) if ask.labels.items() <= one.labels.items()]
        size = 1 if ask.strategy == "STRICT_PACK" else ask.count
        for tried in itertools.combinations_with_replacement(usable, size):
            picked = Counter(tried * (ask.count // size))
            if ask.strategy == "STRICT_SPREAD" and max(picked.values()) > 1:
                continue
            if own_nodes and any(n in owner for n in picked):
                continue
            after = [dict(one) for one in room]
            for n, count in picked.items():
                for name, amount in ask.bundle.items():
                    after[n][name] = after[n].get(name, 0) - count * amount
            if all(amount > -1e-9 for one in after for amount in one.values()) and search(
                rest, after, owner | set(picked)
            ):
                return True
        return False

    return search(asks, [dict(one.free) for one in nodes], frozenset())


SELECTORS = [{}, {}, {}, {"zone": "a"}, {"zone": "c"}]


@st.composite
def mixed_requests(draw):
    random = draw(randoms)
    strategy = random.choice(["STRICT_PACK", "STRICT_PACK", "STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
    selector = random.choice(SELECTORS)
    return [
        Ask(number, random.randint(1, 3), random.choice(BUNDLES), strategy, selector)
        for number in range(random.randint(1, 4))
    ]


@st.composite
def labelled_clusters(draw):
    random = draw(randoms)
    return [
        dataclasses.replace(one, labels=random.choice([{}, {"zone": "a"}, {"zone": "b"}]))
        for one in draw(clusters(max_nodes=4, cpus=4))
    ]


@settings(max_examples=400)
@given(mixed_requests(), labelled_clusters(), st.booleans())
def test_what_a_verdict_says(asks, nodes, own_nodes):
    """All assignments are tried, for every strategy, mixed bundles and labels.

    "taken" has an assignment on idle nodes, a plan keeps every rule, and "impossible" is proven where Ray places.
    """
    own_nodes = own_nodes and asks[0].strategy == "STRICT_PACK"  # Ray chooses the nodes of the others
    chosen, verdict = decide(asks, nodes, own_nodes=own_nodes)
    assert (chosen is not None) == (verdict == "fits")
    if verdict == "impossible" and asks[0].strategy != "STRICT_PACK":
        assert not brute(asks, empty(nodes), own_nodes)
    if verdict == "taken" and asks[0].strategy == "STRICT_PACK":
        assert brute(asks, empty(nodes), own_nodes)
    if asks[0].strategy != "STRICT_PACK":
        assert chosen in (None, {})
    elif chosen is not None:
        labels = {one.node_id: one.labels for one in nodes}
        for ask in asks:
            assert len(chosen[ask.node_idx]) == ask.count
            assert all(ask.labels.items() <= labels[node_id].items() for node_id in chosen[ask.node_idx])
        for one in nodes:
            for name, room in {"CPU": 0, "x": 0, **one.free}.items():
                taken = sum(ask.bundle.get(name, 0) * chosen[ask.node_idx].count(one.node_id) for ask in asks)
                assert taken <= room + 1e-9


def test_no_arrangement():
    """A request without an arrangement is impossible, not taken; as is one whose arrangement the planner misses."""
    assert decide(asks_of(5, 6, 5), nodes_of(8, 8)) == (None, "impossible")
    # Largest first puts 5 and 4 together and fails on 4, 3 and 3, although 5 + 3 + 2 and 4 + 4 + 2 fit.
    assert decide(asks_of(5, 4, 4, 3, 2, 2), nodes_of(10, 10)) == (None, "impossible")


def test_what_others_hold_matters_only_if_it_is_needed():
    """A resource that is in use counts only on nodes that the request may use, and only if it asks for it."""
    full = node("n0", {"CPU": 8, "x": 0}, CPU=8, x=1)
    assert decide(asks_of(9), [full])[1] == "impossible"
    assert decide(asks_of(5, 4, 4, 3, 2, 2), [full, *nodes_of(10, 10)])[1] == "fits"
    asks = [dataclasses.replace(ask, labels={"zone": "a"}) for ask in asks_of(5, 4, 3)]
    nodes = [dataclasses.replace(one, labels={"zone": "a"}) for one in nodes_of(6, 6)]
    assert decide(asks, [node("n9", {}, CPU=8), *nodes])[1] == "impossible"


def in_domains(**domains):
    """Return nodes "a0", "a1" ... with the given CPUs in the domain "a"; those of "none", the first, have no domain."""
    return [
        node(f"{domain}{at}", CPU=cpu, labels={} if domain == "none" else {"ray.io/gpu-domain": domain})
        for domain, cpus in sorted(domains.items(), key=lambda item: (item[0] != "none", item))
        for at, cpu in enumerate(cpus)
    ]


@pytest.mark.parametrize(
    ("counts", "size", "domains", "expected"),
    [
        ([4, 4], 2, {"a": [4, 4]}, ["a0", "a1"]),
        ([4, 4, 4, 4], 2, {"a": [4, 4, 4], "b": [4, 4]}, ["a0", "a1", "b0", "b1"]),
        ([4, 4], 2, {"a": [4], "b": [4, 4], "none": [4, 4]}, ["b0", "b1"]),
        ([4, 4], 2, {"a": [4, 3, 4]}, ["a0", "a2"]),
        ([4, 4], 2, {"a": [4], "b": [4]}, None),
        ([4, 4], 2, {"unknown": [4, 4]}, None),
        ([1, 1], 2, {"a": [8]}, None),
        ([4, 4], 1, {"a": [4], "b": [4]}, ["a0", "b0"]),
        # The first group would fit a, but the second one fits nowhere else.
        ([2, 2, 4, 4], 2, {"a": [4, 4], "b": [2, 2]}, ["b0", "b1", "a0", "a1"]),
        ([4, 2, 2, 4], 2, {"a": [2, 4, 4, 2]}, ["a1", "a0", "a3", "a2"]),
        ([], 2, {"a": [8]}, []),
    ],
)
def test_segments(counts, size, domains, expected):
    """Logical nodes are grouped by number; each group is on its own nodes of one domain, in physical order."""
    chosen = plan(asks_of(*counts), in_domains(**domains), segment_size=size)

    assert (chosen if chosen is None else [ids[0] for ids in chosen.values()]) == expected


@settings(max_examples=250)
@given(randoms)
def test_groups_in_segments(random):
    """Each logical node of a group is on a node of its own that has room, and the group is in one domain."""
    counts = random.choices((1, 2, 3), k=2 * random.randint(1, 3))
    cpus = [random.choices((1, 2, 3), k=random.randint(0, 4)) for _ in range(random.randint(1, 3))]
    nodes = in_domains(**dict(zip(["none", "a", "b"], cpus, strict=False)))
    chosen = plan(asks_of(*counts), nodes, segment_size=2) or {}
    by_id = {one.node_id: one for one in nodes}
    assert len({ids[0] for ids in chosen.values()}) == len(chosen)
    for number, ids in chosen.items():
        assert by_id[ids[0]].free["CPU"] >= len(ids) == counts[number]
        group = (chosen[number][0], chosen[number // 2 * 2][0])
        assert len({by_id[node_id].labels["ray.io/gpu-domain"] for node_id in group}) == 1


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
    """Large logical nodes get large physical nodes; nodes are shared only if there is no other way."""
    chosen = plan(asks_of(*counts), nodes_of(*cpus))

    wanted = expected and {at: (f"n{on}",) * counts[at] for at, on in enumerate(expected)}
    assert chosen == wanted


@pytest.mark.parametrize(
    ("strategy", "count", "cpus", "verdict"),
    [
        ("PACK", 4, [3, 4, 5], "fits"),
        ("PACK", 9, [1, 3, 4], "impossible"),
        ("SPREAD", 4, [1, 0, 5], "fits"),
        ("SPREAD", 7, [1, 0, 5], "impossible"),
        ("STRICT_SPREAD", 2, [3, 0, 5], "fits"),
        ("STRICT_SPREAD", 3, [3, 0, 5], "impossible"),
    ],
)
def test_strategies_of_ray(strategy, count, cpus, verdict):
    """With these, Ray chooses the nodes, so the plan is empty; what is impossible is known before Ray is asked."""
    assert decide(asks_of(count, strategy=strategy), nodes_of(*cpus)) == ({} if verdict == "fits" else None, verdict)


def test_amounts_are_exact():
    """Three bundles of 0.1 fit into 0.3, as for Ray."""
    assert plan(asks_of(3, x=0.1), [node("n0", x=0.3)]) is not None
    assert plan(asks_of(3, x=0.1), [node("n0", x=0.2999)]) is None

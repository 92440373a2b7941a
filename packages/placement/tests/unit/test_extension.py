# SPDX-License-Identifier: Apache-2.0
"""Logical nodes that are added and released: refusals before any request, and the order of the slots."""

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from fairlead_placement import PortLease, RayVirtualCluster, Slot
from fairlead_placement._model import Ask, Request
from fairlead_placement._reserve import held as _held
from fairlead_placement._reserve.held import Held, Holding, replace_slots
from fairlead_placement._reserve.slots import number_slots


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([[]], {}, "bundle_counts must be a list with an entry per logical node, got []"),
        ([2], {}, "bundle_counts must be a list with an entry per logical node, got 2"),
        ([[2, 0]], {}, "bundle counts must be integers, 1 or more, got 0 in [2, 0]"),
        ([[True]], {}, "bundle counts must be integers, 1 or more, got True in [True]"),
        ([[1]], {"timeout_s": -1}, "timeout_s must be a number of seconds, 0 or more and finite, got -1"),
        ([[1]], {"wait_for_nodes_s": "1"}, "wait_for_nodes_s must be a number of seconds, 0 or more and finite, got"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, options, message):
    """A bad argument is refused without a Ray, and the error shows it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        RayVirtualCluster([1]).extend(*arguments, **options)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_ids": [[0], [1]]}, "a cluster with gpu_ids cannot be extended: reserve another one"),
        ({"node_resource_constraints": [{"a": 1}, {"b": 1}]}, "node_resource_constraints differ between logical nodes"),
        ({"segment_size": 2}, "3 logical nodes in use are not a multiple of segment_size=2"),
    ],
)
def test_clusters_that_cannot_be_extended(options, message):
    """A cluster whose options do not say what a new logical node gets is refused without a Ray."""
    with pytest.raises(ValueError, match=re.escape(message)):
        RayVirtualCluster([1, 1], **options).extend([1, 1, 1])
    assert not ray.is_initialized()


def make_slots(random, group, counts, machines):
    """Return slots of logical nodes as a reservation has them: in the order of the nodes' numbers."""
    rows = [(random.choice(machines), node_idx, index) for node_idx, count in counts.items() for index in range(count)]
    return number_slots(
        Slot(
            placement_group=SimpleNamespace(id=f"{group}-{node_idx}"),
            bundle_index=index,
            node_idx=node_idx,
            node_id=machine,
            node_ip="",
            node_rank=0,
            local_rank=0,
        )
        for machine, node_idx, index in sorted(rows)
    )


def identify(slot):
    return slot.placement_group.id, slot.bundle_index


def check_numbers(slots):
    """Assert that nodes are numbered in the order of the slots, and so are the slots of each node."""
    machines = list(dict.fromkeys(slot.node_id for slot in slots))
    for rank, machine in enumerate(machines):
        there = [slot for slot in slots if slot.node_id == machine]
        assert {slot.node_rank for slot in there} == {rank}
        assert [slot.local_rank for slot in there] == list(range(len(there)))


@given(st.randoms(use_true_random=True))
def test_the_order_of_slots(random):
    """Through any extensions and releases, slots keep their order, additions come last, and views keep their slots.

    The seams are what asks Ray: the reservation of a request, and the release of groups and ports.
    """
    machines = [f"n{at}" for at in range(4)]
    removed = []

    def take(request, *_, **__):
        counts = {ask.node_idx: ask.count for ask in request.asks}
        return make_slots(random, "pg", counts, machines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_held, "reserve", take)
        patch.setattr(_held, "remove", lambda groups, **_: removed.extend(group.id for group in groups) or True)
        patch.setattr(_held, "connection", lambda: "here")
        patch.setattr(_held, "close_slots", lambda slots: [])
        counts = [random.randint(0, 3) for _ in range(random.randint(1, 3))]
        cluster = RayVirtualCluster(counts, use_gpus=False).reserve()
        model, views = list(map(identify, cluster.slots())), []
        for _ in range(6):
            used = sorted({slot.node_idx for slot in cluster.slots()})
            if random.random() < 0.6 or not used:
                more = [random.randint(1, 3) for _ in range(random.randint(1, 2))]
                new = cluster.extend(more)
                assert new == tuple(range(len(counts), len(counts) + len(more)))
                counts += more
                added = cluster.slots()[len(model) :]
                assert sorted(slot.node_idx for slot in added) == [at for at in new for _ in range(counts[at])]
                assert [slot.node_id for slot in added] == sorted(slot.node_id for slot in added)
                model += map(identify, added)
            else:
                gone = set(random.sample(used, random.randint(1, len(used))))
                kept = [identify(slot) for slot in cluster.slots() if slot.node_idx not in gone]
                cluster.release_nodes(gone)
                assert {f"pg-{at}" for at in gone} == set(removed[-len(gone) :])
                model = [one for one in model if one in kept]
                counts = [0 if at in gone else count for at, count in enumerate(counts)]
            assert list(map(identify, cluster.slots())) == model
            check_numbers(cluster.slots())
            assert cluster.world_size() == len(model) == sum(counts)
            assert cluster.node_count() == sum(count > 0 for count in counts)
            assert [f"pg-{at}" for at, count in enumerate(counts) if count] == [
                group.id for group in cluster.get_placement_groups()
            ]
            if model:
                size = random.randint(1, len(model))
                view = cluster.split([size, len(model) - size])[0] if size < len(model) else cluster.split([size])[0]
                views.append((view, model[:size]))
            for view, wanted in views:
                assert list(map(identify, view.slots())) == [one for one in wanted if one in model]
                assert view.world_size() == len(view.slots())
        assert cluster.shutdown()


@given(st.randoms(use_true_random=True))
def test_replacements_are_in_the_places_of_lost_slots(random):
    """Each lost slot is replaced by one of its logical node, and the other slots keep their places."""
    machines = [f"n{at}" for at in range(4)]
    counts = {at: random.randint(1, 3) for at in range(3)}
    places = dict(zip([3, 4, 7, *range(10, 20)], make_slots(random, "old", counts, machines), strict=False))
    lost = [place for place, slot in places.items() if slot.node_id == "n0"]
    missing = {at: sum(places[place].node_idx == at for place in lost) for at in counts}
    new = make_slots(random, "new", missing, ["n5", "n6"])

    after = replace_slots(places, lost, new)

    assert list(after) == list(places)
    assert [slot.node_idx for slot in after.values()] == [slot.node_idx for slot in places.values()]
    assert {identify(after[place]) for place in lost} == set(map(identify, new))
    for node_idx in counts:
        in_place = [identify(after[place]) for place in lost if after[place].node_idx == node_idx]
        assert in_place == [identify(slot) for slot in new if slot.node_idx == node_idx]
    for place, slot in places.items():
        if place not in lost:
            assert replace(after[place], node_rank=0, local_rank=0) == replace(slot, node_rank=0, local_rank=0)
    check_numbers(after.values())


@dataclass(frozen=True)
class Group:
    id: str


def test_the_order_of_groups_after_a_replacement(monkeypatch):
    """The placement group of a replacement comes after the older groups of its logical node, whichever slot was lost.

    The seams are what asks Ray: the reservation of a request, the nodes that are alive, and the removal of groups.
    """
    made = iter([("pg-0", "n0", "n1", "n2"), ("pg-1", "n3"), ("pg-2", "n4"), ("pg-3", "n5")])

    def reserve_next(*_, **__):
        group, *machines = next(made)
        return number_slots(
            Slot(
                placement_group=Group(group),
                bundle_index=index,
                node_idx=0,
                node_id=machine,
                node_ip="",
                node_rank=0,
                local_rank=0,
            )
            for index, machine in enumerate(machines)
        )

    alive = {f"n{number}" for number in range(6)}
    monkeypatch.setattr(_held, "reserve", reserve_next)
    monkeypatch.setattr(_held, "alive_nodes", lambda: frozenset(alive))
    monkeypatch.setattr(_held, "remove", lambda *_, **__: True)
    monkeypatch.setattr(_held, "connection", lambda: "here")
    monkeypatch.setattr(_held, "is_moved_by_ray", lambda group: False)
    with RayVirtualCluster([3], use_gpus=False, placement_group_strategy="SPREAD") as cluster:
        for lost, groups in (
            ("n0", ["pg-0", "pg-1"]),
            ("n1", ["pg-0", "pg-1", "pg-2"]),
            ("n3", ["pg-0", "pg-2", "pg-3"]),
        ):
            alive.remove(lost)
            cluster.replace_lost_nodes()
            assert [group.id for group in cluster.get_placement_groups()] == groups


class Name(str):
    """The id of a node, which counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_release_of_many_nodes(monkeypatch):
    """The cost of a release grows with the number of nodes and leases, not with its square."""
    count = 1_000
    slots = [
        Slot(
            placement_group=SimpleNamespace(id=ray.PlacementGroupID(at.to_bytes(18, "big"))),
            bundle_index=0,
            node_idx=at,
            node_id=Name(f"node {at}"),
            node_ip="",
            node_rank=at,
            local_rank=0,
        )
        for at in range(count)
    ]
    asks = tuple(Ask(at, 1, {}) for at in range(count))
    holding = Holding(Request(asks=asks, name="many", capacity=1, timeout_s=0.0, wait_for_nodes_s=0.0))
    leases = dict.fromkeys(PortLease("", 1, Name(slot.node_id), f"lease {slot.node_idx}") for slot in slots)
    places = dict(enumerate(slots))
    holding.held = Held(on="here", at=0.0, places=places, next_place=count, leases=leases)
    released = []
    monkeypatch.setattr(_held, "release_ports", lambda leases, timeout_s: released.extend(leases))
    monkeypatch.setattr(_held, "remove", lambda groups, timeout_s: True)
    Name.compared = 0
    assert holding.release(set(range(count // 2)))
    assert [lease.lease_id for lease in released] == [f"lease {at}" for at in range(count // 2)]
    assert [lease.lease_id for lease in holding.held.leases] == [f"lease {at}" for at in range(count // 2, count)]
    assert Name.compared <= 20 * count

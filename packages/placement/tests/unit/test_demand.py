# SPDX-License-Identifier: Apache-2.0
"""The placement groups that show an autoscaler a request (seam: the functions that create and look up groups)."""

from types import SimpleNamespace

import pytest

from fairlead_placement._model import Ask, Request
from fairlead_placement._reserve import demand as module
from fairlead_placement._reserve.demand import Demand
from fairlead_placement._reserve.groups import Impossible, Reserved

OUTCOME = Impossible("why", "advice")


@pytest.fixture
def ray_groups(monkeypatch):
    """Return the groups that exist, by id, with their options and state."""
    there = {}

    def create(options):
        group_id = f"{len(there):036x}"
        there[group_id] = SimpleNamespace(options=options, state="PENDING")
        return SimpleNamespace(id=SimpleNamespace(hex=lambda: group_id))

    def look_up(ids):
        rows = {}
        for one in ids:
            bundles = range(len(there[one].options["bundles"]))
            nodes = {at: f"node {at}" for at in bundles}
            rows[one] = {"state": there[one].state, "bundles": bundles, "bundles_to_node_id": nodes}
        return rows

    monkeypatch.setattr(module, "create_group", create)
    monkeypatch.setattr(module, "look_up", look_up)
    monkeypatch.setattr(module, "remove", lambda groups: [there.pop(group.id.hex()) for group in groups])
    return there


def make_request(*asks, **options):
    return Request(asks=asks, name="", capacity=1, timeout_s=1, wait_for_nodes_s=0, **options)


def ask(node_idx, count, **options):
    return Ask(node_idx, count, {"CPU": 1.0}, **options)


def shown(groups):
    names = "bundles", "strategy", "bundle_label_selector"
    return [tuple(one.options[name] for name in names) for one in groups.values()]


def test_groups_are_demand_until_ray_has_placed_them(ray_groups):
    """Each logical node is a group with its strategy, and what Ray places of them is the reservation."""
    with Demand(make_request(ask(0, 2), ask(2, 1, strategy="SPREAD", labels={"zone": "in(x, y)"}))) as demand:
        assert demand.take() is None
        demand.show(OUTCOME)
        demand.show(OUTCOME)
        assert shown(ray_groups) == [
            ([{"CPU": 1.0}] * 2, "STRICT_PACK", [{}, {}]),
            ([{"CPU": 1.0}], "SPREAD", [{"zone": "in(x,y)"}]),  # without the space, which Ray does not accept
        ]
        first, second = ray_groups
        assert (demand.is_among({first}), demand.is_among({"ab"})) == (True, False)
        ray_groups[first].state = "CREATED"
        assert demand.take() is OUTCOME
        ray_groups[second].state = "CREATED"
        placed = demand.take()
    assert [(one.node_idx, one.node_ids) for one in placed if isinstance(one, Reserved)] == [
        ((0, 0), ("node 0", "node 1")),
        ((2,), ("node 0",)),
    ]
    assert list(ray_groups) == [first, second]


@pytest.mark.parametrize("options", [{"unified": True}, {"segment_size": 2}])
def test_logical_nodes_on_nodes_of_their_own(ray_groups, options):
    """They are shown as whole bundles on different nodes, and planned again when Ray has placed these."""
    with Demand(make_request(ask(0, 2), ask(1, 3), **options)) as demand:
        demand.show(OUTCOME)
        assert shown(ray_groups) == [([{"CPU": 2.0}, {"CPU": 3.0}], "STRICT_SPREAD", [{}, {}])]
        assert demand.take() is None
        next(iter(ray_groups.values())).state = "CREATED"
        assert demand.take() is None
        assert ray_groups == {}


def test_demand_ends_with_the_wait(ray_groups):
    """Whatever Ray has not placed is removed."""
    with Demand(make_request(ask(0, 2))) as demand:
        demand.show(OUTCOME)
    assert ray_groups == {}

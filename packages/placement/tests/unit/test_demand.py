# SPDX-License-Identifier: Apache-2.0
"""The placement group that shows an autoscaler a request (seam: the function that creates a group)."""

import pytest

from fairlead_placement._model import Ask, Node, Request
from fairlead_placement._reserve import demand as module
from fairlead_placement._reserve.demand import Demand

NEW = {"ray.io/node-id": "!in(a,b)"}
FULL = Node("a", "", {"CPU": 2.0}, {}, {})
IDLE = Node("b", "", {"CPU": 2.0}, {"CPU": 2.0}, {})


@pytest.fixture
def show(monkeypatch):
    """Return a function that shows a request on two nodes, and returns the bundles, the strategy and the selectors."""
    made = []
    monkeypatch.setattr(module, "create_group", lambda options: made.append(options))

    def show_asks(*asks, nodes=(FULL, IDLE), **options):
        request = Request(asks=asks, name="", capacity=1, timeout_s=1, wait_for_nodes_s=0, **options)
        Demand(request).show(nodes)
        shown = made.pop()
        return shown["bundles"], shown["strategy"], shown["bundle_label_selector"]

    return show_asks


def ask(node_idx, count, **options):
    return Ask(node_idx, count, {"CPU": 1.0}, **options)


def test_one_logical_node(show):
    """All bundles of one logical node are on one new node."""
    assert show(ask(0, 3)) == ([{"CPU": 1.0}] * 3, "STRICT_PACK", [NEW] * 3)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_SPREAD"])
def test_a_logical_node_on_several_nodes(show, strategy):
    """One bundle has to be on a new node, since Ray would place the group otherwise; the others need not."""
    assert show(ask(0, 3, strategy=strategy)) == ([{"CPU": 1.0}] * 3, strategy, [NEW, {}, {}])


def test_several_logical_nodes(show):
    """Each is one bundle, and the first for which there is no room is on a new node."""
    assert show(ask(0, 2), ask(1, 2), ask(2, 1)) == ([{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}], "PACK", [{}, NEW, {}])
    assert show(ask(0, 2), ask(1, 2), unified=True) == ([{"CPU": 2.0}] * 2, "STRICT_SPREAD", [{}, NEW])
    assert show(ask(0, 2), ask(1, 2), segment_size=2) == ([{"CPU": 2.0}] * 2, "STRICT_SPREAD", [{}, NEW])


def test_labels(show):
    """The labels of the request stay, without the spaces that Ray does not accept."""
    labels = {"zone": "in(x, y)"}
    assert show(ask(0, 1, labels=labels)) == ([{"CPU": 1.0}], "STRICT_PACK", [{**NEW, "zone": "in(x,y)"}])


def test_no_node(show):
    """A cluster without nodes needs no new one."""
    assert show(ask(0, 1), nodes=()) == ([{"CPU": 1.0}], "STRICT_PACK", [{}])

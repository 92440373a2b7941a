# SPDX-License-Identifier: Apache-2.0
"""How a reservation waits, without Ray."""

import pytest
import ray

from fairlead_placement import Node, PlacementError, PlacementTimeoutError, RayVirtualCluster, ResourceHolder
from fairlead_placement._reserve import wait


def test_a_shutdown_while_nodes_are_lost(monkeypatch):
    """A reservation that begins again because it lost its nodes ends by a shutdown (seams: Ray's answers)."""

    def lose(*_, **options):
        raise ray.exceptions.WorkerCrashedError

    def check():
        raise PlacementError("it was shut down")

    monkeypatch.setattr(wait, "read_nodes", tuple)
    monkeypatch.setattr(wait, "decide", lambda *_: ({}, "fits"))
    monkeypatch.setattr(wait, "place", lambda *_, **options: ())
    monkeypatch.setattr(wait, "remove", lambda _: True)
    monkeypatch.setattr(wait, "slots_of", lose)
    cluster = RayVirtualCluster([1], use_gpus=False, reserve_timeout_s=1.0)
    with pytest.raises(PlacementError, match="it was shut down"):
        wait.reserve(cluster._holding.request, check)


def test_holders_on_other_nodes(monkeypatch):
    """An error names who holds resources on the nodes that may be used, and no others (seams: Ray's answers)."""
    nodes = [Node("here", "192.0.2.1", {"CPU": 1.0}, {}, {})]
    held = [("mine", "here"), ("other", "draining")]
    holders = [ResourceHolder("placement group", name, name, "01", {where: ({"CPU": 1.0},)}) for name, where in held]
    monkeypatch.setattr(wait, "read_nodes", lambda: nodes)
    monkeypatch.setattr(wait, "read_holders", lambda: holders)
    monkeypatch.setattr(wait, "remove_abandoned", lambda: False)
    monkeypatch.setattr(wait, "ask_head", lambda *_: False)
    cluster = RayVirtualCluster([1], use_gpus=False, reserve_timeout_s=0.0)
    with pytest.raises(
        PlacementTimeoutError, match=r"others hold what it needs \(placement group mine mine; see below"
    ):
        wait.reserve(cluster._holding.request)

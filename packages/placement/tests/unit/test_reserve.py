# SPDX-License-Identifier: Apache-2.0
"""How a reservation waits, without Ray."""

import contextlib

import pytest

from fairlead_placement import (
    Node,
    PlacementTimeoutError,
    RayVirtualCluster,
    ResourceHolder,
    ResourceInsufficientError,
)
from fairlead_placement._reserve import gpus, wait
from fairlead_placement._reserve.groups import Reserved


def test_holders_on_other_nodes(monkeypatch):
    """An error names who holds resources on the nodes that may be used, and no others (seams: Ray's answers).

    On nodes without GPUs, the advice is to reserve without them.
    """
    nodes = [Node("here", "192.0.2.1", {"CPU": 1.0}, {}, {})]
    held = [("mine", "here"), ("other", "draining")]
    holders = [ResourceHolder("placement group", name, name, "01", {where: ({"CPU": 1.0},)}) for name, where in held]
    monkeypatch.setattr(wait, "read_nodes", lambda: nodes)
    monkeypatch.setattr(wait, "read_holders", lambda: holders)
    with pytest.raises(PlacementTimeoutError, match=r"others hold what it needs \(placement group mine mine\)"):
        RayVirtualCluster([1], use_gpus=False, reserve_timeout_s=0.0).reserve()
    message = (
        r"cannot hold 1 bundle in 1 logical node, even when they are idle \(see below\)\. No node has a GPU\. "
        "To reserve CPUs only, pass use_gpus=False without gpu_ids"
    )
    with pytest.raises(ResourceInsufficientError, match=message):
        RayVirtualCluster([1]).reserve()


def test_other_gpus_than_those_named(monkeypatch):
    """Groups that Ray has placed on other GPUs are removed, and the GPUs count as taken (seams: Ray's answers)."""
    filler, group, removed = object(), object(), []
    monkeypatch.setattr(gpus, "hold_free_gpus", lambda *_: contextlib.nullcontext({"0": filler}))
    monkeypatch.setattr(gpus, "remove", removed.extend)
    monkeypatch.setattr(gpus, "place", lambda *_, **options: (Reserved(group, (0,), ("here",), ({"GPU": 1.0},)),))
    monkeypatch.setattr(gpus, "accelerator_ids", lambda *_, **options: [[{"GPU": ("9",)}]])
    request = RayVirtualCluster([1], gpu_ids=[0])._holding.request
    node = Node("here", "192.0.2.1", {"GPU": 1.0}, {"GPU": 1.0}, {})
    assert gpus.take_gpus(request, node, frozenset("0"), deadline=0.0) == ((), {"0"})
    assert removed == [filler, group]

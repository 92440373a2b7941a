# SPDX-License-Identifier: Apache-2.0
"""How a reservation waits, without Ray."""

import pytest

from fairlead_placement import (
    Node,
    PlacementTimeoutError,
    RayVirtualCluster,
    ResourceHolder,
    ResourceInsufficientError,
)
from fairlead_placement._reserve import wait


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

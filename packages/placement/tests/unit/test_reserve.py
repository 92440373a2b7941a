# SPDX-License-Identifier: Apache-2.0
"""How a reservation waits, without Ray."""

import pytest
import ray

from fairlead_placement import PlacementError, RayVirtualCluster
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

# SPDX-License-Identifier: Apache-2.0
"""What a cluster holds, without Ray."""

import threading

import pytest

from fairlead_placement import PlacementError, PlacementTimeoutError, RayVirtualCluster
from fairlead_placement._reserve import held


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda cluster: cluster.reserve(), "or wait longer (reserve_timeout_s)."),
        (lambda cluster: cluster._holding.replace_lost(timeout_s=0.0), "or wait longer (timeout_s)."),
    ],
)
def test_another_thread_changes_the_cluster(change, remedy):
    """The error names the argument that lets it wait longer (seam: the lock of the other thread)."""
    cluster = RayVirtualCluster([1], use_gpus=False, name="mine", reserve_timeout_s=0.0)
    is_held, over = threading.Event(), threading.Event()

    def hold():
        with cluster._holding._changing:
            is_held.set()
            over.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(PlacementTimeoutError) as caught:
            change(cluster)
    finally:
        over.set()
        other.join(60)
    assert str(caught.value).endswith(remedy)


def test_usage_that_fails_after_a_shutdown(monkeypatch):
    """Agents that were created after the shutdown of the cluster sample no memory (seams: the requests to agents)."""
    cluster, unwatched = RayVirtualCluster([1], use_gpus=False, monitor_memory=True), []
    cluster._holding.held = held.Held(on=None, slots=(), watcher="watcher")

    def read_usage(node_ids, watcher):
        cluster.shutdown()
        unwatched.clear()  # the agents are created later
        raise PlacementError("one node does not answer")

    monkeypatch.setattr(held, "read_usage", read_usage)
    monkeypatch.setattr(held, "unwatch", lambda *args: unwatched.append(args))
    with pytest.raises(PlacementError, match="one node"):
        cluster._holding.read_usage(["node"])
    assert unwatched == [(["node"], "watcher")]

# SPDX-License-Identifier: Apache-2.0
"""What a cluster holds, without Ray."""

import threading

import pytest

from fairlead_placement import PlacementTimeoutError, RayVirtualCluster


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

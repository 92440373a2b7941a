# SPDX-License-Identifier: Apache-2.0
"""Raylets that are slow to place what fits: a reservation waits for them, and does not blame others."""

import os
import signal
import threading

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement import PlacementTimeoutError, RayVirtualCluster
from fairlead_placement._reserve import groups


@pytest.fixture
def raylet(joining, eventually):
    """Add a node of 4 CPUs, and return the process id of its raylet."""
    node = joining.add_node(num_cpus=4)
    assert eventually(lambda: ray.available_resources().get("CPU") == 4)
    return node.all_processes["raylet"][0].process.pid


def test_a_raylet_that_stands_still(raylet, eventually):
    """A raylet that stops for 2.5 s delays a reservation by that. One group is created, and nothing leaks."""
    before = placement_group_table().keys()  # which lists every group since the cluster has started
    os.kill(raylet, signal.SIGSTOP)
    threading.Timer(2.5, os.kill, (raylet, signal.SIGCONT)).start()
    with RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=0) as cluster:
        assert len(cluster.slots()) == 2
    assert len(placement_group_table().keys() - before) == 1
    assert eventually(lambda: ray.available_resources().get("CPU") == 4, 20)


@pytest.mark.nightly
def test_a_raylet_that_never_places(raylet, monkeypatch, eventually):
    """If Ray does not place what fits, the error says that, and not that others hold it."""
    monkeypatch.setattr(groups, "PLACING_S", 2.0)
    os.kill(raylet, signal.SIGSTOP)
    try:
        message = r"Waited \d+\.\d s: the nodes have room for the request, but Ray has not placed it\."
        resume = threading.Timer(4.0, os.kill, (raylet, signal.SIGCONT))
        resume.start()
        with pytest.raises(PlacementTimeoutError, match=message):
            RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=0).reserve()
    finally:
        resume.cancel()
        os.kill(raylet, signal.SIGCONT)
    assert eventually(lambda: ray.available_resources().get("CPU") == 4, 30)

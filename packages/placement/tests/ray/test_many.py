# SPDX-License-Identifier: Apache-2.0
"""Many logical nodes. Ray places groups one after the other, which takes longer than one placement may."""

import pytest
import ray

from fairlead_placement import RayVirtualCluster

MANY = 800


@pytest.fixture(scope="module")
def roomy_ray():
    ray.init(address="local", num_cpus=MANY, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


def test_many_logical_nodes(roomy_ray):
    """Any number of groups that fit are placed in the first attempt."""
    with RayVirtualCluster([1] * MANY, use_gpus=False, reserve_timeout_s=0) as cluster:
        assert len(cluster.get_placement_groups()) == MANY

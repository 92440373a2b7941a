# SPDX-License-Identifier: Apache-2.0
"""Many logical nodes: what Ray places one after the other takes longer than one placement may take."""

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
    """As many groups as there is room for are placed at the first try, however many they are."""
    with RayVirtualCluster([1] * MANY, use_gpus=False, reserve_timeout_s=0) as cluster:
        assert len(cluster.get_placement_groups()) == MANY

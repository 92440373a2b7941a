# SPDX-License-Identifier: Apache-2.0
"""A cluster of fixed size whose nodes have the ids of a launcher, as on KubeRay without autoscaling."""

import pytest
from ray._private import services

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement.extension import autoscaler_is_there


def test_an_autoscaler_without_configuration(raylets, tmp_path, monkeypatch, eventually):
    """The autoscaler that Ray starts with the head reports what no node can hold, and the request is refused."""
    monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
    head = {"num_cpus": 2, "env_vars": {"RAY_CLOUD_INSTANCE_ID": "head", "RAY_NODE_TYPE_NAME": "head"}}
    with raylets(head, logging_level="error") as cluster:
        with pytest.raises(ResourceInsufficientError):
            RayVirtualCluster([6], use_gpus=False, reserve_timeout_s=600).reserve()
        process = services.start_monitor(
            cluster.address, str(tmp_path), str(tmp_path / "out"), str(tmp_path / "err"), autoscaler_v2=True
        ).process
        try:
            assert eventually(autoscaler_is_there)
            with pytest.raises(ResourceInsufficientError, match="reports that it cannot add nodes"):
                RayVirtualCluster([6], use_gpus=False, reserve_timeout_s=600).reserve()
        finally:
            process.kill()
            process.wait()

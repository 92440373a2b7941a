# SPDX-License-Identifier: Apache-2.0
"""A running Ray that lacks the private parts that `_ray_private` wraps (seam: the attribute is removed)."""

import pytest
import ray

from fairlead_placement import PlacementTimeoutError, RayVirtualCluster
from fairlead_placement.spi import read_nodes

pytestmark = pytest.mark.usefixtures("local_ray")


def test_free_resources(monkeypatch):
    """Without Ray's figures, free amounts are computed from placement groups, and a reservation works."""
    monkeypatch.delattr(ray._private.state, "available_resources_per_node")
    with RayVirtualCluster([3], use_gpus=False):
        (node,) = read_nodes()
        assert (node.free["CPU"], node.free["GPU"]) == (13, 4)
        with pytest.raises(PlacementTimeoutError):
            RayVirtualCluster([14], use_gpus=False, reserve_timeout_s=0).reserve()
    assert read_nodes()[0].free["CPU"] == 16


def test_the_environment_of_agents():
    """A process that cannot read its job's environment passes its own to the agents that it creates."""

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"MINE": "yes"}})
    def has_clean_environment(missing):
        from fairlead_placement._ray_private import clean_runtime_env

        worker = ray._private.worker.global_worker
        core = worker.core_worker

        class WithoutJob:
            def __getattr__(self, name):
                if name == "get_job_config":
                    raise AttributeError(name)
                return getattr(core, name)

        worker.core_worker = WithoutJob() if missing else core
        try:
            return clean_runtime_env() is not None
        finally:
            worker.core_worker = core

    assert ray.get([has_clean_environment.remote(missing) for missing in (False, True)]) == [True, False]

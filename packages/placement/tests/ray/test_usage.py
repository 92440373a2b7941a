# SPDX-License-Identifier: Apache-2.0
"""The memory of nodes, as it is measured there."""

import dataclasses
import os
import time

import pytest
import ray

from fairlead_placement import GpuMemory, RayVirtualCluster
from fairlead_placement._nodes import agent as _agent
from fairlead_placement._nodes import usage
from fairlead_placement._reserve import held as _held


def test_one_sample(local_ray, agent_pids):
    """Without `monitor_memory` each call takes one sample, and no agent is started."""
    before = agent_pids()
    with RayVirtualCluster([1, 2], use_gpus=False) as cluster:
        (node,) = cluster.get_resource_usage()
        assert agent_pids() == before
    assert node.node_id == ray.nodes()[0]["NodeID"]
    assert node.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert node.memory_used_bytes + node.memory_available_bytes == node.memory_total_bytes
    assert 0 < node.memory_used_bytes == node.memory_peak_bytes
    assert node.samples == 1
    assert abs(node.sampled_at - time.time()) < 60
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.samples = 0


def test_monitoring(local_ray, agent_pids, eventually):
    """With `monitor_memory` samples are taken once a second until shutdown, and the peak is kept."""
    with RayVirtualCluster([1, 2], use_gpus=False, monitor_memory=True, name="watched") as cluster:
        assert eventually(lambda: len(agent_pids()) == 1)  # which nothing waits for
        began, seen = time.monotonic(), list(cluster.get_resource_usage())

        def are_taken():
            seen.extend(cluster.get_resource_usage())
            return seen[-1].samples >= seen[0].samples + 2

        assert eventually(are_taken, 60)
        assert seen[-1].samples - seen[0].samples <= time.monotonic() - began + 1
        assert seen[-1].memory_peak_bytes >= max(usage.memory_used_bytes for usage in seen)
        assert seen[-1].sampled_at > seen[0].sampled_at


def test_a_shutdown_while_usage_is_read(local_ray, eventually, monkeypatch):
    """No agent samples for a cluster that was shut down in the meantime (seam: the reading)."""
    cluster = RayVirtualCluster([1], use_gpus=False, monitor_memory=True).reserve()
    read = _held.read_usage

    def shut_down_first(*args):
        cluster.shutdown()
        return read(*args)

    monkeypatch.setattr(_held, "read_usage", shut_down_first)
    (node,) = cluster.get_resource_usage()
    assert node.samples > 0
    assert eventually(lambda: not any(agent.holds for agent in _agent._agents.values()))


def test_no_agent(local_ray, monkeypatch):
    """If the nodes cannot be watched, nothing stays reserved (seam: the creation of an agent)."""

    def fail(node_id):
        raise ray.exceptions.ActorUnschedulableError("no")

    cluster = RayVirtualCluster([1], use_gpus=False, monitor_memory=True)
    with monkeypatch.context() as patch:
        patch.setattr(_agent, "_agents", {})
        patch.setattr(_agent, "_create_actor", fail)
        with pytest.raises(ray.exceptions.ActorUnschedulableError):
            cluster.reserve()
    assert repr(cluster).endswith("not reserved)")


def test_gpu_values(local_ray, monkeypatch):
    """GPU memory is returned as values (seam: the sample)."""
    monkeypatch.setattr(usage, "take_sample", lambda: (9, 4, 5, 6, [(3, 1, 2)], 7, 8.0))
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        (node,) = cluster.get_resource_usage()
    assert node.gpu_memory == (GpuMemory(total_bytes=3, used_bytes=1, peak_bytes=2),)
    assert (node.memory_peak_bytes, node.samples, node.sampled_at) == (6, 7, 8.0)

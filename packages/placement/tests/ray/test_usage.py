# SPDX-License-Identifier: Apache-2.0
"""The use of resources by processes and nodes, as they are measured on nodes."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray

from fairlead_placement import GpuMemory, PlacementError, ProcessUsage, RayVirtualCluster
from fairlead_placement._nodes import agent as _agent
from fairlead_placement._nodes import meters
from fairlead_placement._reserve import held as _held
from fairlead_placement.extension import usage_on_nodes


def measure(*pids):
    """Return the usage of processes of this node."""
    node_id = ray.nodes()[0]["NodeID"]
    return usage_on_nodes({node_id: pids})[node_id]


@pytest.fixture
def child():
    """Start a process that uses a CPU while it lives, and about 64 MiB."""
    source = "held = bytearray(b'x') * (64 << 20); print('ready', flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def cpu_seconds(pid):
    """Return the CPU seconds of a process, as the kernel counts them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_processes(local_ray, child, eventually):
    """CPU time, memory and threads of processes are reported in the order requested, as immutable values."""
    began, before = time.time(), cpu_seconds(child.pid)
    mine, busy = measure(os.getpid(), child.pid)
    first, used = time.time(), cpu_seconds(child.pid)

    assert [type(mine), mine.pid, busy.pid] == [ProcessUsage, os.getpid(), child.pid]
    assert busy.cpu_percent > 0  # since it started
    assert 64 << 20 < busy.rss_bytes < 256 << 20
    assert busy.num_threads == 1
    assert mine.num_threads >= threading.active_count()
    assert mine.rss_bytes > 0
    assert eventually(lambda: cpu_seconds(child.pid) >= used + 0.3, 60)
    second, enough = time.time(), cpu_seconds(child.pid)
    (again,) = measure(child.pid)
    ended, last = time.time(), cpu_seconds(child.pid)
    # Since the last request. However slow the machine is, it was measured within these moments.
    assert 100 * (enough - used) / (ended - began) <= again.cpu_percent <= 100 * (last - before) / (second - first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.cpu_percent = 0.0


def test_a_process_that_stands_still(local_ray, child, stop_process):
    """The CPU percentage covers the time since the last request, not the whole life."""
    with stop_process(child.pid):
        assert [measure(child.pid)[0].cpu_percent > 0 for _ in range(2)] == [True, False]


def test_a_process_that_has_gone(local_ray, child):
    """A process that never existed, has ended, or is a zombie is left out."""
    assert len(measure(child.pid)) == 1
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [one.pid for one in measure(child.pid, os.getpid(), 2**22 + 1)] == [os.getpid()]
    child.wait()
    assert measure(child.pid) == []
    assert measure() == []


def test_several_nodes_at_once(local_ray, child):
    """A failure is returned as a value."""
    node_id = ray.nodes()[0]["NodeID"]
    found = usage_on_nodes({node_id: [os.getpid(), child.pid], "a" * 56: [1]}, timeout_s=60)
    assert [type(one) for one in found[node_id]] == [ProcessUsage, ProcessUsage]
    assert isinstance(found["a" * 56], PlacementError)
    assert usage_on_nodes({}) == {}


def test_one_sample(local_ray, agent_pids):
    """Without `monitor_memory` each call takes one sample, and no agent is started."""
    with RayVirtualCluster([1, 2], use_gpus=False) as cluster:
        (usage,) = cluster.get_resource_usage()
        assert agent_pids() == []
    assert usage.node_id == ray.nodes()[0]["NodeID"]
    assert usage.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usage.memory_used_bytes + usage.memory_available_bytes == usage.memory_total_bytes
    assert 0 < usage.memory_used_bytes == usage.memory_peak_bytes
    assert usage.samples == 1
    assert abs(usage.sampled_at - time.time()) < 60
    with pytest.raises(dataclasses.FrozenInstanceError):
        usage.samples = 0


def wait_for_samples(cluster, count, eventually):
    """Wait until the agent has taken so many samples by itself. Return all samples, of which each was requested."""
    seen = list(cluster.get_resource_usage())

    def are_taken():
        seen.extend(cluster.get_resource_usage())
        return taken_by_itself(seen) >= count

    assert eventually(are_taken, 60)
    return seen


def taken_by_itself(seen):
    """Return how many samples the agent has taken between requested ones."""
    return seen[-1].samples - seen[0].samples - (len(seen) - 1)


def test_monitoring(local_ray, agent_pids, eventually):
    """With `monitor_memory` samples are taken once a second until shutdown, and the peak is kept."""
    with RayVirtualCluster([1, 2], use_gpus=False, monitor_memory=True, name="watched") as cluster:
        assert len(agent_pids()) == 1
        began = time.monotonic()
        first, *_, later = seen = wait_for_samples(cluster, 2, eventually)
        assert first.samples >= 2
        # The pauses between them last a second or longer.
        assert taken_by_itself(seen) <= time.monotonic() - began + 1
        assert later.memory_peak_bytes >= max(one.memory_used_bytes for one in seen)
        assert later.sampled_at > first.sampled_at
    assert eventually(lambda: agent_pids() == [])


def test_a_shutdown_while_usage_is_read(local_ray, agent_pids, eventually, monkeypatch):
    """An agent that is created for a cluster that was shut down in the meantime ends (seam: the reading)."""
    cluster = RayVirtualCluster([1], use_gpus=False, monitor_memory=True).reserve()
    read = _held.read_usage

    def shut_down_first(*args):
        cluster.shutdown()
        return read(*args)

    monkeypatch.setattr(_held, "read_usage", shut_down_first)
    with pytest.raises(PlacementError, match="was shut down in the meantime"):
        cluster.get_resource_usage()
    assert eventually(lambda: agent_pids() == [])


def test_no_agent(local_ray, monkeypatch):
    """If the nodes cannot be watched, nothing stays reserved (seam: the creation of an agent)."""

    def fail(node_id):
        raise ray.exceptions.ActorUnschedulableError("no")

    cluster = RayVirtualCluster([1], use_gpus=False, monitor_memory=True)
    with monkeypatch.context() as patch:
        patch.setattr(_agent, "_create_actor", fail)
        with pytest.raises(ray.exceptions.ActorUnschedulableError):
            cluster.reserve()
    assert repr(cluster).endswith("not reserved)")


def test_gpu_values(local_ray, monkeypatch):
    """GPU memory is returned as values (seam: the sample)."""
    monkeypatch.setattr(meters, "take_sample", lambda: (9, 4, 5, 6, [(3, 1, 2)], 7, 8.0))
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        (usage,) = cluster.get_resource_usage()
    assert usage.gpu_memory == (GpuMemory(total_bytes=3, used_bytes=1, peak_bytes=2),)
    assert (usage.memory_peak_bytes, usage.samples, usage.sampled_at) == (6, 7, 8.0)

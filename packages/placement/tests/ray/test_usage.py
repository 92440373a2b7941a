# SPDX-License-Identifier: Apache-2.0
"""The use of resources by processes and nodes, as node agents measure it."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray

from fairlead_placement import GpuMemory, NodeAgent, PlacementError, ProcessUsage, RayVirtualCluster
from fairlead_placement._nodes import agent as _agent
from fairlead_placement.extension import run_on_nodes, usage_on_nodes


@pytest.fixture
def node_id(local_ray):
    return ray.nodes()[0]["NodeID"]


@pytest.fixture
def agent(node_id):
    return NodeAgent(node_id)


@pytest.fixture
def requests(monkeypatch):
    """Return a list to which every request to an agent is added, by method. All requests are made."""
    made = []
    collect = _agent.collect

    def counted(requests, timeout_s):
        made.extend(request.args[0] for request in requests.values())
        return collect(requests, timeout_s)

    monkeypatch.setattr(_agent, "collect", counted)
    return made


def watchers(agent):
    """Return how many threads of the agent take samples."""
    return agent.run(lambda: [thread.name for thread in threading.enumerate()]).count("fairlead-memory")


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


def test_processes(agent, child, eventually):
    """CPU time, memory and threads of processes are reported in the order requested, as immutable values."""
    began, before = time.time(), cpu_seconds(child.pid)
    mine, busy = agent.usage([os.getpid(), child.pid])
    first, used = time.time(), cpu_seconds(child.pid)

    assert [type(mine), mine.pid, busy.pid] == [ProcessUsage, os.getpid(), child.pid]
    assert busy.cpu_percent > 0  # since it started
    assert 64 << 20 < busy.rss_bytes < 256 << 20
    assert busy.num_threads == 1
    assert mine.num_threads >= threading.active_count()
    assert mine.rss_bytes > 0
    assert eventually(lambda: cpu_seconds(child.pid) >= used + 0.3, 60)
    second, enough = time.time(), cpu_seconds(child.pid)
    (again,) = agent.usage([child.pid])
    ended, last = time.time(), cpu_seconds(child.pid)
    # Since the last request. However slow the machine is, the agent measured within these moments.
    assert 100 * (enough - used) / (ended - began) <= again.cpu_percent <= 100 * (last - before) / (second - first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.cpu_percent = 0.0


def test_a_process_that_stands_still(agent, child, stop_process):
    """The CPU percentage covers the time since the last request, not the whole life."""
    with stop_process(child.pid):
        assert [agent.usage([child.pid])[0].cpu_percent > 0 for _ in range(2)] == [True, False]


def test_a_process_that_has_gone(agent, child):
    """A process that never existed, has ended, or is a zombie is left out."""
    assert len(agent.usage([child.pid])) == 1
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [one.pid for one in agent.usage([child.pid, os.getpid(), 2**22 + 1])] == [os.getpid()]
    child.wait()
    assert agent.usage([child.pid]) == []
    assert agent.usage([]) == []


def test_several_nodes_at_once(agent, child):
    """There is one request to each node, and a failure is returned as a value; the agent counts requests."""
    before = agent.requests()
    found = usage_on_nodes({agent.node_id: [os.getpid(), child.pid]}, timeout_s=60)
    assert [type(one) for one in found[agent.node_id]] == [ProcessUsage, ProcessUsage]
    assert isinstance(run_on_nodes(int, {agent.node_id: ["x"]})[agent.node_id], ValueError)
    now = agent.requests()
    assert {name: now[name] - before.get(name, 0) for name in now} == {"usage": 1, "run": 1}
    assert usage_on_nodes({}) == {}


def test_functions_on_nodes(agent, eventually):
    """An agent runs functions that the nodes cannot import, and so does the agent that takes its place."""

    def double(value):
        return 2 * value

    node_id = agent.node_id
    assert [run_on_nodes(double, {node_id: [value]})[node_id] for value in (1, 2, 3)] == [2, 4, 6]
    pid = agent.run(os.getpid)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert run_on_nodes(double, {node_id: [4]}) == {node_id: 8}
    offset = 5
    assert run_on_nodes(lambda value: value + offset, {node_id: [1]}) == {node_id: 6}


def test_one_sample(local_ray, agent, requests):
    """Without `monitor_memory` each call takes one sample, with one request to each node, and no sampling goes on."""
    with RayVirtualCluster([1, 2], use_gpus=False) as cluster:
        assert requests == []
        (usage,) = cluster.get_resource_usage()
        assert requests == ["memory"]
        assert watchers(agent) == 0
    assert usage.node_id == agent.node_id
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


def test_monitoring(local_ray, agent, requests, eventually):
    """With `monitor_memory` samples are taken once a second until shutdown, and the peak is kept."""
    with RayVirtualCluster([1, 2], use_gpus=False, monitor_memory=True, name="watched") as cluster:
        assert requests == ["memory"]
        began = time.monotonic()
        first, *_, later = seen = wait_for_samples(cluster, 2, eventually)
        assert requests == ["memory"] * (1 + len(seen))
        assert first.samples >= 2
        # The pauses between them last a second or longer.
        assert taken_by_itself(seen) <= time.monotonic() - began + 1
        assert later.memory_peak_bytes >= max(one.memory_used_bytes for one in seen)
        assert later.sampled_at > first.sampled_at
        assert watchers(agent) == 1
        assert "release" not in requests
    assert requests.count("release") == 1
    assert eventually(lambda: watchers(agent) == 0)


def test_two_clusters(local_ray, agent, eventually):
    """A cluster that stops watching a node does not stop another's samples; each has its own count."""
    one = RayVirtualCluster([1], use_gpus=False, monitor_memory=True).reserve()
    wait_for_samples(one, 1, eventually)
    other = RayVirtualCluster([1], use_gpus=False, monitor_memory=True).reserve()
    assert watchers(agent) == 2
    assert other.get_resource_usage()[0].samples < one.get_resource_usage()[0].samples
    one.shutdown()
    assert eventually(lambda: watchers(agent) == 1)
    wait_for_samples(other, 2, eventually)
    other.shutdown()
    assert eventually(lambda: watchers(agent) == 0)


@pytest.mark.nightly
def test_an_agent_that_dies(local_ray, agent, eventually):
    """When an agent has died, the next request creates a new one, which starts to sample from zero."""
    with RayVirtualCluster([1], use_gpus=False, monitor_memory=True) as cluster:
        assert eventually(lambda: cluster.get_resource_usage()[0].samples >= 4)
        (before,) = cluster.get_resource_usage()
        pid = agent.run(os.getpid)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: agent.run(os.getpid) != pid)
        (after,) = cluster.get_resource_usage()
        assert 1 <= after.samples < before.samples
        assert watchers(agent) == 1
    assert eventually(lambda: watchers(agent) == 0)


def test_no_agent(local_ray, monkeypatch):
    """If the nodes cannot be watched, nothing stays reserved (seam: the answer of the agent)."""

    def fail(requests, timeout_s):
        return dict.fromkeys(requests, (None, ray.exceptions.ActorUnschedulableError("no")))

    cluster = RayVirtualCluster([1], use_gpus=False, monitor_memory=True)
    with monkeypatch.context() as patch:
        patch.setattr(_agent, "collect", fail)
        with pytest.raises(PlacementError, match="could not do 'memory'"):
            cluster.reserve()
    assert repr(cluster).endswith("not reserved)")


def test_gpu_values(agent, monkeypatch):
    """GPU memory is returned as values (seam: the agent's answer)."""
    row = (9, 4, 5, 6, [(3, 1, 2)], 7, 8.0)
    monkeypatch.setattr(NodeAgent, "_ask", lambda *args: row)
    usage = agent.memory()
    assert usage.gpu_memory == (GpuMemory(total_bytes=3, used_bytes=1, peak_bytes=2),)
    assert (usage.memory_peak_bytes, usage.samples, usage.sampled_at) == (6, 7, 8.0)

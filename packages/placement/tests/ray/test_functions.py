# SPDX-License-Identifier: Apache-2.0
"""Functions on nodes, on threads of this process and in tasks."""

import os
import time

import pytest
import ray

from fairlead_placement import (
    PlacementError,
    PlacementTimeoutError,
    RayVirtualCluster,
    lease_ports,
    release_ports,
)
from fairlead_placement._nodes import functions
from fairlead_placement.extension import run_on_nodes


@pytest.fixture(scope="module")
def cluster(raylets):
    """Start three nodes of 2 CPUs."""
    with raylets({"num_cpus": 2}, [{"num_cpus": 2}] * 2, quick_deaths=True, logging_level="error") as made:
        yield made


@pytest.fixture
def ids(cluster):
    return [row["NodeID"] for row in ray.nodes() if row["Alive"]]


@pytest.fixture(params=["threads", "tasks"])
def where(request, monkeypatch, cluster):
    """Run functions as on this machine, or as on others (seam: which nodes are here)."""
    if request.param == "tasks":
        monkeypatch.setattr(functions, "find_here", lambda node_ids: frozenset())
    return request.param


def test_run_on_nodes(ids, where, tmp_path):
    """A function runs on several nodes at once; a failure on one does not hide the results of the others."""
    over = tmp_path / "over"
    offset = 5

    def add(wanted):
        if wanted == "none":
            raise KeyError(wanted)
        while wanted == "slow" and not over.exists():
            time.sleep(0.02)
        return wanted if isinstance(wanted, str) else wanted + offset

    assert run_on_nodes(add, {one: (number,) for number, one in enumerate(ids)}) == dict(
        zip(ids, (5, 6, 7), strict=True)
    )
    found = run_on_nodes(add, {ids[0]: ("none",), ids[1]: ("slow",), ids[2]: ("fine",)}, timeout_s=3.0)
    over.touch()
    assert isinstance(found[ids[0]], KeyError)
    assert isinstance(found[ids[1]], PlacementTimeoutError)
    assert f"The function 'add' has not returned on node {ids[1]} within 3 s" in str(found[ids[1]])
    assert found[ids[2]] == "fine"
    assert run_on_nodes(add, {}) == {}


def test_where_it_runs(ids, where):
    """On this machine a function runs in this process, and elsewhere in a worker of its node."""
    pids = run_on_nodes(lambda: (os.getpid(), ray.get_runtime_context().get_node_id()), dict.fromkeys(ids, ()))
    if where == "threads":
        assert {pid for pid, _ in pids.values()} == {os.getpid()}
        assert functions.find_here([*ids, "f" * 56]) == set(ids)
    else:
        assert [node_id for _, node_id in pids.values()] == ids


def test_a_function_that_ends_its_process(ids, monkeypatch, tmp_path):
    """It runs once, and the error says so; a call of sys.exit on a thread of this process does not end it."""
    calls = tmp_path / "calls"

    def end():
        with calls.open("a") as file:
            file.write("x")
        os._exit(3)

    def leave():
        raise SystemExit

    message = "ended its process on node .* It was called once"
    with monkeypatch.context() as patch:
        patch.setattr(functions, "find_here", lambda node_ids: frozenset())
        (error,) = run_on_nodes(end, {ids[0]: ()}).values()
        assert calls.read_text() == "x"
        with pytest.raises(PlacementError, match=message):
            raise error
    with pytest.raises(PlacementError, match=message):
        raise run_on_nodes(leave, {ids[0]: ()})[ids[0]]


def test_all_cpus_are_taken(ids, where):
    """A function runs even where all CPUs are taken."""
    with RayVirtualCluster([2, 2, 2], use_gpus=False) as cluster:
        assert len(cluster.slots()) == 6
        assert run_on_nodes(int, dict.fromkeys(ids, ("7",)), timeout_s=30) == dict.fromkeys(ids, 7)


def test_a_node_that_is_lost(cluster, ids, monkeypatch, eventually):
    """A node that has gone is an error that names it, and does not hide the others."""
    node = cluster.add_node(num_cpus=1)
    assert eventually(lambda: sum(row["Alive"] for row in ray.nodes()) == 4)
    cluster.remove_node(node, allow_graceful=False)
    assert eventually(lambda: sum(row["Alive"] for row in ray.nodes()) == 3)
    monkeypatch.setattr(functions, "find_here", lambda node_ids: frozenset())
    found = run_on_nodes(int, {ids[0]: ("7",), node.node_id: ("7",)}, timeout_s=30)
    assert found[ids[0]] == 7
    with pytest.raises(PlacementError, match=f"'int' could not run on node {node.node_id}"):
        raise found[node.node_id]


def test_a_silent_head(cluster, ids, where, stop_process):
    """On this machine functions need no head; elsewhere a head that does not answer is an error in time."""
    with stop_process(cluster.head_node.all_processes["gcs_server"][0].process.pid):
        found = run_on_nodes(int, {ids[1]: ("7",)}, timeout_s=2.0)[ids[1]]
    assert found == 7 or (where == "tasks" and isinstance(found, PlacementTimeoutError))


def test_an_agent_that_the_head_does_not_know(cluster, ids, stop_process, call_in_time, agent_pids, eventually):
    """While the head is silent, a lease that needs an agent fails in time, and so does what others do meanwhile."""
    with RayVirtualCluster([1, 1, 1], use_gpus=False) as made:
        first, *others = made.slots()
        with lease_ports([first])[0][0]:
            with stop_process(cluster.head_node.all_processes["gcs_server"][0].process.pid):
                calls = {
                    "without an agent": lambda: lease_ports(others, timeout_s=1.0),
                    "with an agent": lambda: time.sleep(1.0) or lease_ports([first], timeout_s=1.0),
                }
                outcomes = call_in_time(calls, 2.0)
            assert isinstance(outcomes["without an agent"], PlacementTimeoutError)
            outcomes["with an agent"][0][0].release()
        assert eventually(lambda: not agent_pids(*{slot.node_id for slot in others} - {first.node_id}))
        release_ports([lease for leases in lease_ports(others) for lease in leases])


SLOW_PIP = """
    import os, sys, time
    import ray
    from fairlead_placement import RayVirtualCluster, lease_ports

    os.makedirs("slow")
    with open("slow/setup.py", "w") as file:
        file.write("import time; time.sleep(60); from setuptools import setup; setup(name='slow')")
    environment = {"pip": {"packages": [os.path.abspath("slow")], "pip_check": False}}
    options = {"include_dashboard": False, "logging_level": "error", "runtime_env": environment}
    ray.init(address="local", num_cpus=4, num_gpus=1, **options)
    cluster = RayVirtualCluster([2], use_gpus=False)
    slots = cluster.slots()

    def measure(function, *args, **options):
        began = time.monotonic()
        function(*args, **options)
        return round(time.monotonic() - began, 2)

    took = [measure(lease_ports, slots), measure(RayVirtualCluster([1], gpu_ids=[0]).reserve)]
    print(took, max(took) < 30)
"""


@pytest.mark.nightly
def test_a_slow_environment(run_script):
    """A pip install of the job that takes a minute delays neither a lease nor the ids of accelerators."""
    assert run_script(SLOW_PIP).split()[-1] == "True"

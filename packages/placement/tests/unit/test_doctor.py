# SPDX-License-Identifier: Apache-2.0
"""What the doctor says about facts of a cluster: each fault is injected, and named with its node and a remedy."""

import itertools
import json
import platform
import socket
from dataclasses import asdict, replace

import pytest
import ray

from fairlead_placement import PlacementError
from fairlead_placement._doctor import probe
from fairlead_placement._doctor.examine import Expected, NodeFacts, judge
from fairlead_placement.spi import compare_clocks

PROBE = {
    "ray": ray.__version__,
    "python": platform.python_version(),
    "shm_bytes": 2**30,
}
RESOURCES = {"CPU": 8.0, "GPU": 8.0, "object_store_memory": 2.0**29}


def node(number, **changes):
    facts = {
        "node_id": f"{number:08x}" + "0" * 48,
        "address": f"10.0.0.{number}",
        "state": "alive",
        "resources": RESOURCES,
        "probe": PROBE,
        "clock": (0.0, 0.001),
    }
    return NodeFacts(**{**facts, **changes})


def connections(first_error=""):
    """Each of three nodes connects to both others."""
    pairs = itertools.permutations([node(number).node_id for number in (1, 2, 3)], 2)
    return [(here, there, 1400, "" if at else first_error) for at, (here, there) in enumerate(pairs)]


def cluster(*last, **changes):
    """Facts about three healthy nodes, and of others."""
    facts = {"expected": Expected(), "nodes": [node(1), node(2), node(3), *last], "head_s": 0.001}
    return {**facts, "tries": connections(), **changes}


def faults(facts):
    return {check.name: [fault.what for fault in check.faults] for check in judge(**facts) if check.faults}


def test_healthy():
    """Nothing is wrong with equal nodes, as many as expected, also when the head of the cluster has no accelerators."""
    head = node(9, resources={"CPU": 1.0, "object_store_memory": 1.0})
    assert faults(cluster(head, expected=Expected(4))) == {}
    assert [(check.name, check.found) for check in judge(**cluster(head))] == [
        ("nodes", "4 alive"),
        ("agents", "4 of 4 nodes answer"),
        ("accelerators", "24 GPU"),
        ("versions", f"Ray {ray.__version__}, Python {platform.python_version()}"),
        ("clocks", "within 0.00 s (measured to 0.001 s)"),
        ("shared memory", "/dev/shm has 1.0 GiB or more"),
        ("ports", "6 of 6 pairs of nodes connect"),
        ("head", "answers in 1.0 ms"),
    ]


# By what is wrong: the facts, the check that fails, and what it says.
FAULTS = {
    "missing node": (
        cluster(node(4, state="dead", probe=None), expected=Expected(4)),
        "nodes",
        "3 nodes are alive, 4 were expected; not alive: 10.0.0.4 (dead)",
    ),
    "one node too many": (cluster(expected=Expected(2)), "nodes", "3 nodes are alive, 2 were expected"),
    "draining": (
        cluster(node(4, state="draining", probe=None)),
        "nodes",
        "node 00000004 (10.0.0.4) is draining: it ends soon",
    ),
    "silent": (
        cluster(node(4, probe=PlacementError("no answer within 5 s"))),
        "agents",
        "node 00000004 (10.0.0.4) did not answer: no answer within 5 s",
    ),
    "fewer accelerators than the others": (
        cluster(node(4, resources={**RESOURCES, "GPU": 7.0})),
        "accelerators",
        "node 00000004 (10.0.0.4) has 7 GPU instead of 8",
    ),
    "fewer accelerators than expected": (
        cluster(node(4, resources={"CPU": 8.0}), expected=Expected(4, {"GPU": 8.0})),
        "accelerators",
        "node 00000004 (10.0.0.4) has 0 GPU instead of 8",
    ),
    "another Ray": (
        cluster(node(4, probe={**PROBE, "ray": "2.9.0"})),
        "versions",
        "node 00000004 (10.0.0.4) runs Ray 2.9.0, this process " + ray.__version__,
    ),
    "another Python": (
        cluster(node(4, probe={**PROBE, "python": "3.9.1"})),
        "versions",
        "node 00000004 (10.0.0.4) runs Python 3.9.1, this process " + platform.python_version(),
    ),
    "a clock behind": (
        cluster(node(4, clock=(-3.0, 0.001))),
        "clocks",
        "node 00000004 (10.0.0.4) has a clock that is 3.0 s behind the others",
    ),
    "little shared memory": (
        cluster(node(4, probe={**PROBE, "shm_bytes": 2**26})),
        "shared memory",
        "node 00000004 (10.0.0.4) has 64 MiB in /dev/shm, less than the object store of 512 MiB",
    ),
    "a firewall": (
        cluster(tries=connections("timed out")),
        "ports",
        "node 00000001 (10.0.0.1) cannot connect to 10.0.0.2:1400: timed out",
    ),
    "a slow head": (cluster(head_s=0.4), "head", "Ray's head (GCS) takes 400 ms to answer"),
}


@pytest.mark.parametrize(("facts", "name", "what"), FAULTS.values(), ids=FAULTS)
def test_faults(facts, name, what):
    """Each fault is found by its check and by no other, and comes with a remedy."""
    assert faults(facts) == {name: [what]}
    (fault,) = [fault for check in judge(**facts) for fault in check.faults]
    assert fault.remedy.endswith(".")
    assert (fault.node_id[:8] or "node") in fault.what or fault.node_id == ""
    json.dumps(asdict(fault))


def test_this_machine_has_another_clock():
    """A wrong clock of this machine is not blamed on the nodes."""
    nodes = [replace(node(number), clock=(30.0, 0.001)) for number in (1, 2, 3)]
    assert faults(cluster(nodes=nodes)) == {}


def test_uncertain_clock():
    """A clock is not called wrong when the measurement may be that wrong."""
    assert faults(cluster(node(4, clock=(2.0, 1.5)))) == {}


def test_clocks_of_two_processes():
    """A clock is compared at the middle of the fastest trip, and a failure keeps what was measured before it."""
    here = iter([0.0, 4.0, 10.0, 11.0, 20.0, 29.0, 30.0, 31.0])
    there = iter([7.0, 15.5, 29.5, PlacementError("the agent is gone")])
    assert compare_clocks(lambda: next(there), lambda: next(here)) == (5.0, 0.5)
    assert compare_clocks(lambda: PlacementError("it never answered"), lambda: 0.0) is None


def test_connections():
    """A node connects to all targets at once, and reports why it cannot."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        errors = probe.try_to_connect([server.getsockname(), closed.getsockname()], 5.0)
    assert errors[0] == ""
    assert "refused" in errors[1]
    assert probe.try_to_connect([], 5.0) == []

# SPDX-License-Identifier: Apache-2.0
"""Asks a cluster for the facts that the checks decide on."""

import contextlib
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import ray

from .._nodes.agent import NodeAgent, run_on_nodes
from .._nodes.directory import compare_clocks
from .._nodes.head import ask_head
from .._nodes.ports import PORT_HIGH, PORT_LOW, PortLease
from .._ray_private import draining_nodes
from . import probe
from .checks import Check, Expected, Facts, NodeFacts, judge

# How many nodes connect to each other.
SAMPLE = 8
ROUNDS = 8
CONNECT_S = 3.0
# From the moment the first node listens until the last one has tried to connect.
LISTEN_S = 15.0
ray.cloudpickle.register_pickle_by_value(probe)


def examine_cluster(expected: Expected, *, timeout_s: float = 60.0) -> tuple[Check, ...]:
    """Check the cluster that this process is attached to. All nodes together may take `timeout_s` for each request."""
    rows = ask_head("list the nodes", ray.nodes, timeout_s=timeout_s)
    leaving = ask_head("list the draining nodes", draining_nodes, timeout_s=timeout_s)
    alive = [row["NodeID"] for row in rows if row["Alive"] and row["NodeID"] not in leaving]
    probes = run_on_nodes(probe.look_at_node, dict.fromkeys(alive, ()), timeout_s=timeout_s)
    answering = [node_id for node_id in alive if not isinstance(probes[node_id], Exception)]
    clocks = {node_id: _compare_clock(node_id, timeout_s) for node_id in answering}
    address = {row["NodeID"]: row["NodeManagerAddress"] for row in rows}
    refused, pairs = _connect_pairs({one: address[one] for one in _spread(answering, SAMPLE)}, timeout_s)
    return judge(
        Facts(
            nodes=[
                _facts(row, row["NodeID"] in leaving, probes.get(row["NodeID"]), clocks.get(row["NodeID"]))
                for row in rows
            ],
            driver={"ray": ray.__version__, "python": platform.python_version()},
            head_s=_time_head(timeout_s),
            refused=refused,
            pairs=pairs,
            expected=expected,
        )
    )


def _facts(row: dict[str, Any], leaving: bool, found: Any, clock: tuple[float, float] | None) -> NodeFacts:
    offset, error = clock or (None, 0.0)
    failed = isinstance(found, Exception)
    return NodeFacts(
        node_id=row["NodeID"],
        address=row["NodeManagerAddress"],
        state="dead" if not row["Alive"] else "draining" if leaving else "alive",
        resources=row["Resources"],
        probe=None if failed else found,
        error=str(found).splitlines()[0] if failed else "",
        clock_s=offset,
        clock_error_s=error,
    )


def _compare_clock(node_id: str, timeout_s: float) -> tuple[float, float] | None:
    ask = {node_id: ()}
    return compare_clocks(lambda: run_on_nodes(probe.read_clock, ask, timeout_s=timeout_s)[node_id], time.time)


def _spread(node_ids: Sequence[str], count: int) -> list[str]:
    """Return some nodes, evenly spread over all of them."""
    step = max(1.0, len(node_ids) / count)
    return [node_ids[int(at * step)] for at in range(min(count, len(node_ids)))]


def _connect_pairs(address: dict[str, str], timeout_s: float) -> tuple[list[tuple[str, str, int, str]], int]:
    """Have each node listen at a leased port, and all others connect to it; return the failures, and the tries."""
    ports: dict[str, int] = {}
    refused = []
    with contextlib.ExitStack() as leases:
        for node_id in address:
            found, _, _ = NodeAgent(node_id, timeout_s=timeout_s).lease(1, PORT_LOW, PORT_HIGH)
            for port, lease_id in found:
                leases.enter_context(PortLease(address[node_id], port, node_id, lease_id))
                ports[node_id] = port
        listening = {node_id: (port, LISTEN_S) for node_id, port in ports.items()}
        run_on_nodes(probe.listen, listening, timeout_s=timeout_s)
        targets = {here: [there for there in ports if there != here] for here in address}
        asks = {here: ([(address[to], ports[to]) for to in there], CONNECT_S) for here, there in targets.items()}
        errors = run_on_nodes(probe.try_to_connect, asks, timeout_s=timeout_s)
    for here, found_errors in errors.items():
        if isinstance(found_errors, Exception):
            found_errors = [str(found_errors)] * len(targets[here])
        refused += [
            (here, there, ports[there], error)
            for there, error in zip(targets[here], found_errors, strict=True)
            if error
        ]
    return refused, sum(map(len, targets.values()))


def _time_head(timeout_s: float) -> float:
    """Return how long Ray's head takes to answer, the median of several requests."""
    times = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        ask_head("list the nodes", ray.nodes, timeout_s=timeout_s)
        times.append(time.monotonic() - began)
    return statistics.median(times)
